"""Carriers of deltas: HTTP to engines that apply them, and directories on a disk that is shared with the engines."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import torch

from slime.trainer.checkpoints.hf_directory import WRITER
from slime.trainer.weight_sync.base import Weights
from slime.trainer.weight_sync.deltas.transport import Buckets, DeltaCarrier
from slime.trainer.weight_sync.ipc import encoded
from slime.trainer.weight_sync.published import FIELD, AfterWrite, PublishedVersions
from slime.trainer.weight_sync.requests import EngineRequests, wait_for
from slime.trainer.weight_sync.tensor import TensorTransport
from slime.types.clients import Engine
from slime.types.directories import whole_directory
from slime.types.errors import EngineError, NotAvailable
from slime.types.weight_deltas import PULL, checkpoint_name
from slime.types.weight_deltas.buckets import VersionDelta, write_index

# HTTP statuses of an engine whose weights are not the base of a delta: either it has compared the two, or it finds no
# checkpoint to load, because one is made only from a delta of the version before.
NOT_THE_BASE, NO_CHECKPOINT = "409", "400"


class TensorCarrier(DeltaCarrier):
    name = "tensor"

    def __init__(self, bucket_bytes: int, timeout_seconds: float) -> None:
        self._whole = TensorTransport(bucket_bytes, timeout_seconds)
        self._requests = EngineRequests(timeout_seconds)

    def check(self, engines: Sequence[Engine]) -> None:
        self._whole.check_engines(engines)
        check_carrier(engines, self.name)

    def send_delta(
        self, engines: Sequence[Engine], about: VersionDelta, buckets: Buckets
    ) -> tuple[int, dict[str, EngineError]]:
        sent, refused = 0, dict[str, EngineError]()
        under_way: tuple[list[Engine], list[Future[Any]]] = [], []
        try:
            for number, (bucket, last) in enumerate(buckets):
                # The next bucket was encoded while the engines applied this one.
                refused |= refusals(*under_way)
                query = urlencode({"weight_version": about.version, "last": str(last).lower(), "delta": "true"})
                path, what = f"/update_weights_from_tensor?{query}", f"delta bucket {number} of {describe_delta(about)}"
                left = [engine for engine in engines if engine.name not in refused]
                under_way = left, self._requests.start_each(left, path, bucket, what)
                sent += len(bucket)
        finally:
            # No bucket of an update that fails may arrive in the next one.
            wait(under_way[1])
        return sent, refused | refusals(*under_way)

    def send_whole(self, engines: Sequence[Engine], version: int, lineage: str, weights: Weights) -> int:
        return self._whole.send(engines, version, weights)

    def close(self) -> None:
        self._whole.close()
        self._requests.close()


class DiskCarrier(DeltaCarrier):
    """Directories of versions, which are removed when the engines have read them, unless `keep_files`.

    Some engines read these directories themselves. Others (carrier `checkpoint`) load only whole Hugging Face
    directories: such an engine first runs a function of ours as its weight loader, which brings a directory below
    `local_directory` on the engine's host up to the version.
    """

    name = "disk"

    def __init__(
        self,
        directory: str,
        local_directory: str | None,
        write_directory: Callable[[Path, Weights], int],
        timeout_seconds: float,
        *,
        keep_files: bool = False,
        after_write: AfterWrite | None = None,
    ) -> None:
        self._versions = PublishedVersions(directory, keep=keep_files)
        self._local = local_directory
        self._after_write = after_write
        self._write = write_directory
        self._requests = EngineRequests(timeout_seconds)

    def check(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            if not _loads_checkpoint(engine) and self.name not in engine.delta_carriers:
                raise _takes_none(engine, self.name)
            if _loads_checkpoint(engine) and self._local is None:
                raise NotAvailable.requires(
                    "--update-weight-mode delta", "--update-weight-local-checkpoint-dir DIR",
                    f"engine {engine.name} loads weights from a checkpoint on its own host",
                )  # fmt: skip

    def send_delta(
        self, engines: Sequence[Engine], about: VersionDelta, buckets: Buckets
    ) -> tuple[int, dict[str, EngineError]]:
        with self._versions.version(about.version) as path:
            sent, names = 0, []
            with whole_directory(path, WRITER, field=FIELD) as partial:
                for number, (bucket, _) in enumerate(buckets):
                    names.append(f"delta-{number:05d}.bin")
                    (partial / names[-1]).write_bytes(bucket)
                    sent += len(bucket)
                write_index(partial, about, names)
            return sent, self._load(engines, path, about.version, about.lineage, describe_delta(about))

    def send_whole(self, engines: Sequence[Engine], version: int, lineage: str, weights: Weights) -> int:
        with self._versions.version(version) as path:
            sent = self._write(path, weights)
            for error in self._load(engines, path, version, lineage, path.name).values():
                raise error
            return sent

    def _load(
        self, engines: Sequence[Engine], path: Path, version: int, lineage: str, what: str
    ) -> dict[str, EngineError]:
        """Has the engines read the published directory; returns the errors of those that refused it."""
        if self._after_write is not None:
            self._after_write(path, engines)
        with_checkpoint = [engine for engine in engines if _loads_checkpoint(engine)]
        places = {engine.name: str(path) for engine in engines}
        if with_checkpoint:
            assert self._local is not None
            local = f"{self._local}/{checkpoint_name(version, lineage)}"
            order = {"source": str(path), "directory": self._local, "version": version, "lineage": lineage}
            # A pull reports no failure, because that would end the engine. If it failed, `local` does not exist.
            pulls = [
                self._requests.start(e, "/update_weights_from_tensor", _pull(e, order), what) for e in with_checkpoint
            ]
            wait_for(pulls)
            places |= {engine.name: local for engine in with_checkpoint}
        bodies = [_disk_body(places[engine.name], version) for engine in engines]
        answers = [
            self._requests.start(engine, "/update_weights_from_disk", body, what)
            for engine, body in zip(engines, bodies, strict=True)
        ]
        return refusals(engines, answers)

    def close(self) -> None:
        self._requests.close()
        self._versions.close()


def refusals(engines: Sequence[Engine], answers: Sequence[Any]) -> dict[str, EngineError]:
    """Waits for the answers; returns the errors of engines that refused a delta, by name. Raises any other error."""
    refused: dict[str, EngineError] = {}
    wait(answers)
    for engine, answer in zip(engines, answers, strict=True):
        try:
            answer.result()
        except EngineError as error:
            if error.value != (NO_CHECKPOINT if _loads_checkpoint(engine) else NOT_THE_BASE):
                raise
            refused[engine.name] = error
    return refused


def _loads_checkpoint(engine: Engine) -> bool:
    return "checkpoint" in engine.delta_carriers


def check_carrier(engines: Sequence[Engine], carrier: str) -> None:
    """Raises NotAvailable for an engine that takes no deltas by this carrier."""
    for engine in engines:
        if carrier not in engine.delta_carriers:
            raise _takes_none(engine, carrier)


def describe_delta(about: VersionDelta) -> str:
    """Names a delta for errors."""
    return f"weight version {about.version} as a delta of {about.base_version}"


def _takes_none(engine: Engine, carrier: str) -> NotAvailable:
    return NotAvailable.unavailable(
        "--update-weight-mode delta", f"engine {engine.name} ({engine.kind}) takes no deltas by {carrier}"
    )


def _disk_body(path: str, version: int) -> dict[str, Any]:
    return {"model_path": path, "weight_version": str(version), "flush_cache": False}


def _pull(engine: Engine, order: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the call of PULL: the name of an empty tensor is its argument."""
    payload = io.BytesIO()
    ForkingPickler(payload).dump([(json.dumps(order), torch.empty(0))])
    return {
        "serialized_named_tensors": [encoded(payload)] * engine.tp_size,
        "load_format": PULL,
        "flush_cache": False,
    }
