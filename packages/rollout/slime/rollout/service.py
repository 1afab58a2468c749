"""`slime.v1.RolloutService`: leases prompts, completes scored groups, coordinates weight updates of the engines."""

from __future__ import annotations

import copy
import dataclasses
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from slime.rollout.calls.answers import evaluation_output, train_output
from slime.rollout.calls.jobs import MOST_CALLS, Progress, Result, RolloutJob, RunningJobs
from slime.rollout.calls.outputs import RolloutFnEvalOutput, flatten
from slime.rollout.engine_calls import EngineCalls
from slime.rollout.engines.base import HostedEngine
from slime.rollout.fleet.engine_weights import EngineWeights
from slime.rollout.generate.continuous import ContinuousCall, generate_on
from slime.rollout.generate.state import RolloutState
from slime.rollout.launch import close_state, open_state
from slime.rollout.metrics import evaluation_metrics, rollout_metrics, time_metrics
from slime.rollout.recordings.rollouts import record_evaluation, record_rollout
from slime.rollout.settings.plugin_args import RolloutArgs
from slime.rollout.settings.rollout import DEFAULT_DATA_SOURCE, RolloutSettings
from slime.rollout.sources import EvaluationSource, LeasedDataSource
from slime.rollout.sources.own import OwnLeases, OwnSource
from slime.rollout.sources.paced import PacedSource
from slime.rollout.sources.wire_names import WireNames
from slime.types import Sample
from slime.types.clients import BufferClient, Writer
from slime.types.codec import sample_to_proto
from slime.types.errors import InvalidField, StaleWriter
from slime.types.pace import TrainerPace
from slime.types.plugins import load_plugin, load_setting
from slime.types.rpc import RpcSettings, RunningService, Server
from slime.types.rpc.auth import check_exposure
from slime.types.rpc.garbage import spare_long_lived
from slime.v1 import buffer_pb2, rollout_pb2, rollout_pb2_grpc

EXAMPLES = 3
ENGINE_RESTARTS = "rollout/engine_restarts"


