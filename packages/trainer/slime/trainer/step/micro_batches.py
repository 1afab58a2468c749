"""Micro-batches of an update, packed lazily: one rank packs the next while its GPU computes.

Several ranks pack all of them first (`pack_all`), so that an error on one reaches the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slime.trainer.batching.packing import PackedBatch


class MicroBatches(Sequence["PackedBatch | None"]):
    """Micro-batches by number. packers: one function for each, called at most once; it returns None for no samples."""

    def __init__(self, packers: Sequence[Callable[[], PackedBatch | None]]) -> None:
        self._packers = packers
        self._packed: dict[int, PackedBatch | None] = {}

    def __len__(self) -> int:
        return len(self._packers)

    def __getitem__(self, number: int) -> PackedBatch | None:  # type: ignore[override]
        if number not in self._packed:
            # Raises IndexError behind the last one, which ends iterations.
            self._packed[number] = self._packers[number]()
        return self._packed[number]

    def __setitem__(self, number: int, batch: PackedBatch | None) -> None:
        self._packed[number] = batch

    def pack_all(self) -> None:
        """Packs those that are not packed yet."""
        for _ in self:
            pass
