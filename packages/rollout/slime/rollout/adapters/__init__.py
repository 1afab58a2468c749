"""Adapters: reward functions and environments written for other libraries, as functions that slime calls.

They import those libraries only where a game of textarena is made or an environment of verifiers is played.
"""
