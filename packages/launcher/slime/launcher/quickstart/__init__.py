"""The README's first command: real training of a small model on a CPU."""
