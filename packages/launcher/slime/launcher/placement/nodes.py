"""Chooses nodes for trainer and engines by their number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime.types.errors import InvalidSetting, counted


@dataclass(frozen=True)
class EngineShare:
    """The engines of one node.

    gpus: theirs, or of the ranks that they share them with; embedded: how many there are, where engines are embedded
    ones. nodes: of one engine that is on several, of which this is the one of rank `part`.
    """

    node: int
    gpus: int = 0
    embedded: int = 1
    nodes: int = 1
    part: int = 0


@dataclass(frozen=True)
class GpuRequest:
    """GPUs that a run asks for.

    `nodes` with `ranks` GPUs each for the trainer, and `engines` GPUs besides, of which one engine has `per_engine`.
    """

    nodes: int
    ranks: int
    engines: int
    per_engine: int

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
    """Returns what `choose_nodes` does, on GPUs that are idle if there are enough, and else on those to wait for.

    An engine is not spread over more nodes for being on idle GPUs: it would be slow for the whole run.
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

    gpus: of each node that may be taken now; largest: of the largest node of all. Engines are on one node where that
    can be, and else on as few as can be. An engine is on several only if it has more GPUs than a node: on as few as can
    be, with as many GPUs on each.
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
        each = request.per_engine // nodes
        if request.per_engine % nodes or each > max(gpus):
            continue
        fitting = [i for i, count in enumerate(gpus) if count >= request.ranks]
        # The trainer goes where it leaves the engines a node, or where there is no node for them.
        trainer = sorted(
            sorted(fitting, key=lambda i: (gpus[i] >= each) - (gpus[i] - request.ranks >= each))[: request.nodes]
        )
        rooms = [i for i, count in enumerate(gpus) if count - (request.ranks if i in trainer else 0) >= each]
        needed = request.engines // request.per_engine * nodes
        if len(trainer) == request.nodes and len(rooms) >= needed:
            return tuple(trainer), parts_of_engines(rooms[:needed], each, nodes)
    return None


def parts_of_engines(places: Sequence[int], gpus: int, nodes: int) -> list[EngineShare]:
    """Returns the shares of engines on the nodes `places`, in order: `nodes` of them for each, with `gpus` on each."""
    return [EngineShare(place, gpus, nodes=nodes, part=number % nodes) for number, place in enumerate(places)]


def divide_embedded(shares: Sequence[EngineShare], count: int, *, only: bool) -> tuple[EngineShare, ...]:
    """Divides `count` embedded engines over the nodes.

    only: there will be no others, so that a node without any is left out.
    """
    each, rest = divmod(count, len(shares))
    divided = [replace(share, embedded=each + (number < rest)) for number, share in enumerate(shares)]
    return tuple(share for share in divided if share.embedded or not only)


def check_sum(request: GpuRequest, gpus: Sequence[int]) -> None:
    """Raises InvalidSetting where more GPUs are requested than all nodes have."""
    total = sum(gpus)
    if request.total <= total:
        return
    hint = "; --colocate lets both share" if request.engines and request.nodes * request.ranks <= total else ""
    place = f"the node has {total}" if len(gpus) == 1 else f"the {counted(len(gpus), 'node')} have {total}"
    raise InvalidSetting(
        f"{request}, but {place}{hint}",
        field="--actor-num-gpus-per-node", value=request.ranks, expected=f"at most {total} together",
    )  # fmt: skip


def does_not_fit(request: GpuRequest, gpus: Sequence[int]) -> InvalidSetting:
    """Returns the error for enough GPUs that are not on the same nodes."""
    has = f"the nodes of the Ray cluster have {', '.join(map(str, gpus))}"
    size = f" for engines of {request.per_engine}" if request.per_engine > 1 else ""
    beside = f" and {request.engines} others{size}" if request.engines else ""
    expected = f"{counted(request.nodes, 'node')} with {request.ranks} GPUs each{beside}"
    return InvalidSetting.requires(str(request), expected, has)


def check_shared(nodes: int, ranks: int, asked: int | None, per_engine: int) -> None:
    """Raises InvalidSetting unless colocated engines fill the trainer's GPUs on each node, or whole nodes each.

    asked: `--rollout-num-gpus`.
    """
    total = nodes * ranks
    trainer = f"--actor-num-nodes {nodes} x " if nodes > 1 else ""
    trainer += f"--actor-num-gpus-per-node {ranks}"
    if asked is not None and asked != total:
        raise InvalidSetting.must_be(
            "--rollout-num-gpus", f"{total}, all of {trainer}", got=asked, reason="--colocate shares every GPU"
        )
    if ranks % per_engine and (per_engine % ranks or total % per_engine):
        several = f", or whole nodes that divide --actor-num-nodes {nodes}" if nodes > 1 else ""
        raise InvalidSetting.must_be(
            "--rollout-num-gpus-per-engine", f"a divisor of --actor-num-gpus-per-node {ranks}{several}",
            got=per_engine, reason="--colocate shares every GPU",
        )  # fmt: skip
