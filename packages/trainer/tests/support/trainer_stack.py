"""A trainer behind its gRPC service, over a buffer and a rollout service that stand in."""

from collections.abc import Iterator, Sequence
from typing import Any

from trainer_tiny import alone, make_samples, make_settings, summarize

from slime.trainer.service import SERVICE, TrainerService, Worker
from slime.trainer.trainer import Trainer
from slime.types import Sample
from slime.types.clients import TrainerClient, Writer
from slime.types.errors import LeaseLost
from slime.types.rpc import RpcSettings, RunningService, Server
from slime.v1 import trainer_pb2_grpc

WRITER = Writer("run", 3)


class StandInBuffer:
    blobs = None

    def __init__(self) -> None:
        self.writer: Writer | None = None
        self.calls: list[tuple[Any, ...]] = []
        self.plans: dict[int, dict[str, Any]] = {}
        self.fail_next: str = ""

    def _record(self, name: str, *arguments: Any) -> None:
        if self.fail_next == name:
            self.fail_next = ""
            raise LeaseLost(f"{name}: gone")
        self.calls.append((name, *arguments))

    def get_run(self) -> Writer:
        return WRITER

    def seal_step(self, step: int, num_groups: int, wait_seconds: float = 0.0) -> list[Any]:
        self._record("seal", step, num_groups)
        return summarize(make_samples(step))

    def store_plan(self, step: int, plan: dict[str, Any]) -> dict[str, Any]:
        self._record("plan", step)
        return self.plans.setdefault(step, plan)

    def get_plan(self, step: int, wait_seconds: float = 0.0) -> dict[str, Any]:
        return self.plans[step]

    def read_step(self, step: int, positions: Sequence[int]) -> Iterator[Sample]:
        samples = make_samples(step)
        return (samples[p] for p in positions)

    def read_place(self, step: int) -> bytes:
        return f'{{"step": {step}}}\n'.encode()

    def acknowledge_step(self, step: int) -> None:
        self._record("acknowledge", step)

    def commit_steps(self, step: int) -> None:
        self._record("commit", step)


class StandInRollout:
    def __init__(self) -> None:
        self.writer: Writer | None = None
        self.calls: list[tuple[Any, ...]] = []

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Any]:
        self.calls.append(("begin", weight_version))
        return []

    def onload(self, timeout: float | None = None) -> None:
        assert timeout is not None and self.calls[-1][0] == "begin"

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None:
        self.calls.append(("commit", weight_version))


class Stack:
    def __init__(self, model: str, *, write_below: Sequence[str] = ("/",), **settings: Any) -> None:
        self.buffer, self.rollout, self.worker = StandInBuffer(), StandInRollout(), Worker("trainer")
        connect = lambda: self.rollout  # noqa: E731
        make = lambda: Trainer(make_settings(model, **settings), alone(), self.buffer, connect)  # noqa: E731
        self.trainer = self.worker.run("loading", make, 60)
        service = TrainerService(self.trainer, self.worker, write_below)
        add = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
        server = Server([(add, service)], RpcSettings(), service_names=[SERVICE])
        self.running = RunningService(server, self.worker.stop)
        self.client = TrainerClient(self.running.address, WRITER)

    @property
    def device(self) -> str:
        return str(self.trainer.backend.device)

    def close(self) -> None:
        self.client.close()
        self.running.stop()
