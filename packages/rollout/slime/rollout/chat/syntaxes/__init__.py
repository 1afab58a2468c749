"""Syntaxes of tool calls and reasoning, one for each family of models."""
