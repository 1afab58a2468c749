"""Keeps the service processes of a run: starts them, notices the death of one, stops what it started."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from slime.types.errors import DeadlineExceeded, SlimeError
from slime.types.rpc import RpcSettings

log = logging.getLogger(__name__)
T = TypeVar("T")


class ServiceDied(SlimeError):
    """A service process ended while the run needed it; the message ends with the last lines of its log."""

    status = "UNAVAILABLE"


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


@dataclass
class Process:
    name: str
    actor: Any
    watch: Any


class Supervisor:
    """The actors of one run. `call` and `call_all` return early, with ServiceDied, when any of them dies."""

    def __init__(self, log_dir: Path, *, start_seconds: float, stop_seconds: float) -> None:
        self.log_dir = log_dir
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._processes: list[Process] = []
        self._death: Future[None] = Future()
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="call")

    def spawn(self, name: str, options: dict[str, Any]) -> Process:
        """Creates the actor `name` with Ray `options` (resources, placement)."""
        import ray

        from slime.launcher.actors import ServiceActor

        actor = (
            ray.remote(ServiceActor)
            .options(max_concurrency=4, max_restarts=0, **options)
            .remote(name, str(self.log_dir))
        )
        process = Process(name, actor, actor.watch.remote())
        self._processes.append(process)
        threading.Thread(target=self._watch, args=(process,), name=f"watch-{name}", daemon=True).start()
        return process

    def start(self, process: Process, module: str, settings: Any, rpc: RpcSettings, **options: Any) -> str:
        """Starts `module.serve` in `process`; returns its address."""
        return self.call(lambda: self.get(process, process.actor.start.remote(module, settings, rpc, options)))

    def start_all(
        self, ranks: list[Process], module: str, settings: Any, rpc: RpcSettings, **options: Any
    ) -> list[str]:
        """Starts `module.serve(..., rank=i)` in each of `ranks` at once; returns their addresses."""

        def starter(rank: int, process: Process) -> Callable[[], str]:
            return lambda: self.get(
                process, process.actor.start.remote(module, settings, rpc, {**options, "rank": rank})
            )

        return self.call_all([starter(rank, process) for rank, process in enumerate(ranks)])

    def get(self, process: Process, reference: Any) -> Any:
        """The value of a Ray call; what the service raised is raised here as the same class."""
        import ray

        try:
            return ray.get(reference, timeout=self._start_seconds)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SlimeError):
                raise error.cause from None
            raise
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(
                f"{process.name} did not answer within {self._start_seconds:.0f} s{self.last_lines(process.name)}"
            ) from None
        except ray.exceptions.RayActorError:
            raise ServiceDied(f"{process.name} died{self.last_lines(process.name)}", field=process.name) from None

    def call(self, function: Callable[[], T]) -> T:
        return self.call_all([function])[0]

    def call_all(self, functions: list[Callable[[], T]]) -> list[T]:
        """Runs `functions` at once; the first failure, of a call or a process, is raised at once."""
        futures = [self._pool.submit(function) for function in functions]
        waiting: set[Future[Any]] = set(futures)
        while waiting:
            done, _ = wait(waiting | {self._death}, return_when=FIRST_COMPLETED)
            if self._death in done:
                self._death.result()
            for future in done & waiting:
                error = future.exception()
                if error is not None:
                    # A peer's death often shows first as a broken connection: give the watcher a moment to name it.
                    wait(
                        {self._death},
                        timeout=2.0 if isinstance(error, SlimeError) and error.status == "UNAVAILABLE" else 0,
                    )
                    if self._death.done():
                        self._death.result()
                    raise error
            waiting -= done
        return [future.result() for future in futures]

    def last_lines(self, name: str, count: int = 15) -> str:
        path = self.log_dir / f"{name}.log"
        if not path.exists():
            return ""
        lines = path.read_text(errors="replace").splitlines()[-count:]
        return "".join(f"\n    | {line}" for line in [f"last lines of {path}:", *lines])

    def stop(self) -> None:
        """Stops the services in reverse order of their start, then their processes. Safe to call twice.

        A quarter of the time is for calls that run; what is behind a service, an engine say, ends after them.
        """
        import ray

        self._stopping.set()
        for process in reversed(self._processes):
            try:
                ray.get(process.actor.stop.remote(self._stop_seconds / 4), timeout=self._stop_seconds)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                log.warning("%s did not stop cleanly: %s", process.name, type(error).__name__)
            ray.kill(process.actor)
        self._processes.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _watch(self, process: Process) -> None:
        import ray

        try:
            ray.get(process.watch)
        except ray.exceptions.RayError:
            if not self._stopping.is_set() and not self._death.done():
                self._death.set_exception(
                    ServiceDied(f"{process.name} died{self.last_lines(process.name)}", field=process.name)
                )


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM raise Terminated in the main thread, so that both signals take one way out."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise Terminated()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignores SIGINT and SIGTERM while a run is being stopped: a second Ctrl-C must not leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
