"""Transport `disk`: a Hugging Face directory per version, `weight_vNNNNNN`, on a disk shared with the engines."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from slime.trainer.weight_sync.base import Weights, WeightTransport
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
    ) -> None:
        self._directory = Path(directory)
        self._write = write_directory
        self._keep = keep_files
        self._requests = EngineRequests(timeout_seconds)

    def send(self, engines: Sequence[Engine], version: int, weights: Weights, *, in_place: bool = False) -> int:
        path = Path(os.path.realpath(self._directory)) / f"weight_v{version:06d}"
        size = self._write(path, weights)
        body = json.dumps({"model_path": str(path), "weight_version": str(version), "flush_cache": False}).encode()
        try:
            self._requests.post(engines, "/update_weights_from_disk", body, JSON, path.name)
        finally:
            if not self._keep:
                shutil.rmtree(path)
        return size

    def close(self) -> None:
        self._requests.close()
