"""Compatibility: rewards under the names that code written for slime imports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from slime.rollout.generate.responses import trim
from slime.rollout.generate.state import ATTRIBUTE
from slime.rollout.rewards import score
from slime.rollout.rewards.built_in.remote import remote_rm
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.types import Sample

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

__all__ = ["async_rm", "batched_async_rm", "grade_answer_verl", "remote_rm"]


async def async_rm(args: RolloutArgs, sample: Sample, **kwargs: Any) -> Any:
    """Returns the reward of one sample: a number, or a dict. Takes the stop token off its response first."""
    _trim(args, [sample])
    return await score.async_rm(args, sample, **kwargs)


async def batched_async_rm(args: RolloutArgs, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """Returns the rewards of several samples, in order; --custom-rm-path gets them all at once."""
    _trim(args, samples)
    return await score.batched_async_rm(args, samples, **kwargs)


def _trim(args: RolloutArgs, samples: Iterable[Sample]) -> None:
    # A generate function may score its samples itself, before the service has trimmed them.
    state = getattr(args, ATTRIBUTE, None)
    if state is not None:
        for sample in samples:
            trim(state, sample)
