"""Which process runs where: Ray resources from the flags.

On a node without GPUs every trainer rank and every engine is a CPU process, and nothing is reserved: the phases of a
synchronous run take turns on the cores. With GPUs a trainer rank holds one, the rollout service `rollout_num_gpus`
others. Under `colocate` Ray gives it none, since a fraction would show it only one: it is told all of the trainers'.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from slime.launcher.settings import LauncherSettings
from slime.rollout.engines.gpus import VISIBLE, visible_gpus
from slime.rollout.settings import RolloutSettings
from slime.types.errors import InvalidSetting, NotAvailable

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 100 << 20  # samples travel by gRPC; Ray carries only settings and addresses


# The engine works on the same cores: OpenMP threads that spin while they wait slow both down by an order of magnitude.
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Placement:
    """Ray actor options of each service of a run.

    shares_gpus: the rollout service uses the GPUs of the trainer's ranks, whatever its options say.
    offloads: the engines give their GPU memory back while the trainer works.
    """

    trainer_ranks: int
    shares_gpus: bool = False
    offloads: bool = False
    buffer: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    rollout: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    trainer: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0})

    @property
    def has_gpus(self) -> bool:
        return bool(self.trainer.get("num_gpus"))


@contextmanager
def ray_cluster(address: str | None, num_cpus: int | None = None) -> Iterator[None]:
    """Connects to the Ray cluster at `address` or RAY_ADDRESS, or starts one for this run and stops it afterwards."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = dict(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            ray.init(address=address, **options)
        else:
            local: dict[str, Any] = dict(include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)
            ray.init(address="local", num_cpus=num_cpus, num_gpus=len(visible_gpus()), **local, **options)
        if threading.current_thread() is threading.main_thread():
            # Ray puts a handler of its own in place, which aborts the process.
            signal.signal(signal.SIGTERM, on_sigterm)
        yield
    finally:
        ray.shutdown()


def cluster_gpus() -> int:
    """GPUs of the connected cluster. Raises NotAvailable for one of several nodes."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) > 1:
        raise NotAvailable(f"the Ray cluster has {len(nodes)} nodes: a run over several nodes is not available yet")
    return int(ray.cluster_resources().get("GPU", 0))


def plan_placement(launcher: LauncherSettings, rollout: RolloutSettings, gpus: int) -> Placement:
    """Where the services of a run go on a machine with `gpus` GPUs.

    Raises InvalidSetting, with the sum, where the flags ask for more of them, or for what does not fit together.
    """
    ranks, asked, engine = (
        launcher.actor_num_gpus_per_node,
        rollout.rollout_num_gpus,
        rollout.rollout_num_gpus_per_engine,
    )
    external = bool(rollout.rollout_external_engine_addrs)
    if gpus == 0:
        if asked is not None:
            raise InvalidSetting(
                f"--rollout-num-gpus {asked}: no GPU here; "
                "--rollout-num-engines sets how many engines run on the CPU",
                field="--rollout-num-gpus", value=asked, expected="a machine with GPUs",
            )  # fmt: skip
        return Placement(ranks, offloads=rollout.offload_rollout is True)
    if external or _on_cpu(rollout):
        wanted = 0
    elif launcher.colocate:
        _check_shared(ranks, asked, engine)
        wanted = 0
    else:
        wanted = asked or engine
    if ranks + wanted > gpus:
        hint = "; --colocate lets both share" if wanted and ranks <= gpus else ""
        raise InvalidSetting(
            f"--actor-num-gpus-per-node {ranks} + --rollout-num-gpus {wanted} = {ranks + wanted} GPUs, "
            f"and there are {gpus} here{hint}",
            field="--actor-num-gpus-per-node", value=ranks, expected=f"at most {gpus} together",
        )  # fmt: skip
    return Placement(
        ranks,
        rollout={"num_cpus": 0, "num_gpus": wanted},
        trainer={"num_cpus": 0, "num_gpus": 1},
        shares_gpus=launcher.colocate and not external and not _on_cpu(rollout),
        offloads=rollout.offloads and not external,
    )


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
