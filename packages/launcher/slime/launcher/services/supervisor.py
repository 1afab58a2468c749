"""Keeps the service processes of a run: starts them, notices the death of one, stops what it started."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from slime.launcher.placement.plan import ServiceNode
from slime.launcher.services.credentials import Authority
from slime.types.errors import DeadlineExceeded, SlimeError
from slime.types.rpc import RpcSettings

log = logging.getLogger(__name__)
T = TypeVar("T")

# A peer's death often shows first as a broken connection of another service.
CONSEQUENCES = ("UNAVAILABLE", "INTERNAL")
NOTICE_SECONDS = 60.0
AFTERMATH_SECONDS = 1.0
# More than ranks of any run: one that is called late keeps all others waiting for ever, in a collective. A thread is
# only started for a call that finds no idle one.
MOST_CALLS = 16384


class ServiceDied(SlimeError):
    """A service process ended while the run needed it; the message ends with the last lines of its log."""

    status = "UNAVAILABLE"


@dataclass
class Process:
    name: str
    actor: Any
    watch: Any
    host: str
    # True once the service has answered a call.
    answered: bool = False


class Supervisor:
    """The actors of one run. `call`, `call_all` and `join` return early, with ServiceDied, when any of them dies, and
    with its error when something that was begun fails.

    nodes: where services are started, by name.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        start_seconds: float,
        stop_seconds: float,
        nodes: Mapping[str, ServiceNode] | None = None,
    ) -> None:
        self.log_dir = log_dir
        self._nodes = dict(nodes or {})
        several = any(node.host != ServiceNode.host for node in self._nodes.values())
        # Services answer only processes of this run, through TLS where other hosts can reach them.
        self.authority = Authority(several_nodes=several)
        self._start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._processes: list[Process] = []
        self._death: Future[None] = Future()
        self._failure: Future[None] = Future()
        self._stopping = threading.Event()
        self._noting = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=MOST_CALLS, thread_name_prefix="call")

    def spawn(self, name: str, options: dict[str, Any]) -> Process:
        """Creates the actor `name` on its node, with Ray `options` (resources, environment)."""
        import ray

        from slime.launcher.services.actors import ServiceActor

        node = self._nodes.get(name, ServiceNode())
        actor = (
            ray.remote(ServiceActor)
            .options(max_concurrency=4, max_restarts=0, **(options | dict(node.options)))
            .remote(name, str(self.log_dir), os.getcwd(), node.host)
        )
        process = Process(name, actor, actor.watch.remote(), node.host)
        self._processes.append(process)
        self.watch(process, process.watch)
        return process

    def watch(self, process: Process, reference: Any) -> None:
        """Watches a Ray call, whose failure means that the process died, or ends the run with its error."""
        name = f"watch-{process.name}"
        threading.Thread(target=self._watch, args=(process, reference), name=name, daemon=True).start()

    @property
    def client_settings(self) -> RpcSettings:
        """Settings with which this process calls the services."""
        return self.authority.client_settings

    def start(self, process: Process, module: str, settings: Any, rpc: RpcSettings, **options: Any) -> str:
        """Starts `module.serve` in `process`; returns its address."""
        return self.start_each([process], module, [settings], rpc, [options])[0]

    def start_all(
        self, ranks: list[Process], module: str, settings: Any, rpc: RpcSettings, **options: Any
    ) -> list[str]:
        """Starts `module.serve(..., rank=i)` in each of `ranks` at once; returns their addresses."""
        each = [{**options, "rank": rank} for rank in range(len(ranks))]
        return self.start_each(ranks, module, [settings] * len(ranks), rpc, each)

    def start_each(
        self,
        processes: Sequence[Process],
        module: str,
        settings: Sequence[Any],
        rpc: RpcSettings,
        options: Sequence[dict[str, Any]],
    ) -> list[str]:
        """Starts `module.serve` in all of them at once, each with settings and options of its own."""

        def start(process: Process, settings: Any, options: dict[str, Any]) -> str:
            grant = self.authority.grant(self.get(process, process.actor.public_key.remote()), process.host)
            return self.get(process, process.actor.start.remote(module, settings, rpc, options, grant))

        each = zip(processes, settings, options, strict=True)
        return self.call_all([partial(start, *arguments) for arguments in each])

    def get(self, process: Process, reference: Any) -> Any:
        """Returns the value of a Ray call; an error of the service is raised as the same class."""
        import ray

        try:
            answer = ray.get(reference, timeout=self._start_seconds)
            process.answered = True
            return answer
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SlimeError):
                raise error.cause from None
            raise
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(
                f"{process.name} did not answer within {self._start_seconds:.0f} s{self.last_lines(process.name)}"
            ) from None
        except ray.exceptions.RayError as error:
            # Either the process died, or its node before the process started.
            raise self._died(process, error) from None

    def call(self, function: Callable[[], T]) -> T:
        return self.call_all([function])[0]

    def call_all(self, functions: list[Callable[[], T]]) -> list[T]:
        """Runs `functions` at once; the first failure, of a call or a process, is raised at once."""
        futures = [self._pool.submit(function) for function in functions]
        waiting: set[Future[Any]] = set(futures)
        while waiting:
            waiting -= self._wait(waiting)
        return [future.result() for future in futures]

    def begin(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` beside what this thread does; see `join`."""
        future = self._pool.submit(function)
        future.add_done_callback(self._note_failure)
        return future

    def join(self, future: Future[T]) -> T:
        """Returns the value of a call that was begun."""
        self._wait({future})
        return future.result()

    def _note_failure(self, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _wait(self, futures: set[Future[Any]]) -> set[Future[Any]]:
        """Waits for one of `futures` or more; returns the finished ones. Raises their error, or a service's."""
        done, _ = wait(futures | {self._death, self._failure}, return_when=FIRST_COMPLETED)
        errors = [error for error in (future.exception() for future in done - {self._death}) if error is not None]
        if errors and isinstance(errors[0], SlimeError) and errors[0].status in CONSEQUENCES:
            self._raise_if_one_died()
        if self._death.done():
            self._death.result()
        if errors:
            raise errors[0]
        return done

    def _raise_if_one_died(self) -> None:
        """Raises ServiceDied where the death of a process may be behind what failed: every one of them is asked.

        One that lives answers at once; Ray takes a while to notice that a whole node is gone. Returns when the death of
        what they watch is known, or not to be expected any more.
        """
        import ray

        deadline = time.monotonic() + NOTICE_SECONDS
        asked = {process.actor.ping.remote(): process for process in self._processes}
        silent = list(asked)
        while silent and (left := deadline - time.monotonic()) > 0:
            answered, silent = ray.wait(silent, timeout=left)
            for reference in answered:
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    raise self._died(asked[reference], error) from None
        # All processes live, but an engine may have died, which its service reports a moment later.
        wait({self._death}, timeout=AFTERMATH_SECONDS)

    def last_lines(self, name: str, count: int = 15) -> str:
        path = self.log_dir / f"{name}.log"
        if not path.exists():
            return ""
        lines = path.read_text(errors="replace").splitlines()[-count:]
        if not lines:
            return ""
        return "".join(f"\n    | {line}" for line in [f"last lines of {path}:", *lines])

    def stop(self) -> None:
        """Stops the services in reverse order of their start, those of one kind together, then their processes. Safe to
        call twice.

        A quarter of the time is for calls that run; what is behind a service, an engine say, ends after them.
        """
        import ray

        self._stopping.set()
        for _, alike in groupby(reversed(self._processes), key=lambda process: process.name.partition("-")[0]):
            deadline = time.monotonic() + self._stop_seconds
            processes = list(alike)
            # A service that is still starting would not answer, and has nothing to stop.
            stopping = [(p, p.actor.stop.remote(self._stop_seconds / 4)) for p in processes if p.answered]
            for process in processes:
                if not process.answered:
                    ray.kill(process.actor)
            for process, reference in stopping:
                try:
                    ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
                except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                    log.warning("%s did not stop cleanly: %s", process.name, type(error).__name__)
                ray.kill(process.actor)
        self._processes.clear()
        self.authority.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _watch(self, process: Process, reference: Any) -> None:
        import ray

        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            found = cause if isinstance(cause, SlimeError) else self._died(process, error)
            with self._noting:
                if not self._stopping.is_set() and not self._death.done():
                    self._death.set_exception(found)

    def _died(self, process: Process, error: Exception) -> ServiceDied:
        """Names the service, and its host where there are several; Ray's reason where it left no lines of its own."""
        where = "" if process.host == ServiceNode.host else f" on {process.host}"
        lines = self.last_lines(process.name) or f": {str(error).strip()}"
        return ServiceDied(f"{process.name} died{where}{lines}", field=process.name)
