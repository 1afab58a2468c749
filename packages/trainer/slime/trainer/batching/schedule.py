"""Schedules the samples of an optimizer update as micro-batches for every replica of the model."""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from slime.types.errors import counted

# Positions of one forward pass; empty where a rank only takes part in the collective calls of the others.
MicroBatch = list[int]
Cost = Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of samples in micro-batches, where a prompt that several samples share is laid out once.

    total: by position; prompts: (which prompt, its tokens) by position, for samples that may share one; or in place of
    the prompt the trunk of a sample (trunks.py).
    """

    total: Mapping[int, int] | Sequence[int]
    prompts: Mapping[int, tuple[Hashable, int]] = dataclasses.field(default_factory=dict)

    def cost(self, positions: Iterable[int], cost: Cost = float) -> float:
        """Returns the cost of a micro-batch, with `cost` of a sequence by its tokens; by default, the tokens."""
        total, seen = 0.0, set()
        for position in positions:
            total += cost(self.total[position])
            which, prompt = self.prompts.get(position, (None, 0))
            if which in seen:
                total -= cost(prompt)
            elif which is not None:
                seen.add(which)
        return total

    def shared(self) -> list[int]:
        """Returns positions of samples whose prompt another one may share."""
        members = Counter(which for which, _ in self.prompts.values())
        return [position for position, (which, _) in self.prompts.items() if members[which] > 1]

    def split_prompts(self, digests: Mapping[int, str]) -> Lengths | None:
        """Returns lengths where only samples with equal digests share a prompt; None if that changes nothing."""
        seen: dict[Hashable, set[str]] = {}
        for position, digest in digests.items():
            if position in self.prompts:
                seen.setdefault(self.prompts[position][0], set()).add(digest)
        if all(len(of_prompt) == 1 for of_prompt in seen.values()):
            return None
        prompts = {p: ((which, digests.get(p)), prompt) for p, (which, prompt) in self.prompts.items()}
        return Lengths(self.total, prompts)

    def families(self, positions: Sequence[int]) -> list[MicroBatch]:
        """Groups samples that share a prompt, in the order of the first of each."""
        found: dict[Hashable, MicroBatch] = {}
        for position in positions:
            key = self.prompts[position][0] if position in self.prompts else ("alone", position)
            found.setdefault(key, []).append(position)
        return list(found.values())


def schedule(
    positions: Sequence[int],
    lengths: Lengths,
    replicas: int,
    *,
    multiple: int = 1,
    micro_batch_size: int = 1,
    max_tokens: int | None = None,
    balance: bool = False,
    form_by_cost: bool = False,
    cost: Cost = float,
) -> list[list[MicroBatch]]:
    """[replica][i] -> micro-batch; every replica gets the same number of them, a multiple of `multiple`.

    positions: samples to train, in order.
    max_tokens: None cuts into `micro_batch_size` samples; a number fills bins up to it, and a longer sample is alone.
    balance: replicas get micro-batches of equal total `cost`, else round robin.
    form_by_cost: micro-batches are of equal total cost themselves, as many as `max_tokens` asks for; some exceed it.
    """
    if max_tokens is None:
        bins = [list(positions[i : i + micro_batch_size]) for i in range(0, len(positions), micro_batch_size)]
    else:
        bins = fewest_bins(positions, lengths, max_tokens)
    if form_by_cost:
        number = -(-len(bins) // (replicas * multiple)) * replicas * multiple
        units = [piece for family in lengths.families(positions) for piece in _pieces(family, lengths, max_tokens)]
        parts = partition([lengths.cost(unit, cost) for unit in units], number) if number else []
        bins = [sorted(p for i in part for p in units[i]) for part in parts if part]
    _split_to_multiple(bins, replicas * multiple, lengths)
    if not balance:
        return [bins[replica::replicas] for replica in range(replicas)]
    costs = [lengths.cost(b, cost) for b in bins]
    return [[bins[i] for i in indexes] for indexes in partition(costs, replicas, equal_size=True)]


def regroup(
    shares: Sequence[Sequence[MicroBatch]], lengths: Lengths, max_tokens: int, multiple: int = 1
) -> list[list[MicroBatch]]:
    """Regroups the positions that each replica has in `shares` into micro-batches of up to `max_tokens`.

    Every replica gets the same number of them, a multiple of `multiple`.
    """
    cut = [fewest_bins([p for micro_batch in share for p in micro_batch], lengths, max_tokens) for share in shares]
    number = -(-max(map(len, cut), default=0) // multiple) * multiple
    for bins in cut:
        _split_to(bins, number, lengths)
    return cut


def fewest_bins(positions: Sequence[int], lengths: Lengths, max_tokens: int) -> list[MicroBatch]:
    """Returns bins of up to `max_tokens`; a longer sample is alone.

    Samples that share a prompt are one item, or several items, each with the prompt, if one bin cannot take them all.
    Items are packed first-fit in their order, unless there are fewer bins with best-fit, the largest first, or with
    items cut wherever a bin is full, or with every sample on its own. The number of bins is what counts, because a row
    that is not full costs as much as a full one.
    """
    families = lengths.families(positions)
    items = [piece for family in families for piece in _pieces(family, lengths, max_tokens)]
    sizes = [int(lengths.cost(item)) for item in items]
    found = first_fit(sizes, max_tokens)
    if _may_be_fewer(sizes, max_tokens, len(found)):
        fuller = best_fit_decreasing(sizes, max_tokens)
        found = fuller if len(fuller) < len(found) else found
    bins = [[position for i in chosen for position in items[i]] for chosen in found]
    if len(families) < len(positions) and _may_be_fewer(sizes, max_tokens, len(bins)):
        cut = _filled_in_order(families, lengths, max_tokens)
        apart = fewest_bins(positions, Lengths(lengths.total), max_tokens)
        bins = min(bins, cut, apart, key=len)
    order = {position: i for i, position in enumerate(positions)}
    return sorted((sorted(b, key=order.__getitem__) for b in bins), key=lambda b: order[b[0]])


def _may_be_fewer(sizes: Sequence[int], max_tokens: int, bins: int) -> bool:
    return bins * max_tokens - sum(min(size, max_tokens) for size in sizes) >= max_tokens


def _pieces(family: Sequence[int], lengths: Lengths, max_tokens: int | None) -> list[MicroBatch]:
    """Returns parts of a family of up to `max_tokens`, in order; a longer sample is one."""
    pieces: list[MicroBatch] = []
    room = 0.0
    for position in family:
        total, prompt = lengths.total[position], lengths.prompts.get(position, (None, 0))[1]
        if pieces and total - prompt <= room:
            pieces[-1].append(position)
            room -= total - prompt
        else:
            pieces.append([position])
            room = float("inf") if max_tokens is None else max_tokens - total
    return pieces


def _filled_in_order(families: Sequence[MicroBatch], lengths: Lengths, max_tokens: int) -> list[MicroBatch]:
    """Returns bins filled one after the other; the part of a family that a bin has no room for begins the next."""
    bins: list[MicroBatch] = []
    room = 0
    for family in families:
        inside = False
        for position in family:
            total, prompt = lengths.total[position], lengths.prompts.get(position, (None, 0))[1]
            needed = total - prompt if inside else total
            if not bins or needed > room:
                bins.append([])
                room, needed = max_tokens, total
            bins[-1].append(position)
            room -= needed
            inside = True
    return bins


def best_fit_decreasing(sizes: Sequence[int], max_size: int) -> list[list[int]]:
    """Returns indexes of `sizes` in bins of up to `max_size`, each in the bin with the least room that takes it."""
    bins: list[list[int]] = []
    # (room, bin), least room first.
    room: list[tuple[int, int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[item]
        found = bisect.bisect_left(room, (size, -1))
        if found == len(room):
            bins.append([item])
            free, number = max_size, len(bins) - 1
        else:
            free, number = room.pop(found)
            bins[number].append(item)
        bisect.insort(room, (free - size, number))
    return bins


def first_fit(sizes: Sequence[int], max_size: int) -> list[list[int]]:
    """Returns indexes of `sizes` in bins of up to `max_size`, each in the first bin that takes it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item, size in enumerate(sizes):
        for i, free in enumerate(room):
            if size <= free:
                bins[i].append(item)
                room[i] -= size
                break
        else:
            bins.append([item])
            room.append(max_size - size)
    return bins


