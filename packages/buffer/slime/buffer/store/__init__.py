"""Storage of the buffer: its state in SQLite or PostgreSQL, its samples in files or objects."""
