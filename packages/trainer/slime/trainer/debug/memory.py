"""Records the memory allocations of a trainer's process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

import torch

from slime.trainer.debug.profiler import directory_below, unused
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting, NotAvailable

# torch's record keeps the newest events, this many.
_EVENTS = 100_000


class _Recorder(Protocol):
    def stop(self) -> None:
        """Writes the record, and ends it."""


class MemoryRecord:
    """Records from its construction until `--memory-snapshot-num-steps` iterations are trained, or until `close`."""

    def __init__(self, settings: TrainerSettings, args: Any, rank: int) -> None:
        """args: of plug-ins. Raises InvalidSetting, NotAvailable where the recorder of `settings` cannot work here."""
        self._left = settings.memory_snapshot_num_steps
        self._recorder: _Recorder | None = None
        if not settings.record_memory_history:
            return
        directory = directory_below(args, settings.memory_snapshot_dir, "memory")
        if settings.memory_recorder == "memray":
            self._recorder = _Memray(unused(directory, f"memory-rank-{rank}", ".memray.bin"))
        else:
            self._recorder = _Torch(unused(directory, f"memory-rank-{rank}", ".pickle"))

    def trained(self) -> None:
        """Counts an iteration."""
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self.close()

    def close(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()


class _Torch:
    """torch's record of GPU memory, in its own format for pytorch.org/memory_viz."""

    def __init__(self, path: Path) -> None:
        if not torch.cuda.is_available():
            raise InvalidSetting.requires("--memory-recorder torch", "a GPU", "use memray for the memory of a process")
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._record_memory_history(max_entries=_EVENTS)

    def stop(self) -> None:
        torch.cuda.memory._dump_snapshot(str(self._path))
        torch.cuda.memory._record_memory_history(enabled=None)


class _Memray:
    """memray's record of the process memory: `python -m memray flamegraph FILE` shows it."""

    def __init__(self, path: Path) -> None:
        try:
            memray = importlib.import_module("memray")
        except ImportError:
            raise NotAvailable.not_installed("--memory-recorder memray", "memray", "slime-trainer[memray]") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._tracker = memray.Tracker(str(path), native_traces=False)
        self._tracker.__enter__()

    def stop(self) -> None:
        self._tracker.__exit__(None, None, None)
