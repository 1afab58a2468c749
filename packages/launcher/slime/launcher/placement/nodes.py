"""Chooses nodes for trainer and engines by their number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime.types.errors import InvalidSetting, counted


@dataclass(frozen=True)
class EngineShare:
    """The engines of one node.

    gpus: number of their GPUs, or of those of the ranks that they share GPUs with. embedded: number of engines, if they
    are embedded ones. nodes: number of nodes of one engine, if it is on several; this is its node number `part`.
    """

    node: int
    gpus: int = 0
    embedded: int = 1
    nodes: int = 1
    part: int = 0


@dataclass(frozen=True)
class GpuRequest:
    """GPUs that a run asks for.

    nodes: of the trainer, with `ranks` GPUs each. engines: number of further GPUs for engines, of `per_engine` GPUs
    each. together: whether the engines have to be on one node, and cannot share the trainer's GPUs.
    """

    nodes: int
    ranks: int
    engines: int
    per_engine: int
    together: bool = False

    @property
    def total(self) -> int:
        return self.nodes * self.ranks + self.engines

    def __str__(self) -> str:
        several = f"--actor-num-nodes {self.nodes} x " if self.nodes > 1 else ""
        return (
            f"{several}--actor-num-gpus-per-node {self.ranks} + --rollout-num-gpus {self.engines} = {self.total} GPUs"
        )


def choose_idle(
    request: GpuRequest, idle: Sequence[int], usable: Sequence[int]
) -> tuple[tuple[int, ...], list[EngineShare]] | None:
    """Chooses nodes as `choose_nodes` does, with idle GPUs if there are enough, otherwise with GPUs to wait for.

    Waits rather than spreading an engine over more nodes, which would slow it down for the whole run.
    """
    now, later = (choose_nodes(request, gpus, max(usable)) for gpus in (idle, usable))
    if now is None or later is None:
        return now or later
    return later if _width(now[1]) > _width(later[1]) else now


def _width(shares: Sequence[EngineShare]) -> int:
    return max((share.nodes for share in shares), default=1)


def choose_nodes(
    request: GpuRequest, gpus: Sequence[int], largest: int
) -> tuple[tuple[int, ...], list[EngineShare]] | None:
    """Returns the trainer's nodes and those of the engines, each in order; None if there are too few GPUs.

    gpus: number of GPUs of each node that may be used. largest: number of GPUs of the largest node in the cluster.
    Engines are placed on one node if possible, otherwise on as few nodes as possible. An engine is placed on several
    nodes only if it has more GPUs than a node, with equally many on each.
    """
    if request.engines and request.per_engine > largest:
        return _engines_over_nodes(request, gpus)
    return _engines_on_one(request, gpus) or _engines_on_several(request, gpus)


def _engines_on_one(request: GpuRequest, gpus: Sequence[int]) -> tuple[tuple[int, ...], list[EngineShare]] | None:
    engines = request.engines
    # The tightest fit leaves the most whole nodes to the trainer.
    for place in sorted(
        (i for i, count in enumerate(gpus) if count >= engines), key=lambda i: gpus[i] if engines else i
    ):
        left = [count - (engines if i == place else 0) for i, count in enumerate(gpus)]
        fitting = [i for i, count in enumerate(left) if count >= request.ranks][: request.nodes]
        if len(fitting) == request.nodes:
            return tuple(fitting), [EngineShare(place, engines)]
    return None


def _engines_on_several(request: GpuRequest, gpus: Sequence[int]) -> tuple[tuple[int, ...], list[EngineShare]] | None:
    def room(node: int, taken: int) -> int:
        return (gpus[node] - taken) // request.per_engine * request.per_engine

    fitting = [i for i, count in enumerate(gpus) if count >= request.ranks]
    # The trainer takes the nodes where it costs the engines least.
    trainer = sorted(sorted(fitting, key=lambda i: room(i, 0) - room(i, request.ranks))[: request.nodes])
    if len(trainer) < request.nodes:
        return None
    rooms = {i: room(i, request.ranks if i in trainer else 0) for i in range(len(gpus))}
    shares, missing = [], request.engines
    for node in sorted(rooms, key=lambda i: -rooms[i]):
        taken = min(rooms[node], missing)
        if taken:
            shares.append(EngineShare(node, taken))
            missing -= taken
    return None if missing else (tuple(trainer), sorted(shares, key=lambda share: share.node))


def _engines_over_nodes(request: GpuRequest, gpus: Sequence[int]) -> tuple[tuple[int, ...], list[EngineShare]] | None:
    for nodes in range(2, len(gpus) + 1):
        per_node = request.per_engine // nodes
        if request.per_engine % nodes or per_node > max(gpus):
            continue
        fitting = [i for i, count in enumerate(gpus) if count >= request.ranks]
        # The trainer takes nodes that the engines cannot use, or of which it leaves them enough.
        trainer = sorted(
            sorted(fitting, key=lambda i: (gpus[i] >= per_node) - (gpus[i] - request.ranks >= per_node))[
                : request.nodes
            ]
        )
        rooms = [i for i, count in enumerate(gpus) if count - (request.ranks if i in trainer else 0) >= per_node]
        needed = request.engines // request.per_engine * nodes
        if len(trainer) == request.nodes and len(rooms) >= needed:
            return tuple(trainer), parts_of_engines(rooms[:needed], per_node, nodes)
    return None


def parts_of_engines(places: Sequence[int], gpus: int, nodes: int) -> list[EngineShare]:
    """Returns the shares of engines on the nodes `places`, in order: `nodes` per engine, with `gpus` GPUs each."""
    return [EngineShare(place, gpus, nodes=nodes, part=number % nodes) for number, place in enumerate(places)]


def divide_embedded(shares: Sequence[EngineShare], count: int, *, only: bool) -> tuple[EngineShare, ...]:
    """Divides `count` embedded engines over the nodes.

    only: all engines are embedded, so that a node without any is left out.
    """
    each, rest = divmod(count, len(shares))
    divided = [replace(share, embedded=each + (number < rest)) for number, share in enumerate(shares)]
    return tuple(share for share in divided if share.embedded or not only)


def check_sum(request: GpuRequest, gpus: Sequence[int]) -> None:
    """Raises InvalidSetting where more GPUs are requested than all nodes have."""
    total = sum(gpus)
    if request.total <= total:
        return
    may_share = not request.together and request.engines and request.nodes * request.ranks <= total
    hint = "; --colocate lets both share" if may_share else ""
    place = f"the node has {total}" if len(gpus) == 1 else f"the {counted(len(gpus), 'node')} have {total}"
    raise InvalidSetting(
        f"{request}, but {place}{hint}",
        field="--actor-num-gpus-per-node", value=request.ranks, expected=f"at most {total} together",
    )  # fmt: skip


def does_not_fit(request: GpuRequest, gpus: Sequence[int]) -> InvalidSetting:
    """Returns the error for a cluster that has enough GPUs, but not enough of them on the same nodes."""
    has = f"the {counted(len(gpus), 'node has', 'nodes have')} {', '.join(map(str, gpus))}"
    size = f" for engines of {request.per_engine}" if request.per_engine > 1 else ""
    place = " on one node for the engines of all models" if request.together else size
    beside = f" and {counted(request.engines, 'other')}{place}" if request.engines else ""
    each = " each" if request.nodes > 1 else ""
    expected = f"{counted(request.nodes, 'node')} with {counted(request.ranks, 'GPU')}{each}{beside}"
    return InvalidSetting.requires(str(request), expected, has)


def check_shared(nodes: int, ranks: int, rollout_gpus: int | None, per_engine: int) -> None:
    """Raises InvalidSetting unless colocated engines use all of the trainer's GPUs, evenly on each node.

    rollout_gpus: the value of --rollout-num-gpus.
    """
    total = nodes * ranks
    trainer = f"--actor-num-nodes {nodes} x " if nodes > 1 else ""
    trainer += f"--actor-num-gpus-per-node {ranks}"
    if rollout_gpus is not None and rollout_gpus != total:
        raise InvalidSetting.must_be(
            "--rollout-num-gpus", f"{total}, all of {trainer}", got=rollout_gpus, reason="--colocate shares every GPU"
        )
    if ranks % per_engine and (per_engine % ranks or total % per_engine):
        several = f", or whole nodes that divide --actor-num-nodes {nodes}" if nodes > 1 else ""
        raise InvalidSetting.must_be(
            "--rollout-num-gpus-per-engine", f"a divisor of --actor-num-gpus-per-node {ranks}{several}",
            got=per_engine, reason="--colocate shares every GPU",
        )  # fmt: skip
