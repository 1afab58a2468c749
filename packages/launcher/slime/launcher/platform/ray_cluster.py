"""The Ray cluster of a run: an existing one, or one that is started for the run and ends with it."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil

from slime.launcher.platform import probes
from slime.launcher.platform.ray_access import check_that_ray_asks_for_its_token, own_cluster, private_directory
from slime.launcher.platform.ray_processes import few_processes, no_signal_handler_of_ray
from slime.launcher.platform.signals import deferred, farewell, uninterrupted
from slime.rollout.engines.gpus import visible_gpus
from slime.types.addresses import split_address
from slime.types.errors import InvalidSetting, NotAvailable, Unavailable

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
RAY_STOP_SECONDS = 1.0
# Seconds for a start of Ray to finish after a signal, and again as many to break off, before it is killed.
PATIENCE_SECONDS = 2.0
START_SECONDS = 180.0
# Ray's raylet ends if its agents take longer than 15 s to start, which no setting changes.
START_ATTEMPTS = 3
LOOK_SECONDS = 0.2
ANSWER_SECONDS = 1.0
IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray
OBJECT_STORE_BYTES = 100 << 20  # samples travel by gRPC here, Ray carries only settings and addresses


@contextmanager
def ray_cluster(
    address: str | None, num_cpus: int | None = None, *, object_store_bytes: int | None = OBJECT_STORE_BYTES
) -> Iterator[None]:
    """Connects to the Ray cluster at `address` or RAY_ADDRESS, or starts one for this run and stops it afterwards.

    object_store_bytes: size of the object store of a cluster that is started; None for Ray's default, a third of the
    memory. A cluster that is started listens on the loopback. Raises Unavailable if no cluster answers at the address,
    if none can be started, or if it accepts work without a token.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = dict(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
    earlier_children = set(psutil.Process().children())
    # Children that this process starts later are not Ray's; a tracker may start one.
    servers: set[psutil.Process] | None = None

    def abandon(signum: int) -> None:
        _kill(_descendants(set(psutil.Process().children()) - earlier_children))
        _leave(signum)

    stack = ExitStack()
    try:
        # An interrupted start leaves processes behind.
        with deferred(PATIENCE_SECONDS, abandon), no_signal_handler_of_ray():
            if address:
                _join(address, options)
            else:
                options |= dict(num_cpus=num_cpus, object_store_memory=object_store_bytes)
                _start(stack, options)
            servers = set(psutil.Process().children()) - earlier_children
        check_that_ray_asks_for_its_token()
        yield
    finally:
        with uninterrupted():
            started = _descendants(set(psutil.Process().children()) - earlier_children if servers is None else servers)
            if not ray.is_initialized():
                _kill(started)
            ray.shutdown()
            # The services have been stopped, and Ray's own agents would outlive it by a minute.
            _kill(started)
            stack.close()


def _start(stack: ExitStack, options: dict[str, Any]) -> None:
    """Starts Ray on this machine, in a directory that ends with `stack`. Raises Unavailable."""
    import ray

    deadline = time.monotonic() + START_SECONDS
    for attempt in range(1, START_ATTEMPTS + 1):
        earlier_children = set(psutil.Process().children())
        try:
            return _start_once(stack, options, deadline)
        except Exception as error:  # Ray also raises plain exceptions
            if attempt == START_ATTEMPTS or not isinstance(error, RayletEnded):
                raise Unavailable(
                    f"Ray did not start on this machine: {str(error).partition(chr(10))[0]} ({_load()}). End other "
                    "work and try again, or start Ray beforehand (RAY_AUTH_MODE=token ray start --head) and give "
                    "--ray-address auto",
                    field="--ray-address", value="", expected="a machine with idle cores and free memory",
                ) from error  # fmt: skip
            log.warning("Ray did not start (%s, %s); trying again", error, _load())
            _kill(_descendants(set(psutil.Process().children()) - earlier_children))
            ray.shutdown()


class RayletEnded(Exception):
    """Ray's raylet ended before this machine was a node of the cluster."""


def _start_once(stack: ExitStack, options: dict[str, Any], deadline: float) -> None:
    import ray

    directory = stack.enter_context(private_directory())
    with own_cluster(), few_processes(), _patient(deadline):
        ray.init(
            _temp_dir=str(directory),
            address="local",
            num_gpus=len(visible_gpus()),
            include_dashboard=False,
            **options,
        )


@contextmanager
def _patient(deadline: float) -> Iterator[None]:
    """Gives Ray's processes until `deadline` (monotonic seconds) to start. The block raises RayletEnded if they cannot.

    Ray itself gives up after 30 s, which no setting changes; on a busy machine its processes may need longer.
    """
    from ray._private import services

    look_up = services.get_node

    def get_node(gcs_address: str, node_id: str) -> Any:
        # Ray's look-up holds the GIL while it waits, so that no signal would be handled.
        while time.monotonic() < deadline and not _has_nodes(gcs_address):
            if not _raylets():
                raise RayletEnded("its raylet ended")
            time.sleep(LOOK_SECONDS)
        return look_up(gcs_address, node_id)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = look_up


def _raylets() -> list[psutil.Process]:
    """Returns the raylets that run below this process."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _has_nodes(gcs_address: str) -> bool:
    """Returns whether the cluster of this control service has a node; False also if the service does not answer yet."""
    from ray._raylet import GcsClient

    try:
        return bool(GcsClient(address=gcs_address).get_all_node_info(timeout=ANSWER_SECONDS))
    except Exception as error:  # Ray raises its own and plain exceptions if a service does not answer
        log.debug("Ray at %s: %s", gcs_address, error)
        return False


def _load() -> str:
    free = psutil.virtual_memory().available / 2**30
    return f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores, {free:.1f} GiB of memory free"


def _descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found += [process, *process.children(recursive=True)]
    return found


def _kill(processes: Iterable[psutil.Process]) -> None:
    """Kills processes and those that they start meanwhile. They are suspended first, so that they start no more."""
    to_kill = set(processes)
    for process in list(to_kill):
        with suppress(psutil.NoSuchProcess):
            process.suspend()
            to_kill |= set(process.children(recursive=True))
    for process in to_kill:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(to_kill, timeout=RAY_STOP_SECONDS)


def _leave(signum: int) -> None:
    """Ends this process if its main thread is inside Ray and does not return."""
    text, code = farewell(signum)
    if sys.stdout.isatty():
        print("\033[?25h", end="", flush=True)  # a progress display has hidden the cursor
    print(text, file=sys.stderr, flush=True)
    os._exit(code)


def address_for_auto(flag: str = "--ray-address") -> str:
    """Returns host:port of the cluster that `auto` stands for: one that this user runs. Raises Unavailable.

    Ray itself takes any cluster that its note in /tmp or the list of processes names. Every user of the machine may
    write that note or start such a process, and would be given the token and the code of the run.
    """
    noted, own = probes.local_ray_address(), sorted(probes.own_ray_addresses())
    if noted in own:
        return str(noted)
    if len(own) == 1:
        return own[0]
    if own:
        problem, remedy = f"this user runs several here: {', '.join(own)}", "give the address of one of them"
    elif noted is None:
        problem, remedy = "no Ray was started on this machine", "run `ray start --head`, or leave out the address"
    else:
        problem = f"the one noted for this machine, {noted}, has ended, or another user runs it"
        remedy = "run `ray start --head`, or give its address if you trust that user"
    raise Unavailable(f"{flag} auto: {problem}; {remedy}", field=flag, value="auto", expected="a Ray of this user")


def _join(address: str, options: dict[str, Any]) -> None:
    import ray

    if address.startswith("ray://"):
        raise NotAvailable.unavailable(
            f"--ray-address {address}", "a run has to be started on a node of the cluster", "`ray job submit`"
        )
    if "PYTHONPATH" in os.environ and IN_A_JOB not in os.environ:
        # Nodes of the cluster were started without our PYTHONPATH; a submitted job brings its own.
        options = options | {"runtime_env": {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}}
    if address == "auto":
        # Also tells Ray, which would look again, and elsewhere.
        address = address_for_auto()
        log.info("--ray-address auto: joining the Ray cluster at %s", address)
    try:
        _check_that_somebody_listens(address)
        ray.init(address=address, **options)
    except (OSError, RuntimeError) as error:
        raise Unavailable(
            f"--ray-address {address}: cannot join a Ray cluster there: {str(error).splitlines()[0]}; a cluster that "
            "asks for a token needs RAY_AUTH_MODE=token and the token in ~/.ray/auth_token",
            field="--ray-address",
            value=address,
            expected="a running cluster",
        ) from error


def _check_that_somebody_listens(address: str) -> None:
    """Raises OSError, and InvalidSetting. Ray itself tries for minutes to reach a cluster that is gone."""
    try:
        where = split_address(address, "--ray-address")
    except InvalidSetting as error:
        if address == "local":
            return
        raise InvalidSetting.must_be("--ray-address", f"{error.expected}, or auto", got=address) from None
    socket.create_connection(where, timeout=CONNECT_SECONDS).close()
