"""Checks of the settings of a whole run."""
