"""The model of an embedded engine: loading, decoding, sampling and weight updates."""
