"""Sends what changed between two versions of the weights: encoded once, carried to the engines in several ways."""
