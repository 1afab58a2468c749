"""Finished samples for tests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from slime.types import Sample
from slime.types.clients import BufferClient


def finish(samples: Iterable[Sample], reward: float = 1.0) -> list[Sample]:
    """Gives each sample two prompt tokens and three response tokens."""
    finished = list(samples)
    for sample in finished:
        sample.tokens = np.array([1, 2, 3, 4, 5])
        sample.response = "345"
        sample.response_length = 3
        sample.loss_mask = np.array([1, 0, 1])
        sample.rollout_log_probs = np.array([-0.1, 0.0, -0.3])
        sample.reward = reward
        sample.status = Sample.Status.COMPLETED
        sample.weight_versions = ["3", "4"]
    return finished


def complete(client: BufferClient, count: int) -> list[int]:
    """Leases `count` groups and completes them; returns their indexes."""
    leased = client.lease_groups(count)
    assert len(leased) == count
    for lease in leased:
        client.complete_group(lease.token, finish(lease.group.samples))
    return [lease.group.group_index for lease in leased]
