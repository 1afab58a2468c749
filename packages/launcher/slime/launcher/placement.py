"""Which process runs where: Ray resources from the flags.

On nodes without GPUs every trainer rank and every engine is a CPU process, and nothing is reserved: the phases of a
synchronous run take turns on the cores. With GPUs a trainer rank holds one, the rollout service `rollout_num_gpus`
others. Under `colocate` Ray gives it none, since a fraction would show it only one: it is told all of the trainers'.
Ranks are spread over `actor_num_nodes` nodes, in order; the rollout service and its engines are on one.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from slime.launcher.settings import LauncherSettings
from slime.rollout.engines.gpus import VISIBLE, visible_gpus
from slime.rollout.settings import RolloutSettings
from slime.types.errors import InvalidSetting, NotAvailable, Unavailable

log = logging.getLogger(__name__)

AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
CONNECT_SECONDS = 10.0
IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray
OBJECT_STORE_BYTES = 100 << 20  # where samples travel by gRPC: Ray carries only settings and addresses


# The engine works on the same cores: OpenMP threads that spin while they wait slow both down by an order of magnitude.
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Spot:
    """Where one service is started. host: the address that it listens on. options: of Ray, that lead it there."""

    host: str = "127.0.0.1"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """Ray actor options of each service of a run, and its nodes by their place in the list that was planned for.

    trainer_nodes: each has an equal share of the ranks, in order.
    shares_gpus: the rollout service uses the GPUs of the trainer's ranks, whatever its options say.
    offloads: the engines give their GPU memory back while the trainer works.
    spots: by service ("buffer", "rollout", "trainer-0"), once the nodes are known; a service without one is started
        anywhere, and listens on the loopback.
    """

    trainer_ranks: int
    trainer_nodes: tuple[int, ...] = (0,)
    rollout_node: int = 0
    shares_gpus: bool = False
    offloads: bool = False
    buffer: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    rollout: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    trainer: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    spots: Mapping[str, Spot] = field(default_factory=dict)

    @property
    def has_gpus(self) -> bool:
        return bool(self.trainer.get("num_gpus"))

    def nodes(self) -> dict[str, int]:
        """The node of each service."""
        each = self.trainer_ranks // len(self.trainer_nodes)
        trainers = {f"trainer-{rank}": self.trainer_nodes[rank // each] for rank in range(self.trainer_ranks)}
        return {"buffer": 0, "rollout": self.rollout_node, **trainers}


@contextmanager
def ray_cluster(
    address: str | None, num_cpus: int | None = None, *, object_store_bytes: int | None = OBJECT_STORE_BYTES
) -> Iterator[None]:
    """Connects to the Ray cluster at `address` or RAY_ADDRESS, or starts one for this run and stops it afterwards.

    object_store_bytes: of a cluster that is started; None for as much as Ray takes by itself, a third of the memory.
    Raises Unavailable where no cluster answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = dict(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            _join(address, options)
        else:
            local: dict[str, Any] = dict(include_dashboard=False, object_store_memory=object_store_bytes)
            with _token_of_this_process():
                ray.init(address="local", num_cpus=num_cpus, num_gpus=len(visible_gpus()), **local, **options)
        if threading.current_thread() is threading.main_thread():
            # Ray puts a handler of its own in place, which aborts the process.
            signal.signal(signal.SIGTERM, on_sigterm)
        yield
    finally:
        ray.shutdown()


@cache
def _own_token() -> str:
    return secrets.token_hex(32)


@contextmanager
def _token_of_this_process() -> Iterator[None]:
    """Lets Ray protect the cluster that it starts, as it does, and leave no token in the user's home.

    With a token there, every later `ray start --head` makes a cluster that asks for it, and `ray start --address` and
    `ray job submit` do not send it unasked.
    """
    before = {name: os.environ.get(name) for name in (AUTH_TOKEN, AUTH_MODE)}
    given = any(name in os.environ for name in (AUTH_TOKEN, AUTH_TOKEN_PATH))
    if not given and not Path("~/.ray/auth_token").expanduser().exists():
        os.environ[AUTH_TOKEN] = _own_token()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _join(address: str, options: dict[str, Any]) -> None:
    import ray

    if address.startswith("ray://"):
        raise NotAvailable(
            f"--ray-address {address} is not available yet: a run has to be started on a node of the cluster, "
            "`ray job submit` does that",
            field="--ray-address", value=address, expected="HOST:PORT or auto",
        )  # fmt: skip
    if "PYTHONPATH" in os.environ and IN_A_JOB not in os.environ:
        # The nodes were started without it. A job brings the environment that it was submitted with.
        options = options | {"runtime_env": {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}}
    try:
        _check_that_somebody_listens(address)
        ray.init(address=address, **options)
    except (OSError, RuntimeError) as error:
        raise Unavailable(
            f"--ray-address {address}: no Ray cluster that lets us in: {str(error).splitlines()[0]}; one with tokens "
            "needs RAY_AUTH_MODE=token and its token in ~/.ray/auth_token",
            field="--ray-address",
            value=address,
            expected="a running cluster",
        ) from error


def _check_that_somebody_listens(address: str) -> None:
    """Raises OSError, and InvalidSetting. Ray itself tries for minutes to reach a cluster that is gone."""
    from slime.launcher.doctor.probes import local_ray_address

    known = (local_ray_address() or "") if address == "auto" else address
    host, _, port = known.rpartition(":")
    if host and port.isdecimal() and 0 < int(port) < 65536:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    elif address not in ("auto", "local"):
        raise InvalidSetting(
            f"--ray-address: got {address!r}, expected HOST:PORT or auto",
            field="--ray-address", value=address, expected="HOST:PORT or auto",
        )  # fmt: skip


def plan_placement(
    launcher: LauncherSettings,
    rollout: RolloutSettings,
    gpus: int | Sequence[int],
    *,
    free: Sequence[int] | None = None,
) -> Placement:
    """Where the services of a run go.

    gpus: of one machine, or of each node of a cluster, that of the driver first. free: how many of them nobody holds;
    nodes where enough are free come first.
    Raises InvalidSetting, with the sum, where the flags ask for more nodes or GPUs, or for what does not fit together;
    NotAvailable for engines on several nodes.
    """
    counts = [gpus] if isinstance(gpus, int) else list(gpus)
    nodes, ranks = launcher.actor_num_nodes, launcher.actor_num_gpus_per_node
    asked, engine = rollout.rollout_num_gpus, rollout.rollout_num_gpus_per_engine
    external = bool(rollout.rollout_external_engine_addrs) or launcher.debug_train_only
    if launcher.debug_rollout_only:
        # What the trainer would have shared with the engines is theirs alone.
        asked = asked or (ranks if launcher.colocate else None)
        nodes, ranks = 1, 0
    if nodes > len(counts):
        raise InvalidSetting(
            f"--actor-num-nodes {nodes}: the Ray cluster has {_counted(len(counts), 'node')}",
            field="--actor-num-nodes", value=nodes, expected=f"at most {len(counts)}",
        )  # fmt: skip
    if not any(counts):
        if asked:
            raise InvalidSetting(
                f"--rollout-num-gpus {asked}: no GPU here; "
                "--rollout-num-engines sets how many engines run on the CPU",
                field="--rollout-num-gpus", value=asked, expected="a machine with GPUs",
            )  # fmt: skip
        # A node that trains nothing generates.
        spare = nodes if nodes < len(counts) else 0
        return Placement(nodes * ranks, tuple(range(nodes)), spare, offloads=rollout.offload_rollout is True)
    usable = _usable(counts, launcher.num_gpus_per_node)
    if external or _on_cpu(rollout):
        wanted = 0
    elif launcher.colocate and ranks:
        if nodes > 1:
            raise NotAvailable(
                f"--colocate with --actor-num-nodes {nodes} is not available yet: the engines of a run are on one node",
                field="--colocate", value=True, expected="--rollout-num-gpus beside the trainer's GPUs",
            )  # fmt: skip
        _check_shared(ranks, asked, engine)
        wanted = 0
    else:
        wanted = asked or engine
    _check_sum(nodes, ranks, wanted, usable)
    idle = [min(pair) for pair in zip(free or usable, usable, strict=True)]
    chosen = _choose_nodes(nodes, ranks, wanted, idle) or _choose_nodes(nodes, ranks, wanted, usable)
    if chosen is None:
        raise _does_not_fit(nodes, ranks, wanted, usable)
    trainer_nodes, rollout_node = chosen
    shares = launcher.colocate and bool(ranks) and not external and not _on_cpu(rollout)
    return Placement(
        nodes * ranks,
        trainer_nodes,
        trainer_nodes[0] if shares else rollout_node,
        rollout={"num_cpus": 0, "num_gpus": wanted},
        trainer={"num_cpus": 0, "num_gpus": 1},
        shares_gpus=shares,
        offloads=rollout.offloads and not external,
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _usable(counts: Sequence[int], limit: int | None) -> list[int]:
    """The GPUs of each node that the run may use."""
    if limit is None:
        return list(counts)
    if limit > max(counts):
        raise InvalidSetting(
            f"--num-gpus-per-node {limit}: no node has more than {max(counts)}",
            field="--num-gpus-per-node", value=limit, expected=f"at most {max(counts)}",
        )  # fmt: skip
    return [min(count, limit) for count in counts]


def _choose_nodes(nodes: int, ranks: int, rollout: int, gpus: Sequence[int]) -> tuple[tuple[int, ...], int] | None:
    """`nodes` nodes with `ranks` GPUs each, and one with `rollout` others; None where there are not as many."""
    # The tightest fit leaves whole nodes to the trainer.
    for place in sorted(
        (i for i, count in enumerate(gpus) if count >= rollout), key=lambda i: gpus[i] if rollout else i
    ):
        left = [count - (rollout if i == place else 0) for i, count in enumerate(gpus)]
        fitting = [i for i, count in enumerate(left) if count >= ranks][:nodes]
        if len(fitting) == nodes:
            return tuple(fitting), place
    return None


def _asked_for(nodes: int, ranks: int, rollout: int) -> str:
    several = f"--actor-num-nodes {nodes} x " if nodes > 1 else ""
    total = nodes * ranks + rollout
    return f"{several}--actor-num-gpus-per-node {ranks} + --rollout-num-gpus {rollout} = {total} GPUs"


def _check_sum(nodes: int, ranks: int, rollout: int, gpus: Sequence[int]) -> None:
    total = sum(gpus)
    if nodes * ranks + rollout <= total:
        return
    hint = "; --colocate lets both share" if rollout and nodes == 1 and ranks <= total else ""
    there = f"there are {total} here" if len(gpus) == 1 else f"the Ray cluster has {total} on {len(gpus)} nodes"
    raise InvalidSetting(
        f"{_asked_for(nodes, ranks, rollout)}, and {there}{hint}",
        field="--actor-num-gpus-per-node", value=ranks, expected=f"at most {total} together",
    )  # fmt: skip


def _does_not_fit(nodes: int, ranks: int, rollout: int, gpus: Sequence[int]) -> InvalidSetting | NotAvailable:
    has = f"the nodes of the Ray cluster have {', '.join(map(str, gpus))}"
    if rollout > max(gpus):
        return NotAvailable(
            f"--rollout-num-gpus {rollout} is not available yet: the engines of a run are on one node, and {has}",
            field="--rollout-num-gpus", value=rollout, expected=f"at most {max(gpus)}",
        )  # fmt: skip
    beside = f" and one with {rollout} others" if rollout else ""
    expected = f"{_counted(nodes, 'node')} with {ranks} GPUs each{beside}"
    return InvalidSetting(
        f"{_asked_for(nodes, ranks, rollout)}: expected {expected}; {has}",
        field="--actor-num-gpus-per-node", value=ranks, expected=expected,
    )  # fmt: skip


def _on_cpu(rollout: RolloutSettings) -> bool:
    return rollout.rollout_engine == "embedded" and rollout.rollout_engine_device == "cpu"


def _check_shared(ranks: int, asked: int | None, engine: int) -> None:
    """Engines that share the trainer's GPUs have all of them, and fill them."""
    if asked is not None and asked != ranks:
        raise InvalidSetting(
            f"--rollout-num-gpus {asked} contradicts --colocate with --actor-num-gpus-per-node {ranks}: "
            f"both have the same GPUs, expected {ranks}",
            field="--rollout-num-gpus", value=asked, expected=str(ranks),
        )  # fmt: skip
    if ranks % engine:
        raise InvalidSetting(
            f"--rollout-num-gpus-per-engine {engine} contradicts --colocate with --actor-num-gpus-per-node {ranks}: "
            f"expected a divisor of {ranks}",
            field="--rollout-num-gpus-per-engine", value=engine, expected=f"a divisor of {ranks}",
        )  # fmt: skip


def shared_devices(options: dict[str, Any], devices: Sequence[str]) -> dict[str, Any]:
    """Actor options of a service that uses GPUs which Ray has given to others: it sees `devices`, and Ray lets it."""
    variables = {VISIBLE: ",".join(devices), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    return options | {"runtime_env": {"env_vars": variables}}


def trainer_environment(launcher: LauncherSettings, gpus: bool) -> dict[str, str]:
    """Environment variables of a trainer's process, over those that it inherits."""
    variables = {} if gpus else dict(SHARED_CORES)
    if gpus and launcher.train_backend == "megatron" and "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        # Megatron overlaps tensor-parallel communication with computation by the order in one hardware queue.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if gpus and not launcher.colocate and "NCCL_CUMEM_ENABLE" not in os.environ:
        # SGLang's processes run without; of two sides that differ NCCL says `invalid argument` in the first broadcast.
        variables["NCCL_CUMEM_ENABLE"] = "0"
    return variables | launcher.train_env_vars
