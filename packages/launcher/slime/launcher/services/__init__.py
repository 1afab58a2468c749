"""Starts, watches and calls the services of one run."""
