"""Mirrors: copies of a store's files on other drives, planned, made, checked and repaired."""
