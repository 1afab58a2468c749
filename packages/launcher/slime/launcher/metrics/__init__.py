"""What a run reports: files, TensorBoard, the console."""
