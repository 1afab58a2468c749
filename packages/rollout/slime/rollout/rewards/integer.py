"""1 where the last integer of the response is the label."""

from __future__ import annotations

import re
from typing import Any

from slime.types import Sample

INTEGER = re.compile(r"-?\d+")


def reward(args: Any, sample: Sample) -> float:
    found = INTEGER.findall(sample.response)
    return 1.0 if found and int(found[-1]) == int(str(sample.label)) else 0.0
