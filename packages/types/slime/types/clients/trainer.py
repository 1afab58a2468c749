"""`TrainerClient`: the client of one trainer rank. Collective calls go to every rank at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slime.types.clients.base import Client, build
from slime.types.wire.tensor import tensor_from_proto
from slime.v1 import trainer_pb2, trainer_pb2_grpc


@dataclass(frozen=True)
class TrainerInfo:
    rank: int
    world_size: int
    backend: str
    device: str
    num_parameters: int
    next_step: int
    weight_version: int


@dataclass
class TrainedStep:
    """One rank's answer about a step.

    log_probs: float32 [response tokens] of each requested sample that this rank scored, by its position in the step.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    log_probs: dict[int, np.ndarray] = field(default_factory=dict)


class TrainerClient(Client):
    """Client of `slime.v1.TrainerService`. Timeouts are in seconds."""

    stub = trainer_pb2_grpc.TrainerServiceStub

    def info(self) -> TrainerInfo:
        a = self._call("GetInfo", trainer_pb2.GetInfoRequest())
        return TrainerInfo(a.rank, a.world_size, a.backend, a.device, a.num_parameters, a.next_step, a.weight_version)

    def train_step(self, step: int, num_groups: int, timeout: float) -> dict[str, float]:
        """Seals, plans, trains on and acknowledges `step` (collective); metrics are complete on rank 0."""
        return self.train_and_score(step, num_groups, (), timeout).metrics

    def train_and_score(self, step: int, num_groups: int, positions: Sequence[int], timeout: float) -> TrainedStep:
        """Does what `train_step` does; also returns the log-probs of the samples at `positions` of the sealed step."""
        request = build(
            trainer_pb2.TrainStepRequest,
            writer=self._writer(),
            step=step,
            num_groups=num_groups,
            log_prob_positions=positions,
        )
        answer = self._call("TrainStep", request, timeout)
        found = {position: tensor_from_proto(tensor) for position, tensor in answer.log_probs.items()}
        return TrainedStep(dict(answer.metrics), found)

    def update_weights(self, weight_version: int, timeout: float, *, joining: bool = False) -> dict[str, float]:
        """Pushes the policy's weights to the engines (collective). joining: only to engines that were started again."""
        request = build(
            trainer_pb2.UpdateWeightsRequest, writer=self._writer(), weight_version=weight_version, joining=joining
        )
        return dict(self._call("UpdateWeights", request, timeout).metrics)

    def save_checkpoint(self, step: int, path: str, timeout: float, *, for_restart: bool = False) -> str:
        """Writes a checkpoint below `path` and commits its steps (collective); returns its directory.

        for_restart: a checkpoint for ranks of this run that are started again: it always holds the optimizer, and no
        step is committed.
        """
        request = build(
            trainer_pb2.SaveCheckpointRequest, writer=self._writer(), step=step, path=path, for_restart=for_restart
        )
        return self._call("SaveCheckpoint", request, timeout).path

    def export_model(self, path: str, timeout: float) -> str:
        """Writes a Hugging Face directory (collective)."""
        return self._call("ExportModel", build(trainer_pb2.ExportModelRequest, path=path), timeout).path
