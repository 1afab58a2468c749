"""1 where the last integer of the response is the label."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from slime.types import Sample
from slime.types.errors import InvalidField

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

INTEGER = re.compile(r"-?\d+")


def reward(args: RolloutArgs, sample: Sample) -> float:
    """Raises InvalidField for a label that is not an integer."""
    label = str(sample.label).strip()
    if not INTEGER.fullmatch(label):
        raise InvalidField(
            "label", label, "an integer", f"sample {sample.index} has the label {label!r}, expected an integer"
        )
    found = INTEGER.findall(sample.response)
    return 1.0 if found and int(found[-1]) == int(label) else 0.0
