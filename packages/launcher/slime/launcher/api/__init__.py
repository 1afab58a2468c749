"""Training from Python: `from slime.launcher import train`."""
