"""Adapters: reward functions and environments written for other libraries, as functions that slime calls.

They import none of those libraries, save textarena when a game of it is made.
"""
