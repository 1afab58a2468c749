"""Megatron's torch_dist checkpoints: read and written tensor by tensor, without a model and without megatron-core."""
