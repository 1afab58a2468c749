"""Starts lost services again: the buffer with its directory, the trainer with its state.

The rollout service starts its engines again; they get the trained weights before the next call of Generate or Evaluate.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slime.launcher.faults.restart_points import RestartPoints
from slime.launcher.services.processes import Process
from slime.launcher.services.supervisor import Supervisor
from slime.types.clients import BufferClient, RolloutClient, TrainerClient
from slime.types.clients.base import Client
from slime.types.errors import DeadlineExceeded, counted

log = logging.getLogger(__name__)

# A channel reaches a service that is back at its next attempt, at most a second later.
CONNECT_SECONDS = 30.0


@dataclass
class TrainerReplay:
    """Brings ranks that were started again to where the run was.

    settings: the trainer's. trained: returns the last step that was trained. groups_of: returns the number of groups of
    a step.
    """

    points: RestartPoints
    settings: Any
    clients: Sequence[TrainerClient]
    trained: Callable[[], int]
    groups_of: Callable[[int], int]
    timeout_seconds: float


class ServiceRestarts:
    """Starts lost services again. engines_lost: called if the engines will have the weights of their start."""

    def __init__(
        self,
        supervisor: Supervisor,
        buffer: BufferClient,
        rollout: RolloutClient | None,
        trainer: TrainerReplay | None,
        engines_lost: Callable[[], None],
    ) -> None:
        self._supervisor = supervisor
        self._buffer = buffer
        self._rollout = rollout
        self._trainer = trainer
        self._engines_lost = engines_lost

    def start_again(self, lost: Mapping[str, str]) -> None:
        """Starts the services named in `lost` again. Raises SlimeError if that fails; some services may then be
        running, and the call may be repeated."""
        kinds = {name.partition("-")[0] for name in lost}
        # The others need the buffer.
        if "buffer" in kinds:
            self._buffer_again(self._supervisor.named("buffer"))
        if "trainer" in kinds:
            self._trainer_again()
        if "rollout" in kinds and self._rollout is not None:
            self._engines_lost()
            self._again(self._supervisor.named("rollout"), self._rollout)

    def _buffer_again(self, processes: Sequence[Process]) -> None:
        start = processes[0].start
        assert start is not None, "the buffer was started before"
        # Its directory holds the place in the data; the checkpoint that the run began with may be deleted by now.
        self._again(processes, self._buffer, settings=dataclasses.replace(start.settings, data_place=None))

    def _again(self, processes: Sequence[Process], client: Client, **changes: Any) -> None:
        self._supervisor.end(processes)
        self._supervisor.spawn_again(processes)
        self._supervisor.start_again(processes, **changes)
        _connected(client)

    def _trainer_again(self) -> None:
        """Starts every rank again, because their collectives cannot continue without one of them."""
        supervisor, trainer = self._supervisor, self._trainer
        assert trainer is not None, "a run without a trainer has no process of that name"
        processes = supervisor.named("trainer")
        supervisor.end(processes)
        step, load = trainer.points.newest(trainer.trained())
        supervisor.spawn_again(processes)
        settings = trainer.settings
        if load != settings.load:
            settings = dataclasses.replace(settings, load=load, start_rollout_id=None)
        supervisor.start_again(processes, settings=settings, options={"master_address": supervisor.meeting_file()})
        for client in trainer.clients:
            _connected(client)
        self._buffer.rewind_steps(step)
        repeated = counted(trainer.trained() - step, "step")
        log.warning("the trainer continues after step %d and repeats %s", step, repeated)
        # Asked each time: the ranks may have answered just before they were killed, and the loop counts that step only
        # when it runs again.
        while step < trainer.trained():
            step += 1
            groups = trainer.groups_of(step)
            train_ranks = [partial(_train, client, step, groups, trainer) for client in trainer.clients]
            supervisor.call_once(train_ranks, without=processes)


def _train(client: TrainerClient, step: int, groups: int, trainer: TrainerReplay) -> None:
    client.train_step(step, groups, trainer.timeout_seconds)


def _connected(client: Client) -> None:
    """Waits until `client` reaches its service. Raises DeadlineExceeded."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while not client.is_serving(1.0):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{client.address} does not answer after its start", field=client.address)
        time.sleep(0.05)
