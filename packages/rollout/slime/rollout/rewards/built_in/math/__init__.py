"""Grades mathematics: answers are compared by math-verify, in processes with limits."""
