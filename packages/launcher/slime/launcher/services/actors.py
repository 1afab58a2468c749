"""One Ray actor per service process. The actor hosts the service; the service does not know Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import sys
import threading
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from slime.launcher.blob_stores.base import KeptWriter
from slime.launcher.services.credentials import Grant, Identity
from slime.rollout.engines.base import HostedEngine
from slime.rollout.engines.gpus import visible_gpus
from slime.types.errors import DeadlineExceeded, Unavailable, WrongState
from slime.types.rpc import RpcSettings
from slime.types.rpc.garbage import spare_long_lived
from slime.types.rpc.token_files import LOCALHOST, is_loopback


class ServiceActor:
    """Runs `serve` of one package in this process, and shows that the process lives.

    name: the service's name, "trainer-0"; its log is `log_dir/NAME.log`, which also takes the output of native code.
    directory: the working directory, if this node has it.
    host: the address that the service listens on.
    """

    def __init__(self, name: str, log_dir: str, directory: str, host: str) -> None:
        self.name = name
        self.host = host
        self._identity = Identity()
        self._service: Any = None
        self._serves = threading.Event()
        self._blobs: KeptWriter | None = None
        # Two threads that import the same modules may see a module that is only half executed.
        self._importing = threading.Lock()
        if os.path.isdir(directory):
            # Ray starts processes in the directory where the node was started.
            os.chdir(directory)
        _redirect_output(Path(log_dir) / f"{name}.log")
        interface = interface_of(host)
        if interface is not None:
            # By default gloo listens at the address that the host's name resolves to, which may be public or wrong.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface is not None and is_loopback(host):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)

    def meeting_point(self, ports: int = 1) -> str:
        """Returns a "host:port" of this process, at which the ranks of a trainer or the nodes of an engine meet. It was
        free a moment ago, and so were the following ports: `ports` in all."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        host = f"[{self.host}]" if family == socket.AF_INET6 else self.host
        while True:
            with contextlib.ExitStack() as stack:
                first = stack.enter_context(socket.socket(family))
                first.bind((self.host, 0))
                port = first.getsockname()[1]
                try:
                    for number in range(1, ports):
                        stack.enter_context(socket.socket(family)).bind((self.host, port + number))
                except (OSError, OverflowError):  # taken, or beyond the last port
                    continue
                return f"{host}:{port}"

    def devices(self) -> list[str]:
        """Returns the GPUs that this process sees, as entries of CUDA_VISIBLE_DEVICES."""
        return visible_gpus()

    def public_key(self) -> bytes:
        """Returns the public key with which the launcher encrypts the run's token for this process."""
        return self._identity.public_key

    def preload(self, module: str, *arguments: Any) -> None:
        """Calls `module.preload`. An error there comes again in `start`, whose caller handles it."""
        with self._importing:
            try:
                import_module(module).preload(*arguments)
            except Exception:
                # Printed into the service's log: a second import of a C extension may fail for another reason.
                traceback.print_exc()

    def start(self, module: str, settings: Any, rpc: RpcSettings, options: dict[str, Any], grant: Grant) -> str:
        """Calls `module.serve(settings, rpc, **options)`, to listen on this service's host; returns "host:port"."""
        rpc = self._identity.accept(grant, dataclasses.replace(rpc, host=self.host))
        blobs = options.get("blobs")
        if isinstance(blobs, KeptWriter):
            self._blobs = blobs
        with self._importing:
            serve = import_module(module).serve
        self._service = serve(settings, rpc, **options)
        spare_long_lived()
        self._serves.set()
        return self._service.address

    def address(self) -> str:
        """Waits until the service is started; returns "host:port"."""
        self._serves.wait()
        return self._service.address

    def find_blobs(self, wanted: list[bytes]) -> Any:
        """Calls KeptWriter.offer; raises WrongState if the service keeps no blobs."""
        if self._blobs is None:
            raise WrongState(f"{self.name} keeps no blobs", field="blobs", value=self.name)
        return self._blobs.offer(wanted)

    def engines(self) -> list[HostedEngine]:
        """Returns the engines that this process has started."""
        return list(self._service.engines)

    def watch_engines(self) -> None:
        """Waits until the engines are stopped. Raises EngineError when one of them dies."""
        self._service.watch()

    def stop(self, grace_seconds: float) -> None:
        if self._service is not None:
            self._service.stop(grace_seconds)
            self._service = None

    def pid(self) -> int:
        return os.getpid()

    def ping(self) -> None:
        """Returns at once, which shows that the process lives."""

    def watch(self) -> None:
        """Never returns; the call ends only when the process dies."""
        threading.Event().wait()


@dataclasses.dataclass(frozen=True)
class AddressOf:
    """Waits for a service that starts beside the one that calls this; returns its "host:port".

    reference: Ray's, to the answer of `ServiceActor.address`. seconds: longest wait.

    Raises Unavailable if the service ends, DeadlineExceeded.
    """

    reference: Any
    seconds: float

    def __call__(self) -> str:
        import ray

        try:
            return str(ray.get(self.reference, timeout=self.seconds))
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(f"a service did not start within {self.seconds:g} s") from None
        except ray.exceptions.RayError as error:
            raise Unavailable(f"a service ended while it started: {error}") from None


def interface_of(host: str) -> str | None:
    """Returns the network interface that has the address `host`."""
    import psutil

    address = LOCALHOST if is_loopback(host) else host
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
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
    # Ray has replaced sys.stdout and sys.stderr of its workers; write to the file descriptors again. Text of models and
    # data may hold surrogates, which UTF-8 cannot encode: logging it must not raise in place of what is logged.
    sys.stdout, sys.stderr = (
        os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8", errors="backslashreplace") for number in (1, 2)
    )
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
