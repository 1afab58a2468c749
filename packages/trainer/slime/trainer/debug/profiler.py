"""Traces of training by torch's profiler, for chrome://tracing and Perfetto."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from slime.trainer.settings.trainer import TrainerSettings


class Profiler:
    """Traces the parts that --profile-target names, each into a file TARGET-rollout-N-rank-R.json.gz."""

    def __init__(self, settings: TrainerSettings, args: Any, rank: int) -> None:
        """args: of plug-ins; where it has `output_dir`, traces lie below it by default."""
        end = settings.profile_step_end or settings.profile_step_start + 1
        self._rollouts = range(settings.profile_step_start, end if settings.use_pytorch_profiler else 0)
        self._targets = frozenset(settings.profile_target)
        self._directory = directory_below(args, settings.profile_dir, "profiles")
        self._rank = rank
        self._tracing = False

    @contextmanager
    def trace(self, target: str, rollout: int) -> Iterator[None]:
        """Traces the block if the settings say so; inside another trace it is a labelled part of that one."""
        if rollout not in self._rollouts:
            yield
            return
        if target not in self._targets or self._tracing:
            with record_function(target):
                yield
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._tracing = True
        try:
            with profile(activities=activities, record_shapes=True) as tracer, record_function(target):
                yield
        finally:
            self._tracing = False
        self._directory.mkdir(parents=True, exist_ok=True)
        tracer.export_chrome_trace(
            str(unused(self._directory, f"{target}-rollout-{rollout}-rank-{self._rank}", ".json.gz"))
        )


def directory_below(args: Any, chosen: str | None, name: str) -> Path:
    """Returns `chosen`, or `name` below the output directory of the run, or of this process where it has none."""
    return Path(chosen) if chosen is not None else Path(getattr(args, "output_dir", None) or ".") / name


def unused(directory: Path, stem: str, suffix: str) -> Path:
    """Returns a path for a new file: files of earlier starts and other runs stay."""
    path, number = directory / (stem + suffix), 1
    while os.path.lexists(path):
        number += 1
        path = directory / f"{stem}-{number}{suffix}"
    return path
