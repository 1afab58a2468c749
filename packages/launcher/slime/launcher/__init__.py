"""Assembles the services on Ray and drives training."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.launcher.api.trained_run import TrainedRun
    from slime.launcher.api.training import train
    from slime.launcher.runner.runner import SlimeRunner

__all__ = ["SlimeRunner", "TrainedRun", "train"]
_MODULES = {"SlimeRunner": "runner.runner", "TrainedRun": "api.trained_run", "train": "api.training"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"slime.launcher.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
