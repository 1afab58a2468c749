"""1 for the label exactly; else half the share of correct positions, with the end of the response as one more.

With n characters in the label and c of them right in their places: 0.5 * c / (n + 1). The partial reward lets
an untrained model improve step by step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.types import Sample

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs


def reward(args: RolloutArgs, sample: Sample) -> float:
    label = str(sample.label)
    text = visible(sample)
    ended = sample.status is Sample.Status.COMPLETED
    if ended and text == label:
        return 1.0
    right = sum(a == b for a, b in zip(text, label, strict=False))
    # The end is in the right place, but characters before it are wrong.
    right += ended and len(text) == len(label)
    return 0.5 * right / (len(label) + 1)


def visible(sample: Sample) -> str:
    """Returns the response without the blanks that a tokenizer of single characters puts between them."""
    return sample.response if " " in str(sample.label) else sample.response.replace(" ", "")
