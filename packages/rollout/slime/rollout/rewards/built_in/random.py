"""0 or 1 at random, repeatable for each sample: to try out a pipeline."""

from __future__ import annotations

import random
from typing import Any

from slime.types import Sample


def reward(args: Any, sample: Sample) -> float:
    return float(random.Random(f"{getattr(args, 'rollout_seed', 0)}:{sample.index}").random() < 0.5)
