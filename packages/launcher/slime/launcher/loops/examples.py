"""Samples of a step for people to look at, which are read while the trainer works on the step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import numpy as np

from slime.launcher.run_directory.kept_samples import SAMPLES_PER_GROUP
from slime.launcher.services.beside_training import BesideTraining
from slime.launcher.services.supervisor import Supervisor
from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.clients.buffer import SealedStep
from slime.types.errors import SlimeError

log = logging.getLogger(__name__)


class Examples:
    """The first samples of the first `num_groups` groups of each step."""

    def __init__(self, supervisor: Supervisor, num_groups: int) -> None:
        self._supervisor = supervisor
        self._num_groups = num_groups
        self._positions: dict[int, list[int]] = {}
        self._reading: BesideTraining[list[Sample]] = BesideTraining(supervisor)

    def choose(self, step: int, sealed: SealedStep) -> None:
        """Chooses positions in a step that was sealed, perhaps again, with other samples."""
        counts: dict[int, int] = {}
        positions = []
        for position in range(len(sealed)):
            group = sealed[position].group_index
            counts[group] = counts.get(group, 0) + 1
            if len(counts) > self._num_groups:
                break
            if counts[group] <= SAMPLES_PER_GROUP:
                positions.append(position)
        self._positions[step] = positions

    def begin(self, step: int, buffer: BufferClient) -> list[int]:
        """Begins to read the samples, which the step must not lose before `take`; returns their positions."""
        positions = self._positions.get(step, [])
        self._reading.begin(step, partial(self._read, step, buffer, positions))
        return positions

    def _read(self, step: int, buffer: BufferClient, positions: list[int]) -> list[Sample]:
        try:
            # The trainer, which works on all of them, finds out for itself which samples are damaged.
            return self._supervisor.call(lambda: list(buffer.read_step(step, positions, leave_damaged=True)))
        except SlimeError as error:
            log.warning("no samples of step %d can be shown: %s", step, error)
            return []

    def take(self, step: int, log_probs: Mapping[int, np.ndarray]) -> list[Sample]:
        """Returns the samples, with the trainer's log-probs, by position, as `trainer_log_probs`."""
        samples = self._reading.take(step, [])
        for position, sample in zip(self._positions.pop(step, []), samples, strict=False):
            if position in log_probs:
                sample.trainer_log_probs = log_probs[position]  # type: ignore[attr-defined]
        return samples
