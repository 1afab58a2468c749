"""One Ray actor per service process. The actor hosts the service; the service does not know Ray."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import os
import socket
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from slime.launcher.blob_keeper import KeptWriter
from slime.rollout.engines.base import HostedEngine
from slime.rollout.engines.gpus import visible_gpus
from slime.types.errors import WrongState
from slime.types.rpc import RpcSettings


class ServiceActor:
    """Starts `serve` of one package in this process and answers for its life.

    name: of the service, "trainer-0"; its log is `log_dir/NAME.log`, which also takes what native code prints.
    directory: what relative paths are relative to, where this node has it.
    host: the address that it listens on; `token`: what calls to it must carry where others could reach that.
    """

    def __init__(self, name: str, log_dir: str, directory: str, host: str, token: str | None) -> None:
        self.name = name
        self.host = host
        self._token = token
        self._service: Any = None
        self._blobs: KeptWriter | None = None
        if os.path.isdir(directory):
            # Ray starts processes where the node was started.
            os.chdir(directory)
        _redirect_output(Path(log_dir) / f"{name}.log")
        interface = interface_of(host)
        if interface is not None:
            # Left alone, gloo takes the address of this host's name, which often is a loopback's.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def free_address(self) -> str:
        """A "host:port" that was free a moment ago, for a rendezvous of this process."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((self.host, 0))
            host = f"[{self.host}]" if family == socket.AF_INET6 else self.host
            return f"{host}:{probe.getsockname()[1]}"

    def devices(self) -> list[str]:
        """The GPUs that this process sees, as entries of CUDA_VISIBLE_DEVICES."""
        return visible_gpus()

    def start(self, module: str, settings: Any, rpc: RpcSettings, options: dict[str, Any]) -> str:
        """Calls `module.serve(settings, rpc, **options)`, to listen on this service's host; returns "host:port"."""
        rpc = dataclasses.replace(rpc, host=self.host)
        if self._token is not None:
            rpc = with_token(rpc, self._token)
        blobs = options.get("blobs")
        if isinstance(blobs, KeptWriter):
            self._blobs = blobs
        self._service = import_module(module).serve(settings, rpc, **options)
        return self._service.address

    def find_blobs(self, wanted: list[bytes]) -> Any:
        """See KeptWriter.offer; raises WrongState where the service keeps no blobs."""
        if self._blobs is None:
            raise WrongState(f"{self.name} keeps no blobs", field="blobs", value=self.name)
        return self._blobs.offer(wanted)

    def engines(self) -> list[HostedEngine]:
        """Those that the service here, a host of engines, has started."""
        return list(self._service.engines)

    def watch_engines(self) -> None:
        """Returns when they were stopped. Raises EngineError when one of them has died."""
        self._service.watch()

    def stop(self, grace_seconds: float) -> None:
        if self._service is not None:
            self._service.stop(grace_seconds)
            self._service = None

    def ping(self) -> None:
        """Answers, which tells that the process lives."""

    def watch(self) -> None:
        """Never returns: the end of this call tells that the process has died."""
        threading.Event().wait()


def with_token(rpc: RpcSettings, token: str) -> RpcSettings:
    """`rpc` with the token that the services of a run on several nodes share, for this process.

    It is kept in memory under the name of a file. What travels is as plain as Ray's own traffic.
    """
    secret = os.memfd_create("token")
    os.write(secret, token.encode())
    return dataclasses.replace(rpc, token_file=f"/proc/self/fd/{secret}", insecure=True)


def interface_of(host: str) -> str | None:
    """The network interface that has the address `host`, where that is not the loopback's."""
    import psutil

    try:
        if ipaddress.ip_address(host).is_loopback:
            return None
    except ValueError:  # a name
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    return None


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
