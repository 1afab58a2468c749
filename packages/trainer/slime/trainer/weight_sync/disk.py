"""Transport `disk`: one Hugging Face directory per weight version, on a disk that the engines share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from slime.trainer.weight_sync.base import Weights, WeightTransport
from slime.trainer.weight_sync.published import AfterWrite, PublishedVersions
from slime.trainer.weight_sync.requests import JSON, EngineRequests
from slime.types.clients import Engine


class DiskTransport(WeightTransport):
    """write_directory(path, weights) writes a whole Hugging Face directory or nothing, and returns its bytes."""

    name = "disk"

    def __init__(
        self,
        directory: str,
        write_directory: Callable[[Path, Weights], int],
        timeout_seconds: float,
        *,
        keep_files: bool = False,
        after_write: AfterWrite | None = None,
    ) -> None:
        self._versions = PublishedVersions(directory, keep=keep_files)
        self._write = write_directory
        self._after_write = after_write
        self._requests = EngineRequests(timeout_seconds)

    def send(self, engines: Sequence[Engine], version: int, weights: Weights, *, in_place: bool = False) -> int:
        with self._versions.version(version) as path:
            size = self._write(path, weights)
            if self._after_write is not None:
                self._after_write(path, engines)
            body = json.dumps({"model_path": str(path), "weight_version": str(version), "flush_cache": False}).encode()
            self._requests.post(engines, "/update_weights_from_disk", body, JSON, path.name)
        return size

    def close(self) -> None:
        self._requests.close()
        self._versions.close()
