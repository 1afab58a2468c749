"""Dynamic sampling filters: the answer of a filter, its use by the rollout, and filters that drop equal rewards.

Groups whose rewards are all equal have no advantage. With --overlong-buffer-len the rewards before the penalty are
compared, as in DAPO (arXiv 2503.14476, equation 11): a group of right answers of different lengths is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.types import Sample
from slime.types.errors import PluginError

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs


@dataclass
class DynamicFilterOutput:
    """The answer of a filter. keep: whether the group is trained on; reason: the word under which a drop is counted;
    keep_when_insufficient: keep it after all where dropping would leave the iteration short of groups."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False

    def kept(self, short: bool) -> bool:
        """Returns whether the group is trained on. short: the iteration would lack groups without it."""
        return self.keep or (self.keep_when_insufficient and short)

    @classmethod
    def of(cls, answer: Any) -> DynamicFilterOutput:
        """Reads a filter's answer: a DynamicFilterOutput, a bool, or a scalar of an array or tensor.

        Raises PluginError for anything else: None would drop, and a coroutine keep, every group.
        """
        if isinstance(answer, cls):
            return answer
        if isinstance(answer, (bool, int)) or hasattr(answer, "item"):
            return cls(keep=bool(answer))
        got = type(answer).__name__
        raise PluginError(
            f"--dynamic-sampling-filter-path: answered {got}, expected DynamicFilterOutput(keep=...) or a bool",
            field="--dynamic-sampling-filter-path", value=got, expected="DynamicFilterOutput or bool",
        )  # fmt: skip


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Returns the answer of a filter as a DynamicFilterOutput; without a filter every group is kept."""
    return DynamicFilterOutput(keep=True) if fn is None else DynamicFilterOutput.of(fn(*args, **kwargs))


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Returns whether a group is dropped.

    remaining_batch_size: number of groups accepted or still running, this one included. target_data_size: number of
    groups that the rollout needs. A group with `keep_when_insufficient` is kept if none of them can be spared.
    """
    return not output.kept(short=remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts dropped groups by their reason."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Counts a dropped group under its reason; without a reason it is not counted."""
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """Returns the metrics `rollout/dynamic_filter/drop_REASON`."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}


def check_reward_nonzero_std(args: RolloutArgs, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Drops groups whose rewards differ by at most 1e-6."""
    rewards = [_reward(args, sample) for sample in samples]
    keep = max(rewards) - min(rewards) > 1e-6
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: RolloutArgs, samples: list[Sample], **kwargs: Any
) -> DynamicFilterOutput:
    """Drops groups with equal rewards too, but keeps them where the iteration would otherwise lack groups."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output


def _reward(args: RolloutArgs, sample: Sample) -> float:
    before = sample.metadata.get("raw_reward") if getattr(args, "overlong_buffer_len", None) is not None else None
    return float(sample.get_reward_value(args) if before is None else before)
