"""The reward: a function that scores one response. Named by `custom_rm_path` in config.yaml."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from slime.types import Sample


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """Returns 1 for a multiple of the label with at least two digits, else 0."""
    answer = sample.response
    if not answer.isdecimal() or int(answer) < 10:
        return 0.0
    return float(int(answer) % int(sample.label) == 0)
