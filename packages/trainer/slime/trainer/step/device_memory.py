"""Moves a rank's tensors off its GPU and back, so that engines on the same GPU can have the memory.

Only the memory moves: every tensor, view and parameter that uses it stays the same object, and cannot be used in
between. Where the trainer's memory has room beside that of the engines, nothing moves.

Most of it is the optimizer's, which only updates read. It is copied while other work goes on: to the device during the
forward and backward passes, and to the host while the engines take their weights.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from slime.trainer.backends.base import TRAINING, WEIGHTS, Backend

log = logging.getLogger(__name__)

PARTS = (WEIGHTS, TRAINING)
# The part of a GPU's memory that stays free beside trainer and engines, whose own need may grow.
_SPARE = 0.1
# Bytes of one copy: what others copy to or from the device waits for no more than that.
_PIECE = 64 << 20
# Bytes that engines may take for each parameter of the model before the last of the trainer's memory has left.
_OF_ENGINES = 4


def gpu_memory() -> tuple[int, int, int]:
    """Returns the bytes of this process's GPU: free, in all, and held by torch in this process."""
    return *torch.cuda.mem_get_info(), torch.cuda.memory_reserved()


class DeviceMemory:
    """The parts WEIGHTS and TRAINING of `backend`, each on the device or in host memory. Not collective.

    critic: all of it belongs to TRAINING, where there is one.
    enabled: False leaves everything in place. may_stay: nothing moves while the trainer has room beside the engines,
    which `measure` finds out. device_types: kinds of devices whose memory can be released.
    """

    def __init__(
        self,
        backend: Backend,
        critic: Backend | None = None,
        *,
        enabled: bool,
        may_stay: bool = False,
        device_types: Sequence[str] = ("cuda",),
        memory: Callable[[], tuple[int, int, int]] = gpu_memory,
    ) -> None:
        self._backend = backend
        self._critic = critic
        self.enabled = enabled
        self._may_stay = may_stay
        self._device_types = device_types
        self._memory = memory
        # Bytes that the trainer may hold while the engines work; None before anything was measured.
        self._room: float | None = None
        # The most bytes that it held when its memory was to leave: the work is done by then, and its memory still kept.
        self._needed = 0
        self.stays = not enabled
        self._away: dict[str, list[_Away]] = {}
        # Host copies of each part, kept for the next release: pinned memory is slow to allocate.
        self._host: dict[str, dict[int, Tensor]] = {}
        # TRAINING on its way to the host, whose device memory is not free yet, and the event that marks its arrival.
        self._leaving: list[_Away] = []
        self._left: torch.cuda.Event | None = None
        # TRAINING whose memory is on the device, and whose contents are not on their way yet.
        self._coming: list[_Away] = []
        # The event that marks the arrival of TRAINING on the device; None if nothing is under way.
        self._arrived: torch.cuda.Event | None = None
        on_gpu = backend.device.type == "cuda" and torch.cuda.is_available()
        self._stream = torch.cuda.Stream(backend.device) if on_gpu else None
        self._frozen = False

    @property
    def work_has_room(self) -> bool:
        """True if the trainer may work while engines on the same GPU have all their memory."""
        return self.stays and (self._room is None or self._needed <= self._room)

    def need(self, *parts: str, late: bool = False) -> None:
        """Moves `parts` back to the device. late: what only updates read may arrive later; `fetch` begins to copy it,
        and `arrive` waits for it."""
        if TRAINING in parts:
            self._free_what_left()
        self.arrive()
        moved = {part: self._away.pop(part) for part in parts if part in self._away}
        late = late and self._critic is None and self._backend.only_updates_read_training
        for part, pieces in moved.items():
            for away in pieces:
                away.take_memory()
            if late and part == TRAINING:
                self._coming = pieces
            else:
                _fill(pieces)
        if moved and not self._coming:
            _synchronize()

    def fetch(self) -> None:
        """Begins to copy what `need` left for later, beside work that is queued from now on."""
        if self._coming:
            coming, self._coming = self._coming, []
            self._arrived = self._beside(partial(_fill, coming))

    def arrive(self) -> None:
        """Makes work that is queued from now on wait for the tensors that `need` left for later."""
        self.fetch()
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
            self._arrived = None

    def release(self, *parts: str, late: bool = False) -> None:
        """Moves `parts` to host memory, and frees their memory on the device. Between steps only.

        late: the memory of TRAINING may be free only after a later call, which has to release WEIGHTS.
        """
        self.arrive()
        if not late:
            self._free_what_left()
        if not self.enabled or self._fits():
            return
        if late and self._engines_have_room():
            assert parts == (TRAINING,)
            if TRAINING not in self._away:
                self._left = self._beside(lambda: self._leaving.extend(self._copy(TRAINING)))
                self._away[TRAINING] = list(self._leaving)
            return
        # Weights are the last to leave.
        for part in PARTS if WEIGHTS in parts else parts:
            if part not in self._away:
                self._away[part] = self._copy(part)
                _synchronize()
                for away in self._away[part]:
                    away.free()
        self._trim()

    def _engines_have_room(self) -> bool:
        """Returns True if engines can take their weights, but not their caches, before TRAINING has left."""
        if self._critic is not None or self._backend.device.type not in self._device_types:
            return False
        self._trim()
        free, total, _ = self._memory()
        return free > _OF_ENGINES * self._backend.num_parameters + _SPARE * total

    def _free_what_left(self) -> None:
        if self._left is not None:
            self._left.synchronize()
        for away in self._leaving:
            away.free()
        self._leaving, self._left = [], None

    def _beside(self, copies: Callable[[], object]) -> torch.cuda.Event | None:
        """Runs `copies` beside work that is queued later; returns the event of their end, None if they have ended."""
        if self._stream is None:
            copies()
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies()
        return self._stream.record_event()

    def measure(self) -> None:
        """Finds out how much the trainer may keep. Called while engines on the same GPU have all their memory."""
        if self.enabled and self._may_stay and self._backend.device.type in self._device_types:
            free, total, held = self._memory()
            self._room = free + held - _SPARE * total

    def _fits(self) -> bool:
        """Returns True if what the trainer holds between steps may stay where it is."""
        if self._room is None or self._away:
            return False
        held = self._memory()[2]
        self._needed = max(self._needed, held)
        if held > self._room:
            # Some of it is only kept for the next tensor.
            self._trim()
            held = self._memory()[2]
        stays = held <= self._room
        if stays != self.stays:
            log.info(
                "the trainer's memory %s the GPU while engines work: it is %.1f GiB, and beside theirs is room for "
                "%.1f GiB (--offload-train moves it in any case)",
                "stays on" if stays else "leaves", held / 2**30, self._room / 2**30,
            )  # fmt: skip
            self.stays = stays
            self._host.clear()
            for backend in (self._backend, self._critic):
                if backend is not None:
                    backend.memory_stays(stays)
        return stays

    def _trim(self) -> None:
        """Returns cached memory that is not used to the device."""
        if not torch.cuda.is_available():
            return
        gc.collect()
        if not self._frozen:
            # Without this, every collection would visit all objects made at the start, most of them Python modules.
            gc.freeze()
            self._frozen = True
        _synchronize()
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()

    @contextmanager
    def held(self, *parts: str) -> Iterator[None]:
        """Keeps `parts` on the device inside the block, and moves them back to where they were after it."""
        away = [part for part in parts if part in self._away]
        self.need(*away)
        try:
            yield
        finally:
            self.release(*away)

    def _tensors(self, part: str) -> Iterator[tuple[Tensor, bool]]:
        yield from self._backend.device_tensors(part)
        if part == TRAINING and self._critic is not None:
            for of_critic in PARTS:
                yield from self._critic.device_tensors(of_critic)

    def _copy(self, part: str) -> list[_Away]:
        """Copies a part to host memory; ready after a synchronisation."""
        owned = set()
        if part != WEIGHTS and WEIGHTS not in self._away:
            # An optimizer may update the weights themselves; those move with their own part.
            owned = {_address(tensor) for tensor, _ in self._backend.device_tensors(WEIGHTS)}
        moved: list[_Away] = []
        storages: dict[int, tuple[torch.UntypedStorage, bool]] = {}
        for tensor, matters in self._tensors(part):
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            usable = storage.device.type in self._device_types and storage.resizable() and storage.nbytes()
            if usable and key and key not in owned:
                storages[key] = storage, matters or storages.get(key, (None, False))[1]
        before, now = self._host.get(part, {}), dict[int, Tensor]()
        for storage, matters in storages.values():
            if matters:
                now[storage._cdata] = _host_copy(storage, before.get(storage._cdata))
            moved.append(_Away(storage, now.get(storage._cdata)))
        self._host[part] = now
        return moved


class _Away:
    """A piece of memory, copied to the host if its contents matter; otherwise zeros come back."""

    def __init__(self, storage: torch.UntypedStorage, copy: Tensor | None) -> None:
        self._storage = storage
        self._size = storage.nbytes()
        self._copy = copy

    def free(self) -> None:
        self._storage.resize_(0)

    def take_memory(self) -> None:
        self._storage.resize_(self._size)
        if self._copy is None:
            _bytes(self._storage).zero_()

    def fill(self) -> None:
        if self._copy is None:
            return
        _copy_pieces(self._copy, _bytes(self._storage))


def _fill(pieces: Sequence[_Away]) -> None:
    for away in pieces:
        away.fill()


def _host_copy(storage: torch.UntypedStorage, memory: Tensor | None) -> Tensor:
    """Copies `storage` into `memory` if that fits, else into new memory; ready after a synchronisation."""
    if memory is None or len(memory) != storage.nbytes():
        memory = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    _copy_pieces(_bytes(storage), memory)
    return memory


def _copy_pieces(source: Tensor, target: Tensor) -> None:
    for piece, place in zip(source.split(_PIECE), target.split(_PIECE), strict=True):
        place.copy_(piece, non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
