"""From sample summaries to the micro-batches of every rank, and from samples to packed rows."""