class RolloutService(EngineCalls):
    """Answers the calls of the service. Plug-ins get `state.args`. Engines are started by `serve`, not here."""

    def __init__(
        self,
        settings: RolloutSettings,
        state: RolloutState,
        buffer_address: str,
        rpc: RpcSettings | None = None,
        worker_id: str | None = None,
    ) -> None:
        weights = EngineWeights(state.fleet, settings.rollout_weight_update_wait_seconds)
        super().__init__(settings, state, weights)
        self.buffer_address = buffer_address
        self.rpc = rpc
        self.worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self._rollout_function = load_plugin(settings.rollout_function_path, flag="--rollout-function-path")
        self._eval_function = load_setting(settings, "eval_function_path") or self._rollout_function
        self._own_source: OwnSource | None = None
        if settings.data_source_path != DEFAULT_DATA_SOURCE:
            self._own_source = OwnSource.open(settings.data_source_path, state.args)
        self._names = WireNames(settings, state.tokenizer)
        self._continuous = ContinuousCall()
        self._jobs = RunningJobs()
        # Number of engine restarts that the metrics of earlier iterations have reported.
        self._restarts_reported = 0
        self._lock = threading.Lock()
        self._newest_writer: Writer | None = None

    def GetStatus(
        self, request: rollout_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.GetStatusResponse:
        return rollout_pb2.GetStatusResponse(
            engines=self._engine_messages(),
            weight_version=self.engine_weights.version,
            running_rollouts=self._jobs.count,
            engine_restarts=self.num_lost,
            restarts_engines=self.fleet.restarts is not None or self.engines_may_join,
            trained_engine_restarts=self.fleet.num_lost,
        )

    def Generate(
        self, request: rollout_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[rollout_pb2.GenerateResponse]:
        if request.HasField("pace"):
            yield from self._generate_on(request, context)
            return
        if request.num_groups < 1:
            raise InvalidField("num_groups", request.num_groups, "at least 1")
        self.engine_weights.check_serving()
        self._check_writer(request.writer)
        args = copy.copy(self.state.args)
        args.rollout_batch_size = request.num_groups
        # From the settings, because `args` has the batch size where the flag is not given; a resumed step may lack
        # fewer groups than that.
        args.over_sampling_batch_size = max(self.settings.over_sampling_batch_size or 0, request.num_groups)
        if self._own_source is not None:
            self._own_source.begin(request.rollout_id)
        with self._buffer(request.writer) as buffer, self._lease(buffer) as source:
            job = RolloutJob(
                self.fleet,
                request.rollout_id,
                request.num_groups,
                lambda: self._rollout(args, request.rollout_id, source),
            )
            for event in self._jobs.run(job, context):
                if isinstance(event, Progress):
                    yield rollout_pb2.GenerateResponse(completed_groups=event.done, num_groups=event.total)
                    continue
                groups, metrics = event.value
                record_rollout(self.settings.save_debug_rollout_data, request.rollout_id, groups)
                if self._own_source is not None:
                    self._own_source.end(request.rollout_id)
                metrics = metrics | self._metrics(
                    args, request, groups, metrics, event.seconds, event.call.reward_seconds
                )
                yield rollout_pb2.GenerateResponse(
                    completed_groups=len(groups),
                    num_groups=request.num_groups,
                    metrics=_numbers(metrics),
                    examples=[sample_to_proto(group[0]) for group in groups[:EXAMPLES]],
                    done=True,
                )

    def _generate_on(
        self, request: rollout_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[rollout_pb2.GenerateResponse]:
        """Generates until the call is cancelled. Raises WrongState while another such call runs."""
        pace = TrainerPace.from_proto(request.pace)
        self.engine_weights.check_serving()
        self._check_writer(request.writer)
        if self._own_source is not None:
            raise InvalidField("pace", "given", "none: --data-source-path gives groups to one iteration at a time")
        args = copy.copy(self.state.args)
        args.rollout_batch_size = pace.groups_per_step
        options = self._lease_options()
        with (
            self._buffer(request.writer) as buffer,
            PacedSource(buffer, pace, lambda: self.engine_weights.version, **options) as source,
            self._continuous.running(source),
        ):
            job: RolloutJob[None] = RolloutJob(
                self.fleet,
                request.rollout_id,
                0,
                lambda: self.state.loop.run(
                    generate_on(
                        self.state,
                        args,
                        request.rollout_id,
                        source,
                        over_sampling=self.settings.over_sampling_batch_size,
                    )
                ),
            )
            self._continuous.call = job.call
            before = self.num_lost
            for event in self._jobs.run(job, context):
                if isinstance(event, Progress):
                    job.call.metrics.update(self.fleet.engine_metrics)
                    if restarts := self.num_lost - before:
                        job.call.metrics[ENGINE_RESTARTS] = float(restarts)
                    yield rollout_pb2.GenerateResponse(completed_groups=event.done, metrics=job.call.metrics)

    def Evaluate(
        self, request: rollout_pb2.EvaluateRequest, context: grpc.ServicerContext
    ) -> Iterator[rollout_pb2.EvaluateResponse]:
        self.engine_weights.check_serving()
        args = copy.copy(self.state.args)
        with BufferClient(self.buffer_address, settings=self.rpc) as buffer:
            source = EvaluationSource(buffer, request.names, self._names, self.state.prompts.render)
            job = RolloutJob(
                self.fleet,
                request.rollout_id,
                0,
                lambda: self._evaluation(args, request.rollout_id, source),
                evaluation=True,
            )
            for event in self._jobs.run(job, context):
                if isinstance(event, Progress):
                    yield rollout_pb2.EvaluateResponse(completed_samples=event.done, num_samples=event.total)
                    continue
                yield self._evaluated(args, request.rollout_id, event)

    def _evaluated(
        self, args: RolloutArgs, rollout_id: int, event: Result[RolloutFnEvalOutput]
    ) -> rollout_pb2.EvaluateResponse:
        output = event.value
        record_evaluation(self.settings.save_debug_rollout_data, rollout_id, output.data)
        metrics = dict(output.metrics or {})
        log = self.state.plugins.eval_log
        if log is None or not log(rollout_id, args, output.data, output.metrics):
            metrics |= evaluation_metrics(output.data, args)
        metrics["perf/eval_time"] = event.seconds
        examples = []
        for name, result in output.data.items():
            for sample in _first_of_prompts(result.get("samples") or ()):
                sample.dataset = name  # type: ignore[attr-defined]
                examples.append(sample)
        return rollout_pb2.EvaluateResponse(
            completed_samples=event.call.done,
            num_samples=event.call.total,
            metrics=_numbers(metrics),
            examples=[sample_to_proto(sample) for sample in examples],
            done=True,
        )

    def BeginWeightUpdate(
        self, request: rollout_pb2.BeginWeightUpdateRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.BeginWeightUpdateResponse:
        fresh = self._check_writer(request.writer)
        if request.joining:
            begin = self.engine_weights.begin_joining(request.weight_version)
        else:
            interrupt = self._continuous.source is not None
            begin = self.engine_weights.begin(request.weight_version, supersede=fresh, interrupt=interrupt)
        members = self.fleet.loop.run(begin)
        engines = [self._engine_message(member) for member in members]
        for member, engine in zip(members, engines, strict=True):
            # Only the trainer, which sends the weights, gets the key.
            engine.api_key = member.engine.api_key or ""
        return rollout_pb2.BeginWeightUpdateResponse(engines=engines)

    def CommitWeightUpdate(
        self, request: rollout_pb2.CommitWeightUpdateRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.CommitWeightUpdateResponse:
        self._check_writer(request.writer)
        self.fleet.loop.run(self.engine_weights.commit(request.weight_version))
        self._continuous.moved(request.weight_version)
        return rollout_pb2.CommitWeightUpdateResponse()

    def AbortWeightUpdate(
        self, request: rollout_pb2.AbortWeightUpdateRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.AbortWeightUpdateResponse:
        self._check_writer(request.writer)
        self.fleet.loop.run(self.engine_weights.abort(request.weight_version, request.reason))
        return rollout_pb2.AbortWeightUpdateResponse()

    def Offload(
        self, request: rollout_pb2.OffloadRequest, context: grpc.ServicerContext
    ) -> rollout_pb2.OffloadResponse:
        self._check_writer(request.writer)
        self.fleet.loop.run(self.engine_weights.offload(request.parts))
        return rollout_pb2.OffloadResponse()

    def Onload(self, request: rollout_pb2.OnloadRequest, context: grpc.ServicerContext) -> rollout_pb2.OnloadResponse:
        self._check_writer(request.writer)
        self.fleet.loop.run(self.engine_weights.onload(request.parts))
        return rollout_pb2.OnloadResponse()

    def _lease_options(self) -> dict[str, Any]:
        return dict(
            worker_id=self.worker_id,
            names=self._names,
            render=self.state.prompts.render,
            ttl_seconds=self.settings.rollout_lease_seconds,
            wait_seconds=self.settings.rollout_prompt_wait_seconds,
        )

    def _lease(self, buffer: BufferClient) -> LeasedDataSource:
        options = self._lease_options()
        if self._own_source is None:
            return LeasedDataSource(buffer, **options)
        return OwnLeases(buffer, self._own_source, group_size=self.settings.n_samples_per_prompt, **options)

    def _rollout(
        self, args: RolloutArgs, rollout_id: int, source: LeasedDataSource
    ) -> tuple[list[list[Sample]], dict[str, Any]]:
        answer = self._rollout_function(args, rollout_id, source, evaluation=False)
        groups, metrics = train_output(answer, self.settings.rollout_function_path)
        source.complete_rest(groups)
        return groups, metrics

    def _evaluation(self, args: RolloutArgs, rollout_id: int, source: EvaluationSource) -> RolloutFnEvalOutput:
        answer = self._eval_function(args, rollout_id, source, evaluation=True)
        return evaluation_output(answer, self.settings.eval_function_path or self.settings.rollout_function_path)

    def _metrics(
        self,
        args: RolloutArgs,
        request: rollout_pb2.GenerateRequest,
        groups: list[list[Sample]],
        extra: dict[str, Any],
        seconds: float,
        reward_seconds: float,
    ) -> dict[str, float]:
        samples = flatten(groups)
        timing = time_metrics(samples, seconds, reward_seconds) | self.fleet.engine_metrics
        restarts, self._restarts_reported = self.num_lost - self._restarts_reported, self.num_lost
        if restarts:
            timing[ENGINE_RESTARTS] = float(restarts)
        log = self.state.plugins.rollout_log
        if log is not None and log(request.rollout_id, args, samples, extra, seconds):
            return timing
        # The buffer's summaries have no log-probs, from which rollout/correct_entropy follows.
        if request.without_summary_metrics and log is None and not args.log_correct_samples:
            return timing
        return rollout_metrics(groups, args) | timing

    def _buffer(self, writer: buffer_pb2.Writer | None = None) -> BufferClient:
        """Returns a client that writes as the caller, or as the buffer's current run where the caller names none."""
        client = BufferClient(self.buffer_address, settings=self.rpc)
        if writer is not None and writer.run_id:
            client.writer = Writer(writer.run_id, writer.incarnation)
        else:
            try:
                client.get_run()
            except BaseException:
                client.close()
                raise
        return client

    def _check_writer(self, writer: buffer_pb2.Writer) -> bool:
        """Returns whether it replaces an earlier writer. Raises StaleWriter unless it is the buffer's current one."""
        if not writer.run_id:
            return False
        identity = (writer.run_id, writer.incarnation)
        with self._lock:
            known = self._newest_writer
        if known is not None and (known.run_id, known.incarnation) == identity:
            return False
        # An unknown writer may be new or invented: only the buffer can tell.
        with BufferClient(self.buffer_address, settings=self.rpc) as buffer:
            current = buffer.get_run()
        if (current.run_id, current.incarnation) != identity:
            over = current.run_id == writer.run_id and writer.incarnation < current.incarnation
            raise StaleWriter(
                f"run {writer.run_id} was started again: incarnation {writer.incarnation} is over"
                if over
                else f"incarnation {writer.incarnation} of run {writer.run_id} is not that of the buffer",
                field="writer.incarnation",
                value=writer.incarnation,
                expected=f"run {current.run_id}, incarnation {current.incarnation}",
            )
        with self._lock:
            self._newest_writer = current
        return known is not None


def _first_of_prompts(samples: Sequence[Sample]) -> list[Sample]:
    """Returns the first sample of each of the first `EXAMPLES` prompts."""
    first: dict[int | None, Sample] = {}
    for sample in samples:
        first.setdefault(sample.group_index, sample)
    return list(first.values())[:EXAMPLES]


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Keeps the metrics that are numbers: the wire carries no others."""
    return {
        key: float(value)
        for key, value in metrics.items()
        if isinstance(value, (int, float)) or hasattr(value, "__float__")
    }


def serve(
    settings: RolloutSettings,
    rpc: RpcSettings,
    *,
    buffer_address: str,
    extra_args: dict[str, Any] | None = None,
    engines: Sequence[HostedEngine] | None = None,
    worker_id: str | None = None,
    engines_file: str | None = None,
) -> RunningService:
    """Starts engines and the service.

    engines: engines of this run that `engine_host` has started on their nodes, so that none is started here; an empty
        list for a run without engines.
    worker_id: the name under which it leases groups (default: host name and process id).
    engines_file: see `open_state`.
    Raises a ConfigError for settings that cannot work, before anything is started where that can be known.
    """
    check_exposure(rpc)
    rpc = dataclasses.replace(rpc, rpc_threads=rpc.rpc_threads + MOST_CALLS)
    state = open_state(settings, extra_args, engines, engines_file)
    try:
        service = RolloutService(settings, state, buffer_address, rpc, worker_id)
        server = Server(
            [(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, service)],
            rpc,
            service_names=["slime.v1.RolloutService"],
        )
    except BaseException:
        close_state(state)
        raise
    spare_long_lived(collect_rarely=True)
    return RunningService(server, lambda: close_state(state))
