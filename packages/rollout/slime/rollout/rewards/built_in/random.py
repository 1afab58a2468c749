"""0 or 1 at random, the same in every run for the same sample: for trying out a pipeline."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from slime.types import Sample

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs


def reward(args: RolloutArgs, sample: Sample) -> float:
    return float(random.Random(f"{getattr(args, 'rollout_seed', 0)}:{sample.index}").random() < 0.5)
