"""Chooses nodes for trainer and engines by their number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime.types.errors import InvalidSetting, NotAvailable


@dataclass(frozen=True)
class EngineShare:
    """The engines of one node.

    gpus: theirs, or of the ranks that they share them with; embedded: how many there are, where engines are embedded
    ones.
    """

    node: int
    gpus: int = 0
    embedded: int = 1


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


def choose_nodes(request: GpuRequest, gpus: Sequence[int]) -> tuple[tuple[int, ...], list[EngineShare]] | None:
    """Returns the trainer's nodes and those of the engines, each in order; None if there are too few GPUs.

    gpus: of each node. Engines are on one node where that can be, and else on as few as can be; no engine is on two.
    """
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
    place = f"the node has {total}" if len(gpus) == 1 else f"the {len(gpus)} nodes have {total}"
    raise InvalidSetting(
        f"{request}, but {place}{hint}",
        field="--actor-num-gpus-per-node", value=request.ranks, expected=f"at most {total} together",
    )  # fmt: skip


def does_not_fit(request: GpuRequest, gpus: Sequence[int]) -> InvalidSetting | NotAvailable:
    """Returns the error for enough GPUs that are not on the same nodes."""
    has = f"the nodes of the Ray cluster have {', '.join(map(str, gpus))}"
    if request.engines and request.per_engine > max(gpus):
        return _too_large(request.per_engine, has, max(gpus))
    size = f" for engines of {request.per_engine}" if request.per_engine > 1 else ""
    beside = f" and {request.engines} others{size}" if request.engines else ""
    expected = f"{counted(request.nodes, 'node')} with {request.ranks} GPUs each{beside}"
    return InvalidSetting.requires(str(request), expected, has)


def check_shared(nodes: int, ranks: int, asked: int | None, per_engine: int) -> None:
    """Raises InvalidSetting unless colocated engines fill the trainer's GPUs on each node.

    asked: `--rollout-num-gpus`. Raises NotAvailable for an engine that is larger than a node.
    """
    total = nodes * ranks
    trainer = f"--actor-num-nodes {nodes} x " if nodes > 1 else ""
    trainer += f"--actor-num-gpus-per-node {ranks}"
    if asked is not None and asked != total:
        raise InvalidSetting.must_be(
            "--rollout-num-gpus", f"{total}, all of {trainer}", got=asked, reason="--colocate shares every GPU"
        )
    if nodes > 1 and per_engine > ranks:
        raise _too_large(per_engine, f"--colocate leaves it the GPUs of {ranks} ranks", ranks)
    if ranks % per_engine:
        raise InvalidSetting.must_be(
            "--rollout-num-gpus-per-engine", f"a divisor of --actor-num-gpus-per-node {ranks}", got=per_engine,
            reason="--colocate shares every GPU",
        )  # fmt: skip


def _too_large(per_engine: int, why: str, most: int) -> NotAvailable:
    return NotAvailable.unavailable(
        f"--rollout-num-gpus-per-engine {per_engine}", f"an engine runs on one node, and {why}", f"at most {most}"
    )


def counted(count: int, noun: str) -> str:
    """Spells a number of things: `1 node`, `2 passes`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")
