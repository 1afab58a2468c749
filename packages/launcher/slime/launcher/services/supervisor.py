"""Keeps the service processes of a run: starts them, notices the death of one, stops what it started."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from slime.launcher.placement.plan import ServiceNode
from slime.launcher.services.credentials import Authority
from slime.launcher.services.processes import Process, Repeats, Start, last_lines
from slime.launcher.services.watch import LOOK_SECONDS, HealthProbe, WatchedProcess, kill_all
from slime.types.errors import DeadlineExceeded, SlimeError
from slime.types.rpc import RpcSettings
from slime.types.scratch import ScratchDirectory

log = logging.getLogger(__name__)
T = TypeVar("T")

# Time for a rollout call to end when the run is stopped: complete groups are kept, and a reward may run for ever.
LAST_ROLLOUT_SECONDS = 2.0
# A peer's death often shows first as a broken connection of another service.
CONSEQUENCES = ("UNAVAILABLE", "INTERNAL")
NOTICE_SECONDS = 60.0
AFTERMATH_SECONDS = 1.0
# Time for the calls of other ranks to end, once one has failed and all are to be repeated.
LEFTOVER_SECONDS = 60.0
# More than the ranks of any run: a rank that is not called would keep all others waiting for ever, in a collective. A
# thread is started only for a call that finds no idle thread.
MOST_CALLS = 16384


class ServiceDied(SlimeError):
    """A service process ended while the run needed it; the message ends with the last lines of its log."""

    status = "UNAVAILABLE"


class Supervisor:
    """The actors of one run. `call`, `call_all` and `join` raise ServiceDied as soon as any of them dies, and the error
    of a function that was passed to `begin` as soon as it fails.

    nodes: the nodes to start services on, by the service's name. repeats: set if lost services are started again; calls
    that failed meanwhile are then repeated, and a death does not end the run by itself.
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
        self.repeats: Repeats | None = None
        self.health_seconds: float | None = None
        self._spawning = threading.Lock()
        self._nodes = dict(nodes or {})
        several = any(node.host != ServiceNode.host for node in self._nodes.values())
        # Services answer only processes of this run, through TLS where other hosts can reach them.
        self.authority = Authority(several_nodes=several)
        self.start_seconds = start_seconds
        self._stop_seconds = stop_seconds
        self._processes: list[Process] = []
        self._death: Future[None] = Future()
        self._failure: Future[None] = Future()
        self._stopping = threading.Event()
        self._noting = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=MOST_CALLS, thread_name_prefix="call")
        self._calls: set[Future[Any]] = set()
        self._meeting: ScratchDirectory | None = None

    def spawn(self, name: str, options: dict[str, Any]) -> Process:
        """Creates the actor `name` on its node, with Ray `options` (resources, environment)."""
        node = self._nodes.get(name, ServiceNode())
        options = options | dict(node.options)
        actor = self._actor(name, options, node.host)
        process = Process(name, actor, actor.watch.remote(), node.host, options)
        self._processes.append(process)
        self.watch(process, process.watch)
        return process

    def _actor(self, name: str, options: dict[str, Any], host: str) -> Any:
        import ray

        from slime.launcher.services.actors import ServiceActor

        actor = ray.remote(ServiceActor).options(max_concurrency=4, max_restarts=0, **options)
        return actor.remote(name, str(self.log_dir), os.getcwd(), host)

    def watch(self, process: Process, reference: Any) -> None:
        """Watches a Ray call; its failure means that the process died, or ends the run with the call's error."""
        name = f"watch-{process.name}"
        threading.Thread(target=self._watch, args=(process, reference), name=name, daemon=True).start()

    @property
    def client_settings(self) -> RpcSettings:
        """The settings with which this process calls the services."""
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
        """Starts `module.serve` in all processes at once, each with its own settings and options; returns addresses."""

        starts = [Start(module, *each) for each in zip(settings, [rpc] * len(settings), options, strict=True)]
        for process, start in zip(processes, starts, strict=True):
            process.start = start
        return self.call_once([partial(self._start, *each) for each in zip(processes, starts, strict=True)])

    def _start(self, process: Process, start: Start) -> str:
        grant = self.authority.grant(self.get(process, process.actor.public_key.remote()), process.host)
        reference = process.actor.start.remote(start.module, start.settings, start.rpc, start.options, grant)
        process.address = self.get(process, reference)
        if self.health_seconds is not None:
            self._watch_process(process, self.health_seconds)
        return process.address

    def watch_processes(self, health_seconds: float) -> None:
        """Watches the services, all on this node, from now on. health_seconds: silence after which a service hangs."""
        self.health_seconds = health_seconds
        for process in self._processes:
            self._watch_process(process, health_seconds)

    def _watch_process(self, process: Process, health_seconds: float) -> None:
        process.watched = WatchedProcess(self.get(process, process.actor.pid.remote()))
        process.probe = HealthProbe(process.address, self.client_settings, health_seconds)

    def lost(self) -> dict[str, str]:
        """Returns the services that died or hang, by name, each with a reason such as "died"."""
        reasons = {}
        for process in list(self._processes):
            # `end` may take them away meanwhile, in another thread.
            watched, probe = process.watched, process.probe
            if watched is None or probe is None:
                continue
            if (reason := watched.look()) is not None:
                reasons[process.name] = reason
            elif probe.silent:
                reasons[process.name] = f"did not answer its health check within {self.health_seconds:g} s"
        return reasons

    def named(self, prefix: str) -> list[Process]:
        """Returns the processes of one kind of service ("buffer", "rollout" or "trainer"), in order."""
        return [process for process in self._processes if process.name.partition("-")[0] == prefix]

    def end(self, processes: Sequence[Process]) -> None:
        """Kills processes and all processes that they have started."""
        import ray

        _close_probes(processes)
        kill_all(watched for process in processes if (watched := process.watched) is not None)
        for process in processes:
            process.watched = process.probe = None
            ray.kill(process.actor)

    def spawn_again(self, processes: Sequence[Process]) -> None:
        """Creates new actors for processes that `end` has killed."""
        with self._spawning:
            self._refuse_if_stopping()
            for process in processes:
                process.answered = False
                process.actor = self._actor(process.name, process.options, process.host)
                process.watch = process.actor.watch.remote()

    def start_again(self, processes: Sequence[Process], **changes: Any) -> None:
        """Starts the services of `processes` as before, each at the address that it had.

        changes: fields of `Start` to replace, the same for all; `options` are added to those that each had.
        """

        def start(process: Process) -> str:
            assert process.start is not None, "it was started before"
            options = process.start.options | changes.get("options", {})
            rpc = replace(process.start.rpc, port=int(process.address.rpartition(":")[2]))
            return self._start(process, replace(process.start, **(changes | {"options": options, "rpc": rpc})))

        self.call_once([partial(start, process) for process in processes])

    def meeting_file(self) -> str:
        """Returns the URL of a new file, private to this user, through which trainer ranks on this node meet."""
        with self._spawning:
            self._refuse_if_stopping()
            self._end_meeting()
            self._meeting = ScratchDirectory("slime-ranks-")
            return f"file://{self._meeting.path}/store"

    def _end_meeting(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None

    def _refuse_if_stopping(self) -> None:
        if self._stopping.is_set():
            raise ServiceDied("the run is being stopped: nothing is started again")

    def get(self, process: Process, reference: Any) -> Any:
        """Returns the value of a Ray call; an error of the service is raised as the same class."""
        import ray

        try:
            answer = ray.get(reference, timeout=self.start_seconds)
            process.answered = True
            return answer
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SlimeError):
                raise error.cause from None
            raise
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(
                f"{process.name} did not answer within {self.start_seconds:.0f} s{self.last_lines(process.name)}"
            ) from None
        except ray.exceptions.RayError as error:
            # Either the process died, or its node before the process started.
            raise self._died(process, error) from None

    def call(self, function: Callable[[], T]) -> T:
        return self.call_all([function])[0]

    def call_all(self, functions: list[Callable[[], T]]) -> list[T]:
        """Runs `functions` at the same time; raises the first failure of a call or a process at once.

        With `repeats`, runs all of them again once a lost service is back.
        """
        repeats = self.repeats
        if repeats is None:
            return self.call_once(functions)
        while True:
            count = repeats.wait_until_whole()
            futures = [self._pool.submit(function) for function in functions]
            try:
                return self._results(futures)
            except SlimeError as error:
                if not repeats.explain(error, count):
                    raise
                log.info("calls are repeated, because a service was lost: %s", error)
                # Calls of ranks are collective: none may begin before all earlier calls have ended.
                wait(futures, timeout=LEFTOVER_SECONDS)

    def call_once(self, functions: Sequence[Callable[[], T]], *, without: Sequence[Process] = ()) -> list[T]:
        """Runs `functions` at the same time, and repeats none. Raises ServiceDied if one of the processes `without`
        which they cannot end is lost: while lost services are started again, nobody else looks for losses."""
        futures = [self._pool.submit(function) for function in functions]
        self._calls = {call for call in self._calls if not call.done()}.union(futures)
        return self._results(futures, without)

    def _results(self, futures: list[Future[T]], without: Sequence[Process] = ()) -> list[T]:
        waiting: set[Future[Any]] = set(futures)
        names = {process.name for process in without}
        while waiting:
            waiting -= self._wait(waiting, LOOK_SECONDS if without else None)
            if waiting and names and (lost := {n: reason for n, reason in self.lost().items() if n in names}):
                raise ServiceDied(" and ".join(f"{name} {reason}" for name, reason in lost.items()), field=min(lost))
        return [future.result() for future in futures]

    def fail(self, error: SlimeError) -> None:
        """Ends the run: every call raises `error` from now on."""
        with self._noting:
            if not self._stopping.is_set() and not self._death.done():
                self._death.set_exception(error)

    def begin(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` in another thread; see `join`."""
        future = self._pool.submit(function)
        future.add_done_callback(self._note_failure)
        return future

    def join(self, future: Future[T]) -> T:
        """Waits for a function that was passed to `begin`, and returns its value."""
        self._wait({future})
        return future.result()

    def _note_failure(self, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _wait(self, futures: set[Future[Any]], seconds: float | None = None) -> set[Future[Any]]:
        """Waits for one of `futures` or more; returns the finished ones. Raises their error, or a service's."""
        done, _ = wait(futures | {self._death, self._failure}, timeout=seconds, return_when=FIRST_COMPLETED)
        errors = [error for error in (future.exception() for future in done - {self._death}) if error is not None]
        consequence = errors and isinstance(errors[0], SlimeError) and errors[0].status in CONSEQUENCES
        if consequence and self.repeats is None:
            self._raise_if_one_died()
        if self._death.done():
            self._death.result()
        if errors:
            raise errors[0]
        return done

    def _raise_if_one_died(self) -> None:
        """Asks every process whether it lives, because a death may be behind a failed call. Raises ServiceDied.

        A process that lives answers at once; Ray takes a while to notice that a whole node is gone. If all live, waits
        a moment for a service to report the death of an engine.
        """
        import ray

        deadline = time.monotonic() + NOTICE_SECONDS
        pings = {process.actor.ping.remote(): process for process in self._processes}
        silent = list(pings)
        while silent and (left := deadline - time.monotonic()) > 0:
            answered, silent = ray.wait(silent, timeout=left)
            for reference in answered:
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:
                    raise self._died(pings[reference], error) from None
        wait({self._death}, timeout=AFTERMATH_SECONDS)

    def last_lines(self, name: str, count: int = 15) -> str:
        return last_lines(self.log_dir / f"{name}.log", count)

    def stop(self) -> None:
        """Stops the services in reverse order of their start, those of one kind together, then their processes. Safe to
        call twice.

        A quarter of the time, or less, is for running calls; what a service has started, like engines, ends after them.
        """
        import ray

        if self.repeats is not None:
            self.repeats.stop()
        self._stopping.set()
        with self._spawning:
            # A service that hangs does not stop by itself, and a dead one may have left child processes behind.
            hanging = self.lost()
        self.end([process for process in self._processes if process.name in hanging])
        _close_probes(self._processes)
        for kind, alike in groupby(reversed(self._processes), key=lambda process: process.name.partition("-")[0]):
            deadline = time.monotonic() + self._stop_seconds
            processes = list(alike)
            # A service that is still starting would not answer, and has nothing to stop.
            grace = min(self._stop_seconds / 4, LAST_ROLLOUT_SECONDS if kind == "rollout" else math.inf)
            stopping = [(p, p.actor.stop.remote(grace)) for p in processes if p.answered]
            for process in (p for p in processes if not p.answered):
                ray.kill(process.actor)
            for process, reference in stopping:
                try:
                    ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
                except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                    log.warning("%s did not stop cleanly: %s", process.name, type(error).__name__)
                ray.kill(process.actor)
        self._processes.clear()
        with self._spawning:
            self._end_meeting()
        self.authority.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        # A thread that calls Ray when it has ended would end this process, with an exit code of Ray's.
        wait(self._calls, timeout=AFTERMATH_SECONDS)

    def _watch(self, process: Process, reference: Any) -> None:
        import ray

        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if self.repeats is not None and not isinstance(cause, SlimeError):
                return  # `lost` reports the process
            self.fail(cause if isinstance(cause, SlimeError) else self._died(process, error))

    def _died(self, process: Process, error: Exception) -> ServiceDied:
        """Returns the error for a dead service, with the last lines of its log, or Ray's reason if there are none."""
        where = "" if process.host == ServiceNode.host else f" on {process.host}"
        lines = self.last_lines(process.name) or f": {str(error).strip()}"
        return ServiceDied(f"{process.name} died{where}{lines}", field=process.name)


def _close_probes(processes: Sequence[Process]) -> None:
    for process in processes:
        if (probe := process.probe) is not None:
            probe.close()
