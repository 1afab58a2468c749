"""Services that die or hang during a run: found, started again, and given what they need."""
