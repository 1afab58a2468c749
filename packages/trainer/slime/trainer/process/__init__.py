"""A trainer rank as a process: its peers and their meeting point."""
