"""Groups that a rollout function of the user submits to `GenerateState(args)`, and counts of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from slime.rollout.settings.plugin_args import RolloutArgs
from slime.types import Sample


class SubmittedGroups:
    """Attributes of `GenerateState` that rollout functions written for slime use. On one event loop.

    pendings: tasks of groups that still generate. remaining_batch_size: groups submitted and not dropped; the function
    itself subtracts dropped ones. aborted: set by the function once it has enough. dp_counts: requests in each replica
    of data-parallel attention; dp_rank: the replica chosen last.
    """

    # Set by `group.py`, which needs the state.
    generate_group: ClassVar[Callable[..., Coroutine[Any, Any, list[Any]]]]
    args: RolloutArgs
    sampling_params: dict[str, Any]

    def reset(self) -> None:
        """Forgets the submitted groups."""
        self.pendings: set[asyncio.Task[Any]] = set()
        self.remaining_batch_size = 0
        self.aborted = False

    def prepare_submitting(self) -> None:
        self.reset()
        self.dp_rank = 0
        self.dp_counts = [0] * int(getattr(self.args, "sglang_dp_size", None) or 1)

    @property
    def group_sampling_seeds(self) -> list[int] | None:
        """A sampling seed for each sample of a group; None where sampling is not deterministic."""
        if not getattr(self.args, "sglang_enable_deterministic_inference", False):
            return None
        return [self.args.rollout_seed + number for number in range(self.args.n_samples_per_prompt)]

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """Yields one of the replicas with the fewest requests, and counts one more request there until the end."""
        fewest = min(self.dp_counts)
        rank = random.choice([rank for rank, count in enumerate(self.dp_counts) if count == fewest])
        self.dp_counts[rank] += 1
        self.dp_rank = rank
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    def submit_generate_tasks(self, samples: list[list[Sample]]) -> None:
        """Starts to generate and score groups, as tasks of the running event loop in `pendings`."""
        for group in samples:
            params = dict(self.sampling_params)
            self.pendings.add(asyncio.create_task(self.generate_group(self.args, group, params, evaluation=False)))
        self.remaining_batch_size += len(samples)
