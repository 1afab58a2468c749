"""Filters that keep or drop a finished group."""
