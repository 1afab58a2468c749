"""Protocols of agents: each translates to and from one request and one answer."""
