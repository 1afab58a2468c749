"""Protocols that agents speak: each translates its bodies to `ModelRequest` and from `Answer`."""
