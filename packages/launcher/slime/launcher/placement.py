"""Which process runs where: Ray resources from the flags.

On a node without GPUs every trainer rank and every engine is a CPU process, and nothing is reserved: the phases of a
synchronous run take turns on the cores. With GPUs a trainer rank holds one, the rollout service
`rollout_num_gpus`; under `colocate` the rollout service shares the trainers' GPUs.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from slime.types.errors import InvalidSetting, NotAvailable

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 100 << 20  # samples travel by gRPC; Ray carries only settings and addresses


@dataclass(frozen=True)
class Placement:
    """Ray actor options of each service of a run."""

    trainer_ranks: int
    buffer: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    rollout: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0})
    trainer: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 0})


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
            ray.init(address="local", num_cpus=num_cpus, **local, **options)
        if threading.current_thread() is threading.main_thread():
            # Ray puts a handler of its own in place, which aborts the process.
            signal.signal(signal.SIGTERM, on_sigterm)
        yield
    finally:
        ray.shutdown()


def plan_placement(*, trainer_ranks: int, rollout_gpus: int | None, colocate: bool) -> Placement:
    """Placement on the connected cluster.

    Raises InvalidSetting where the flags ask for more GPUs than the cluster has, NotAvailable for several nodes.
    """
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) > 1:
        raise NotAvailable(f"the Ray cluster has {len(nodes)} nodes: a run over several nodes is not available yet")
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus == 0:
        if rollout_gpus:
            raise InvalidSetting(
                f"--rollout-num-gpus {rollout_gpus}: no GPU here; "
                "--rollout-num-engines sets how many engines run on the CPU",
                field="--rollout-num-gpus", value=rollout_gpus, expected="a machine with GPUs",
            )  # fmt: skip
        return Placement(trainer_ranks)
    wanted = 0 if colocate else (rollout_gpus or 1)
    if trainer_ranks + wanted > gpus:
        raise InvalidSetting(
            f"{trainer_ranks} trainer GPUs and {wanted} rollout GPUs were asked for (--actor-num-gpus-per-node, "
            f"--rollout-num-gpus), and the cluster has {gpus}; --colocate lets both share",
            field="--actor-num-gpus-per-node", value=trainer_ranks, expected=f"at most {gpus} together",
        )  # fmt: skip
    if colocate:
        share = 0.5
        return Placement(
            trainer_ranks,
            rollout={"num_cpus": 0, "num_gpus": share},
            trainer={"num_cpus": 0, "num_gpus": share},
        )
    return Placement(
        trainer_ranks,
        rollout={"num_cpus": 0, "num_gpus": wanted},
        trainer={"num_cpus": 0, "num_gpus": 1},
    )
