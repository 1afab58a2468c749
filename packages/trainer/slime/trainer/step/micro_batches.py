"""The micro-batches of an update, each packed when it is asked for: a GPU computes one while the next is packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slime.trainer.batching.packing import PackedBatch


class MicroBatches(Sequence["PackedBatch | None"]):
    """Micro-batches. packs: functions that pack one each, called at most once; they return None for no samples."""

    def __init__(self, packs: Sequence[Callable[[], PackedBatch | None]]) -> None:
        self._packs = packs
        self._packed: dict[int, PackedBatch | None] = {}

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, number: int) -> PackedBatch | None:  # type: ignore[override]
        if number not in self._packed:
            # Raises IndexError behind the last one, which ends iterations.
            self._packed[number] = self._packs[number]()
        return self._packed[number]

    def __setitem__(self, number: int, batch: PackedBatch | None) -> None:
        self._packed[number] = batch

    def pack_all(self) -> None:
        """Packs those that are not packed yet."""
        for _ in self:
            pass
