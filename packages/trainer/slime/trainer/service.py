"""The gRPC service of one rank, and the thread on which it works."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc

from slime.trainer.settings.checks import require_schedule
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.blobs import BlobReader
from slime.types.clients import BufferClient, RolloutClient, Writer
from slime.types.errors import DeadlineExceeded, InvalidField, SlimeError, WrongState
from slime.types.rpc import RpcSettings, RunningService, Server
from slime.types.rpc.auth import check_exposure
from slime.types.wire.tensor import fill_tensor
from slime.v1 import buffer_pb2, trainer_pb2, trainer_pb2_grpc

log = logging.getLogger(__name__)
T = TypeVar("T")
SERVICE = "slime.v1.TrainerService"
# Between two looks whether another rank has left, and after one that has.
LOOK_SECONDS = 1.0
LAST_SECONDS = 5.0
# Larger messages are slow.
MAX_LOG_PROB_BYTES = 8 << 20


class Worker:
    """The one thread for everything that touches torch; callers wait for their job with a deadline."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._busy = threading.Lock()
        self._job = ""

    def run(
        self,
        job: str,
        work: Callable[[], T],
        timeout_seconds: float | None,
        find_error: Callable[[], SlimeError | None] = lambda: None,
    ) -> T:
        """Runs `work` on the worker thread and returns its result.

        Raises DeadlineExceeded if it has not ended in time (it goes on), WrongState while another job runs, and the
        error that `find_error` returns, in case `work` waits for somebody who has failed.
        """
        if not self._busy.acquire(blocking=False):
            raise WrongState(
                f"{job}: {self._job} is still running", field="call", value=job, expected=f"{self._job} to end first"
            )
        self._job = job
        future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._busy.release())
        end = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        found: SlimeError | None = None
        while True:
            try:
                # Once there is such an error, the job has a moment to end by itself, with its own.
                seconds = LAST_SECONDS if found is not None else LOOK_SECONDS
                return future.result(max(0.0, min(seconds, end - time.monotonic())))
            except concurrent.futures.TimeoutError:
                if future.done():  # since then, or with an error of that class
                    return future.result()
            if found is not None:
                raise found
            if time.monotonic() >= end:
                message = f"{job}: not done after {timeout_seconds:.0f} s"
                raise DeadlineExceeded(message, field="call", value=job) from None
            found = find_error()

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    """Answers calls by jobs on the worker thread, on which the trainer was constructed."""

    def __init__(self, trainer: Any, worker: Worker, write_below: Sequence[str] = ()) -> None:
        """write_below: directories in which calls may save; without any, nothing is saved."""
        self._trainer = trainer
        self._worker = worker
        self._write_below = [Path(os.path.realpath(directory)) for directory in write_below]
        self._broken: BaseException | None = None

    def GetInfo(
        self, request: trainer_pb2.GetInfoRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.GetInfoResponse:
        trainer = self._trainer
        return trainer_pb2.GetInfoResponse(
            rank=trainer.ranks.rank,
            world_size=trainer.ranks.world_size,
            backend=trainer.backend.name,
            device=str(trainer.backend.device),
            num_parameters=trainer.backend.num_parameters,
            next_step=trainer.next_step,
            weight_version=trainer.state.weight_version,
        )

    def TrainStep(
        self, request: trainer_pb2.TrainStepRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.TrainStepResponse:
        if request.num_groups < 1:
            raise InvalidField("num_groups", request.num_groups, "at least 1")
        positions = frozenset(request.log_prob_positions)
        trained = self._run(
            f"TrainStep {request.step}",
            request,
            context,
            lambda: self._trainer.train_step(request.step, request.num_groups, positions),
        )
        response = trainer_pb2.TrainStepResponse(metrics=trained.metrics)
        room = MAX_LOG_PROB_BYTES
        for position, values in sorted(trained.log_probs.items()):
            room -= values.nbytes
            if room >= 0:
                fill_tensor(response.log_probs[position], values, "log_probs")
        return response

    def UpdateWeights(
        self, request: trainer_pb2.UpdateWeightsRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.UpdateWeightsResponse:
        version = request.weight_version
        if version < 0:
            raise InvalidField("weight_version", version, "at least 0")
        joining = request.joining
        metrics = self._run(
            f"UpdateWeights {version}",
            request,
            context,
            lambda: self._trainer.update_weights(version, joining=joining),
        )
        return trainer_pb2.UpdateWeightsResponse(metrics=metrics)

    def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.SaveCheckpointResponse:
        path = self._run(
            f"SaveCheckpoint {request.step}",
            request,
            context,
            lambda: self._trainer.save_checkpoint(
                request.step, self._checked(request.path), for_restart=request.for_restart
            ),
        )
        return trainer_pb2.SaveCheckpointResponse(path=path)

    def ExportModel(
        self, request: trainer_pb2.ExportModelRequest, context: grpc.ServicerContext
    ) -> trainer_pb2.ExportModelResponse:
        path = self._run("ExportModel", None, context, lambda: self._trainer.export_model(self._checked(request.path)))
        return trainer_pb2.ExportModelResponse(path=path)

    def _checked(self, path: str) -> str:
        """Returns `path`; raises InvalidField, on every rank, unless it is below a directory of the run once symbolic
        links are followed."""
        self._trainer.ranks.together(lambda: self._check(path))
        return path

    def _check(self, path: str) -> None:
        if not path or "\0" in path:
            raise InvalidField("path", path, "a directory")
        if not self._write_below:
            raise InvalidField("path", path, "--write-below DIR of this trainer, which was started without")
        target = Path(os.path.abspath(path))
        real = Path(os.path.realpath(target.parent), target.name)
        if not any(real.is_relative_to(directory) for directory in self._write_below):
            raise InvalidField("path", path, f"a directory below {' or '.join(map(str, self._write_below))}")

    def _run(self, job: str, request: Any, context: grpc.ServicerContext, work: Callable[[], T]) -> T:
        def guarded() -> T:
            if self._broken is not None:
                raise WrongState(
                    f"{job}: this rank failed before and has to be started again: {self._broken}"
                ) from self._broken
            if request is not None:
                self._trainer.join(_writer(request.writer))
            try:
                return work()
            except SlimeError as error:
                if self._trainer.ranks.left:
                    self._broken = error
                    log.exception("%s failed", job)
                raise
            except BaseException as error:
                # The ranks may be out of step with each other: leave the group, so that the others fail now.
                self._broken = error
                log.exception("%s failed", job)
                first = self._trainer.ranks.leave(error)
                if first is error:
                    raise
                raise first from error

        return self._worker.run(job, guarded, context.time_remaining(), self._trainer.ranks.first_error)


def _writer(message: buffer_pb2.Writer) -> Writer | None:
    return Writer(message.run_id, message.incarnation) if message.run_id else None


def preload(train_backend: str) -> None:
    """Imports the modules that `serve` uses, which takes seconds, before this process can serve. Sets nothing up."""
    importlib.import_module("slime.trainer.trainer")
    if train_backend == "fsdp":
        importlib.import_module("slime.trainer.backends.fsdp.backend")
        from transformers import AutoModelForCausalLM  # noqa: F401


def serve(
    settings: TrainerSettings,
    rpc: RpcSettings,
    *,
    rank: int,
    world_size: int,
    master_address: str,
    buffer_address: str,
    rollout_address: str | Callable[[], str] | None,
    extra_args: dict[str, Any] | None = None,
    megatron: dict[str, Any] | None = None,
    blobs: BlobReader | None = None,
    write_below: Sequence[str] = (),
) -> RunningService:
    """Loads the model on this rank and serves. Blocks until all ranks have joined at `master_address` ("host:port").

    rollout_address: a function is called once the model is loaded, and may wait for a service that starts meanwhile;
    None without engines to push weights to.
    extra_args: more names for the `args` of plug-ins. megatron: explicitly set arguments of Megatron, by attribute.
    blobs: the store through which the buffer may hand over large tensors.
    write_below: directories in which calls may save checkpoints and models.
    """
    if not 0 <= rank < world_size:
        raise InvalidField("rank", rank, f"less than the world size {world_size}")
    require_schedule(settings)
    check_exposure(rpc)
    worker = Worker(f"trainer-{rank}")
    stack = contextlib.ExitStack()
    stack.callback(worker.stop)
    try:
        buffer = stack.enter_context(BufferClient(buffer_address, settings=rpc, blobs=blobs))

        def connect() -> RolloutClient | None:
            address = rollout_address() if callable(rollout_address) else rollout_address
            return stack.enter_context(RolloutClient(address, settings=rpc)) if address else None

        def load() -> Any:
            # Imported here because it takes seconds, and because torch must be used on one thread from the start.
            from slime.trainer.process.collective import Ranks
            from slime.trainer.trainer import Trainer, pick_device, prepare_process

            prepare_process(settings)
            device = pick_device(rank).type
            minutes, backend = settings.distributed_timeout_minutes, settings.distributed_backend
            ranks = Ranks(rank, world_size, master_address, minutes, device, backend)
            stack.callback(ranks.close)
            trainer = Trainer(settings, ranks, buffer, connect, extra_args, megatron)
            stack.callback(trainer.close)
            return trainer

        trainer = worker.run("loading", load, None)
        server = Server(
            [(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, TrainerService(trainer, worker, write_below))],
            rpc,
            service_names=[SERVICE],
        )
        return RunningService(server, stack.close)
    except BaseException:
        stack.close()
        raise
