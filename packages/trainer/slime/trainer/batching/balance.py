"""Karmarkar-Karp: numbers into k parts of nearly equal sums."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def partition(costs: Sequence[float], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Indexes of `costs` in `parts` lists, by the largest differencing method (Karmarkar and Karp, 1982).

    equal_size: every list has the same number of indexes; ValueError where `parts` does not divide their number.
    Deterministic: ties go to lower indexes. Lists are sorted, and ordered by their first index; empty ones last.
    """
    if equal_size and len(costs) % parts:
        raise ValueError(f"{len(costs)} items cannot be cut into {parts} lists of equal size")
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
