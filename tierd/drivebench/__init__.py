"""Measures how much of a drive's speed reaches a client of the daemon."""
