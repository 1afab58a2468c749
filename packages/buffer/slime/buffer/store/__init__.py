"""Where the buffer keeps its state and its samples."""
