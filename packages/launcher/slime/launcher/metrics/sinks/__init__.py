"""Sinks of metrics besides a run's own files: TensorBoard, Weights & Biases, Trackio, MLflow, SwanLab."""
