"""`scripts/quickstart`, the README's first command: trains a small model on a CPU."""
