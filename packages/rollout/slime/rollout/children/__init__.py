"""Processes that the rollout service starts: their environment and their pipes."""
