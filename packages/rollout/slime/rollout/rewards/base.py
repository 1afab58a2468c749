"""Interface of a reward, and the part of a response that rewards read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from slime.types import Sample

# (args, sample) -> a number, or a dict of them with `--reward-key`.
RewardFunction = Callable[[Any, Sample], Awaitable[Any]]

END_OF_THINKING = "</think>"


def after_thinking(response: str) -> str:
    """Returns the text after the last `</think>`; the whole response if there is none."""
    return response.rpartition(END_OF_THINKING)[2]
