"""Names, shapes and layouts of weights."""
