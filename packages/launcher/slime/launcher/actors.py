"""One Ray actor per service process. The actor hosts the service; the service does not know Ray."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from slime.rollout.engines.gpus import visible_gpus
from slime.types.rpc import RpcSettings, RunningService


class ServiceActor:
    """Starts `serve` of one package in this process and answers for its life.

    name: of the service, "trainer-0"; its log is `log_dir/NAME.log`, which also takes what native code prints.
    """

    def __init__(self, name: str, log_dir: str) -> None:
        self.name = name
        self._service: RunningService | None = None
        _redirect_output(Path(log_dir) / f"{name}.log")

    def free_address(self, host: str) -> str:
        """A "host:port" that was free a moment ago, for a rendezvous of this process."""
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def devices(self) -> list[str]:
        """The GPUs that this process sees, as entries of CUDA_VISIBLE_DEVICES."""
        return visible_gpus()

    def start(self, module: str, settings: Any, rpc: RpcSettings, options: dict[str, Any]) -> str:
        """Calls `module.serve(settings, rpc, **options)`; returns "host:port"."""
        self._service = import_module(module).serve(settings, rpc, **options)
        return self._service.address

    def stop(self, grace_seconds: float) -> None:
        if self._service is not None:
            self._service.stop(grace_seconds)
            self._service = None

    def watch(self) -> None:
        """Never returns: the end of this call tells that the process has died."""
        threading.Event().wait()


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Ray has replaced the Python streams of a worker: give them back to the file descriptors.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
