"""slime-trainer: turns sealed steps of samples into weight updates. Importing it loads no torch."""
