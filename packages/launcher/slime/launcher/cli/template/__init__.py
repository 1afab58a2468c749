"""Files of the project that `slime init` writes."""
