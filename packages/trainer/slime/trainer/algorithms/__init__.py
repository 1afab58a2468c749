"""Reinforcement-learning algorithms as pure tensor functions: no model, no process group, no settings object."""
