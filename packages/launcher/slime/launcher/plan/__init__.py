"""Predicts the placement, the batches and the memory of a run without starting it."""
