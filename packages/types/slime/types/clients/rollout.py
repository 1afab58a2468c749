"""`RolloutClient`: generation, evaluation and weight updates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.types.clients.base import NO_DEADLINE, Client, build
from slime.types.codec import sample_from_proto
from slime.types.errors import RemoteError, SlimeError
from slime.types.pace import TrainerPace
from slime.types.sample import Sample
from slime.v1 import rollout_pb2, rollout_pb2_grpc

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Engine:
    """A generation server at `url` that speaks SGLang's protocol; kind: as in --rollout-engine.

    tp_size: its tensor-parallel ranks, each of which takes part in weight updates. api_key: the key that its callers
    send, empty for none; only `begin_weight_update` returns it. weight_transports: the values of
    --update-weight-transport that it supports, the best one first. awaits_weights: it was started again or has joined,
    and serves once it has been sent weights. in_flight: samples that it generates or has queued. delta_carriers: see
    `slime.types.weight_deltas.CARRIERS`; empty for one that takes whole weights only. model: the name of its model in
    a run that serves several. keeps_weights: whether its model is another than the trained one, and gets no updates.
    first_rank: the number of its first tensor-parallel rank among those of all engines of the trained model, lost ones
    too; where they share the trainer's GPUs, also that of the trainer's rank on the same GPU.
    """

    name: str
    url: str
    kind: str
    healthy: bool
    weight_version: int
    tp_size: int = 1
    api_key: str = field(default="", repr=False)
    weight_transports: tuple[str, ...] = ()
    awaits_weights: bool = False
    in_flight: int = 0
    delta_carriers: tuple[str, ...] = ()
    model: str = ""
    keeps_weights: bool = False
    first_rank: int = 0


@dataclass(frozen=True)
class RolloutStatus:
    """The status of a rollout service. engine_restarts: how often an engine died or hung, and was started again or
    left the run, since the service began. restarts_engines: whether engines may be started again or join while the run
    goes on. trained_engine_restarts: those of engine_restarts that were engines of the trained model."""

    engines: list[Engine]
    weight_version: int
    running_rollouts: int
    engine_restarts: int = 0
    restarts_engines: bool = False
    trained_engine_restarts: int = 0


@dataclass(frozen=True)
class GenerateResult:
    metrics: dict[str, float]
    examples: list[Sample]


@dataclass(frozen=True)
class EvaluateResult:
    metrics: dict[str, float]
    examples: list[Sample]


class StopSignal:
    """Ends a call from another thread, even a call that begins after `set`."""

    def __init__(self) -> None:
        self.is_set = False
        self._actions: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def attach(self, action: Callable[[], object]) -> None:
        with self._lock:
            self._actions.append(action)
            late = self.is_set
        if late:
            action()

    def set(self) -> None:
        with self._lock:
            self.is_set = True
            actions = list(self._actions)
        for action in actions:
            action()


class RolloutClient(Client):
    """Client of `slime.v1.RolloutService`. Timeouts are in seconds."""

    stub = rollout_pb2_grpc.RolloutServiceStub

    def status(self) -> RolloutStatus:
        answer = self._call("GetStatus", rollout_pb2.GetStatusRequest())
        return RolloutStatus(
            _engines(answer.engines),
            answer.weight_version,
            answer.running_rollouts,
            answer.engine_restarts,
            answer.restarts_engines,
            answer.trained_engine_restarts,
        )

    def generate(
        self,
        rollout_id: int,
        num_groups: int,
        timeout: float,
        on_progress: Progress | None = None,
        *,
        summary_metrics: bool = True,
    ) -> GenerateResult:
        """Generates `num_groups` groups and completes them in the buffer, calling on_progress(completed, total).

        summary_metrics: False leaves out the metrics that the caller computes itself, from the summaries of a
        `SealedStep`.
        """
        request = build(
            rollout_pb2.GenerateRequest,
            writer=self._writer(),
            rollout_id=rollout_id,
            num_groups=num_groups,
            without_summary_metrics=not summary_metrics,
        )
        last = self._last("Generate", request, timeout, on_progress, lambda m: (m.completed_groups, m.num_groups))
        return GenerateResult(dict(last.metrics), [sample_from_proto(s) for s in last.examples])

    def generate_on(
        self, rollout_id: int, pace: TrainerPace, stop: StopSignal, on_metrics: Callable[[dict[str, float]], None]
    ) -> None:
        """Generates group after group until `stop` is set, within `pace`; `on_metrics` gets sums since the call began.

        rollout_id: the first iteration that trains on what is generated.
        """
        request = build(rollout_pb2.GenerateRequest, writer=self._writer(), rollout_id=rollout_id, pace=pace.to_proto())
        call = self._stub.Generate(request, timeout=NO_DEADLINE)
        stop.attach(call.cancel)
        try:
            for message in call:
                on_metrics(dict(message.metrics))
        except SlimeError:
            if not stop.is_set:
                raise
        finally:
            call.cancel()

    def evaluate(
        self,
        rollout_id: int,
        names: tuple[str, ...] = (),
        timeout: float | None = None,
        on_progress: Progress | None = None,
    ) -> EvaluateResult:
        """Runs the evaluation sets `names`, or all of them. on_progress gets (completed samples, total)."""
        request = build(rollout_pb2.EvaluateRequest, rollout_id=rollout_id, names=names)
        last = self._last("Evaluate", request, timeout, on_progress, lambda m: (m.completed_samples, m.num_samples))
        return EvaluateResult(dict(last.metrics), [sample_from_proto(s) for s in last.examples])

    def _last(
        self,
        method: str,
        request: Any,
        timeout: float | None,
        on_progress: Progress | None,
        progress: Callable[[Any], tuple[int, int]],
    ) -> Any:
        """Returns the last message of a stream; calls `on_progress` with `progress` of those before it."""
        last = None
        # Read to the end of the stream: leaving at the last message would cancel a call that is about to succeed.
        for message in self._stream(method, request, timeout):
            if message.done:
                last = message
            elif on_progress is not None:
                on_progress(*progress(message))
        if last is None:
            raise RemoteError(f"{self.address}: {method} ended without its last message", field=self.address)
        return last

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        """Pauses the engines; returns the members of the update."""
        request = build(rollout_pb2.BeginWeightUpdateRequest, writer=self._writer(), weight_version=weight_version)
        return _engines(self._call("BeginWeightUpdate", request, timeout).engines)

    def begin_joining(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        """Begins an update of the engines that were started again or have joined and wait for weights, while the others
        serve; returns its members. There are none where the others serve another version."""
        request = build(
            rollout_pb2.BeginWeightUpdateRequest, writer=self._writer(), weight_version=weight_version, joining=True
        )
        return _engines(self._call("BeginWeightUpdate", request, timeout).engines)

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None:
        """Checks that every member holds `weight_version` and lets it serve."""
        request = build(rollout_pb2.CommitWeightUpdateRequest, writer=self._writer(), weight_version=weight_version)
        self._call("CommitWeightUpdate", request, timeout)

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None:
        """Aborts the update; its members do not serve until another one is committed."""
        request = build(
            rollout_pb2.AbortWeightUpdateRequest, writer=self._writer(), weight_version=weight_version, reason=reason
        )
        self._call("AbortWeightUpdate", request, timeout)

    def offload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None:
        """Stops the engines and frees parts of their GPU memory: "weights", "kv_cache", "cuda_graph", or all."""
        self._call("Offload", build(rollout_pb2.OffloadRequest, writer=self._writer(), parts=parts), timeout)

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None:
        """Allocates the engines' GPU memory again.

        Weights come back empty unless the engines keep a copy; engines serve again after the next committed update.
        """
        self._call("Onload", build(rollout_pb2.OnloadRequest, writer=self._writer(), parts=parts), timeout)

    def add_engine(self, url: str, timeout: float | None = None) -> Engine:
        """Lets an engine that the run has not started join it. Raises the errors of an engine that cannot join."""
        answer = self._call("AddEngine", build(rollout_pb2.AddEngineRequest, url=url), timeout)
        return _engines([answer.engine])[0]

    def remove_engine(self, url: str, timeout: float | None = None) -> None:
        """Lets such an engine leave. Returns once its requests have gone on elsewhere."""
        self._call("RemoveEngine", build(rollout_pb2.RemoveEngineRequest, url=url), timeout)


def _engines(messages: Any) -> list[Engine]:
    return [
        Engine(
            m.name,
            m.url,
            m.kind,
            m.healthy,
            m.weight_version,
            m.tp_size or 1,
            m.api_key,
            tuple(m.weight_transports),
            m.awaits_weights,
            m.in_flight,
            tuple(m.delta_carriers),
            m.model,
            m.keeps_weights,
            m.first_rank,
        )  # fmt: skip
        for m in messages
    ]