def _split_to_multiple(bins: list[MicroBatch], multiple: int, lengths: Lengths) -> None:
    _split_to(bins, -(-len(bins) // multiple) * multiple, lengths)


def _split_to(bins: list[MicroBatch], number: int, lengths: Lengths) -> None:
    """Splits the largest bins in two until there are `number`; adds empty ones where none can be split."""
    while len(bins) < number:
        splittable = [i for i, b in enumerate(bins) if len(b) > 1]
        if not splittable:
            bins.append([])
            continue
        largest = max(splittable, key=lambda i: (lengths.cost(bins[i]), -i))
        units = lengths.families(bins[largest])
        if len(units) == 1:
            units = [[position] for position in bins[largest]]
        halves = partition([lengths.cost(unit) for unit in units], 2)
        bins[largest : largest + 1] = [[p for i in half for p in units[i]] for half in halves]


def partition(costs: Sequence[float], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Returns indexes of `costs` in `parts` lists, by the largest differencing method (Karmarkar and Karp, 1982).

    equal_size: every list has the same number of indexes; ValueError where `parts` does not divide their number.
    Deterministic: ties go to lower indexes. Lists are sorted, and ordered by their first index; empty ones last.
    """
    if equal_size and len(costs) % parts:
        raise ValueError(f"{counted(len(costs), 'item')} cannot be cut into {parts} lists of equal size")
    # A state is `parts` sets with their sums, largest first; the two states of largest spread merge against each other.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    order = sorted(range(len(costs)), key=lambda i: (costs[i], i))
    bundles = [order[i : i + parts] for i in range(0, len(order), parts)] if equal_size else [[i] for i in order]
    for bundle in bundles:
        sets = sorted(((float(costs[i]), [i]) for i in bundle), key=lambda s: (-s[0], s[1]))
        sets += [(0.0, [])] * (parts - len(sets))
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], min(bundle), sets))
    while len(heap) > 1:
        _, first, a = heapq.heappop(heap)
        _, second, b = heapq.heappop(heap)
        merged = sorted(
            ((x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)), key=lambda s: (-s[0], s[1])
        )
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(first, second), merged))
    lists = [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]
    return sorted(lists, key=lambda items: (not items, items))
