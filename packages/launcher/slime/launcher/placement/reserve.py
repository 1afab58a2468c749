"""Places a run on the nodes of a Ray cluster, and reserves their GPUs for it."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime.launcher.config.settings import LauncherSettings
from slime.launcher.placement.plan import Placement, ServiceNode, plan_placement
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import DeadlineExceeded

NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    host: its address. gpus: number of GPUs that Ray reports. free: number of those that nobody holds.
    """

    id: str
    host: str
    gpus: int
    free: int


def cluster_nodes() -> list[Node]:
    """Returns the live nodes of the connected cluster: the node of this process first, the others by address."""
    import ray
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    here = ray.get_runtime_context().get_node_id()
    nodes = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get("GPU", 0)),
            int(available.get(node["NodeID"], {}).get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.id != here, _number(node.host), node.id))


def _number(host: str) -> tuple[int, int, str]:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return 0, 0, host
    return address.version, int(address), ""


def place_run(launcher: LauncherSettings, rollout: RolloutSettings, report: Callable[[str], None]) -> Placement:
    """Plans a run on the connected cluster and holds its GPUs there until the connection ends.

    report: called with a message while the run waits for GPUs. Raises InvalidSetting or NotAvailable as
    `plan_placement` does, before anything is held; DeadlineExceeded, naming the nodes, if others do not release the
    GPUs within `start_timeout_seconds`.
    """
    nodes = cluster_nodes()
    placement = plan_placement(launcher, rollout, [node.gpus for node in nodes], free=[node.free for node in nodes])
    if len(nodes) == 1 and not placement.has_gpus:
        return placement
    strategies = (
        _hold_gpus(placement, nodes, launcher.start_timeout_seconds, report)
        if placement.has_gpus
        else {name: _on_node(nodes[index]) for name, index in placement.nodes().items()}
    )
    spread = set(placement.nodes().values()) != {0}
    return dataclasses.replace(
        placement,
        service_nodes={
            name: ServiceNode(
                nodes[index].host if spread else ServiceNode.host,
                {"scheduling_strategy": strategies.get(name) or _on_node(nodes[index])},
            )
            for name, index in placement.nodes().items()
        },
    )


def _on_node(node: Node) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node.id, soft=False)


def _hold_gpus(
    placement: Placement, nodes: Sequence[Node], timeout_seconds: float, report: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the scheduling strategy of each service that has GPUs. All GPUs are reserved at once, or none."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    per_node = placement.trainer_ranks // len(placement.trainer_nodes)
    bundles = [(index, per_node) for index in placement.trainer_nodes if per_node]
    holders = placement.engine_hosts() or {"rollout": placement.engines[0]}
    engine_hosts = {name: share for name, share in holders.items() if placement.engine_options(share)["num_gpus"]}
    bundles += [(share.node, share.gpus) for share in engine_hosts.values()]
    if not bundles:
        return {}
    group = placement_group(
        [{"GPU": count} for _, count in bundles],
        strategy="PACK",
        bundle_label_selector=[{NODE_LABEL: nodes[index].id} for index, _ in bundles],
    )
    requested = {index: sum(count for other, count in bundles if other == index) for index, _ in bundles}
    missing = ", ".join(
        f"{nodes[index].host}: {count} requested, {nodes[index].free} of {nodes[index].gpus} free"
        for index, count in requested.items()
        if count > nodes[index].free
    )
    if missing:
        report(f"waiting for GPUs that others hold ({missing})")
    if not group.wait(timeout_seconds):
        remove_placement_group(group)
        raise DeadlineExceeded(
            f"no GPUs within {timeout_seconds:g} s (--start-timeout-seconds); {missing or _spelled(nodes, requested)}",
            field="--actor-num-gpus-per-node",
            value=per_node,
            expected=f"{sum(requested.values())} free GPUs",
        )

    def strategy(bundle: int) -> Any:
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)

    strategies = {f"trainer-{rank}": strategy(rank // per_node) for rank in range(placement.trainer_ranks)}
    first = len(bundles) - len(engine_hosts)
    return strategies | {name: strategy(first + number) for number, name in enumerate(engine_hosts)}


def _spelled(nodes: Sequence[Node], requested: dict[int, int]) -> str:
    return "requested: " + ", ".join(f"{count} on {nodes[index].host}" for index, count in requested.items())
