"""Experts of tierd for other people's model code. Each integration has an extra of its own; nothing here is imported
by the daemon.
"""
