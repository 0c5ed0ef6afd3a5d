"""Drives: how records are read into memory, and what can go wrong on the way."""
