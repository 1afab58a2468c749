"""Requests of the embedded engine, queued and run as batches of its model."""
