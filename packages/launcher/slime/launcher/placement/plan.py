"""Plans the placement of a run's processes: derives Ray resources from the flags.

On nodes without GPUs every trainer rank and every engine is a CPU process, and nothing is reserved: the phases of a
synchronous run take turns on the cores. With GPUs a trainer rank holds one GPU, and the rollout service holds
`rollout_num_gpus` others. With `colocate` Ray assigns no GPU to the rollout service, since a fraction would make only
one visible; it gets the list of the trainer's GPUs instead. Ranks are spread over `actor_num_nodes` nodes, in order.
The rollout service starts the engines on its own node; if they are on several nodes, a service on each of them starts
its engines and holds their GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime.launcher.config.settings import LauncherSettings
from slime.launcher.placement.nodes import (
    EngineShare,
    GpuRequest,
    check_shared,
    check_sum,
    choose_idle,
    divide_embedded,
    does_not_fit,
    parts_of_engines,
)
from slime.launcher.platform.probes import cpus
from slime.rollout.engines.embedded.launch import SHARED_CORES
from slime.rollout.engines.gpus import VISIBLE
from slime.rollout.engines.registry import counted_by_engines, needs_gpu, no_gpu_for
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import InvalidSetting, NotAvailable, counted

THREADS = "OMP_NUM_THREADS"
# In narrower models a second thread does not speed up an operation, and slows it down while the cores are busy.
LEAST_HIDDEN_SIZE = 256


@dataclass(frozen=True)
class ServiceNode:
    """The node of one service. host: the address that it listens on. options: the Ray options that place it there."""

    host: str = "127.0.0.1"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """Ray actor options and nodes of a run's services. Nodes are indices into the list that the plan was made for.

    trainer_nodes: nodes of the trainer; each has an equal share of the ranks, in order.
    engines: shares of the nodes with engines, in order; the rollout service is on the first.
    shares_gpus: whether engines use the GPUs of the trainer's ranks on their node, whatever the options of a service.
    offloads: whether the engines release their GPU memory while the trainer works.
    service_nodes: nodes by service ("buffer", "rollout", "engines-0", "trainer-0"), once they are known; a service
        without a node starts anywhere, and listens on the loopback.
    """

    trainer_ranks: int
    trainer_nodes: tuple[int, ...] = (0,)
    engines: tuple[EngineShare, ...] = (EngineShare(0),)
    shares_gpus: bool = False
    offloads: bool = False
    buffer: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    trainer: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    service_nodes: Mapping[str, ServiceNode] = field(default_factory=dict)

    @property
    def has_gpus(self) -> bool:
        return bool(self.trainer.get("num_gpus"))

    @property
    def rollout(self) -> dict[str, Any]:
        """Options of the rollout service."""
        return {"num_cpus": 0} if self.engine_hosts() else self.engine_options(self.engines[0])

    def engine_options(self, share: EngineShare) -> dict[str, Any]:
        """Returns the options of the service that starts these engines."""
        return {"num_cpus": 0, "num_gpus": 0 if self.shares_gpus else share.gpus}

    def engine_hosts(self) -> dict[str, EngineShare]:
        """Returns the services that only start engines; none if the rollout service starts them."""
        several = len(self.engines) > 1
        return {f"engines-{number}": share for number, share in enumerate(self.engines)} if several else {}

    def nodes(self) -> dict[str, int]:
        """Returns the node of each service."""
        each = self.trainer_ranks // len(self.trainer_nodes)
        trainers = {f"trainer-{rank}": self.trainer_nodes[rank // each] for rank in range(self.trainer_ranks)}
        hosts = {name: share.node for name, share in self.engine_hosts().items()}
        return {"buffer": 0, "rollout": self.engines[0].node, **hosts, **trainers}


def plan_placement(
    launcher: LauncherSettings,
    rollout: RolloutSettings,
    gpus: int | Sequence[int],
    *,
    free: Sequence[int] | None = None,
) -> Placement:
    """Places the services of a run.

    gpus: number of GPUs of one machine, or of each node of a cluster, the driver's first. free: number of those that
    nobody holds; nodes with enough free GPUs come first.
    Raises InvalidSetting, with the sum, if the flags ask for more nodes or GPUs than there are, or do not fit together.
    """
    counts = [gpus] if isinstance(gpus, int) else list(gpus)
    nodes, ranks = launcher.actor_num_nodes, launcher.actor_num_gpus_per_node
    rollout_gpus, engine = rollout.rollout_num_gpus, rollout.rollout_num_gpus_per_engine
    external = bool(rollout.rollout_external_engine_addrs) or launcher.debug_train_only
    # The engines of several models are started by one service, so that they are on one node, as if they were one.
    together = bool(rollout.served_models) and not external
    if together:
        engine = rollout_gpus or engine
    if launcher.debug_rollout_only:
        # Without a trainer, colocated engines get the GPUs that they would have shared with it.
        rollout_gpus = rollout_gpus or (nodes * ranks if launcher.colocate else None)
        nodes, ranks = 1, 0
    if nodes > len(counts):
        raise InvalidSetting.must_be(
            "--actor-num-nodes", f"at most {len(counts)}", got=nodes,
            reason=f"the Ray cluster has {counted(len(counts), 'node')}",
        )  # fmt: skip
    if not any(counts):
        if rollout.rollout_num_gpus:
            raise no_gpu_for(rollout.rollout_num_gpus, "--dry-run --dry-run-gpus N plans for nodes that have them")
        if launcher.num_gpus_per_node is not None:
            limit = launcher.num_gpus_per_node
            raise InvalidSetting.requires(
                f"--num-gpus-per-node {limit}", f"nodes with {counted(limit, 'GPU')}",
                f"there is no GPU here; --dry-run --dry-run-gpus {limit} plans for nodes that have them",
            )  # fmt: skip
        trainer_nodes = tuple(range(nodes))
        number = 1 if external else rollout.rollout_num_engines
        on_cpu = _embedded_on(trainer_nodes, len(counts), launcher, 1 if together else number)
        return Placement(
            nodes * ranks,
            trainer_nodes,
            (replace(on_cpu[0], embedded=number),) if together else on_cpu,
            offloads=rollout.offload_rollout is True,
        )
    usable = _usable(counts, launcher.num_gpus_per_node)
    elsewhere = external or _on_cpu(rollout)
    shares = launcher.colocate and bool(ranks) and not elsewhere
    if shares:
        check_shared(nodes, ranks, rollout_gpus, engine)
    further = 0 if elsewhere or shares else rollout_gpus or engine
    request = GpuRequest(nodes, ranks, further, engine, together=together)
    check_sum(request, usable)
    idle = [min(pair) for pair in zip(free or usable, usable, strict=True)]
    chosen = choose_idle(request, idle, usable)
    if chosen is None:
        raise does_not_fit(request, usable)
    trainer_nodes, engines = chosen
    if together and len(trainer_nodes if shares else engines) > 1:
        raise NotAvailable.unavailable(
            f"{rollout.models_source} with engines on several nodes",
            f"they have {rollout_gpus} GPUs together, and the largest node has {max(usable)}",
            "fewer GPUs" if shares else "fewer GPUs, or --rollout-external-engine-addrs with engines that run already",
        )  # fmt: skip
    if shares:
        engines = parts_of_engines(trainer_nodes, ranks, max(1, engine // ranks))
    return Placement(
        nodes * ranks,
        trainer_nodes,
        divide_embedded(engines, rollout.rollout_num_engines, only=counted_by_engines(rollout.rollout_engine)),
        trainer={"num_cpus": 0, "num_gpus": 1},
        shares_gpus=shares,
        offloads=rollout.offloads and not external,
    )


def _embedded_on(
    trainer: Sequence[int], count: int, launcher: LauncherSettings, engines: int
) -> tuple[EngineShare, ...]:
    """Places embedded engines on a node without trainer ranks if there is one, or on several nodes if asked to.

    count: number of nodes.
    """
    together = launcher.colocate and not launcher.debug_rollout_only and len(trainer) > 1 and engines > 1
    nodes = list(trainer) if together else list(range(len(trainer), count)) or [0]
    return divide_embedded([EngineShare(node) for node in nodes], engines, only=True)


def _usable(counts: Sequence[int], limit: int | None) -> list[int]:
    """Returns the number of GPUs of each node that the run may use."""
    if limit is None:
        return list(counts)
    if limit > max(counts):
        raise InvalidSetting.must_be(
            "--num-gpus-per-node", f"at most {max(counts)}", got=limit, reason="no node has more GPUs"
        )
    return [min(count, limit) for count in counts]


def _on_cpu(rollout: RolloutSettings) -> bool:
    return rollout.rollout_engine_device == "cpu" and not needs_gpu(rollout.rollout_engine)


def shared_devices(options: dict[str, Any], devices: Sequence[str]) -> dict[str, Any]:
    """Returns actor options of a service that uses GPUs which Ray has assigned to others; it sees `devices`."""
    variables = {VISIBLE: ",".join(devices), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    return options | {"runtime_env": {"env_vars": variables}}


def core_environment(processes: int, hidden_size: int) -> dict[str, str]:
    """Returns environment variables for a trainer rank or an engine, one of `processes` that share a node's cores.

    Trainer and engines may each use all cores, since mostly one waits for the other. hidden_size: of the model; a small
    model gets one thread.
    """
    variables = dict(SHARED_CORES)
    if THREADS not in os.environ:
        # Ray would set it to 1 for an actor without reserved CPUs.
        threads = cpus() // max(1, processes) if hidden_size >= LEAST_HIDDEN_SIZE else 1
        variables[THREADS] = str(max(1, threads))
    return variables


def trainer_environment(launcher: LauncherSettings, gpus: bool, hidden_size: int = LEAST_HIDDEN_SIZE) -> dict[str, str]:
    """Returns the environment variables of a trainer process that override those it inherits."""
    variables = {} if gpus else core_environment(launcher.actor_num_gpus_per_node or 1, hidden_size)
    if gpus and launcher.train_backend == "megatron" and "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
        # Megatron's overlap of communication and computation relies on the order of one hardware queue.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if gpus and not launcher.colocate and "NCCL_CUMEM_ENABLE" not in os.environ:
        # SGLang switches this off; if both sides differ, NCCL's first broadcast fails with `invalid argument`.
        variables["NCCL_CUMEM_ENABLE"] = "0"
    return variables | launcher.train_env_vars
