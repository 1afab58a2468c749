"""FSDP2 over a transformers causal language model; one process without sharding, or several."""
