"""Experts computed beside their store, for nodes that are far from it."""
