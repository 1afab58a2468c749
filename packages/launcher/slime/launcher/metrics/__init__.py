"""Reports of a run: files, the console, TensorBoard and trackers."""
