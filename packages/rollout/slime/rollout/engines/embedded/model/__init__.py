"""The model of an embedded engine: loading, decoding, sampling, and new weights."""
