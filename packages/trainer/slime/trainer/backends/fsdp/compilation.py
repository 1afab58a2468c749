"""Compiled decoder layers and log-probs, with a way back to eager ones."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

from slime.trainer.batching.runs import Runs, varies

log = logging.getLogger(__name__)

# Layers of a kind are compiled for one length of rows and for any, with and without a gradient; torch gives up after 8.
_VARIANTS = 64


class Compiler:
    """Compiles functions until one cannot be compiled; from then on all run as they are, and the log says why."""

    def __init__(self, activation_budget: float = 1.0) -> None:
        """activation_budget: the part of its activations that a compiled layer keeps for the backward pass."""
        self.failed = False
        keep_compiled_code()
        config: Any = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _VARIANTS)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 16 * _VARIANTS)
        torch._functorch.config.activation_memory_budget = activation_budget

    def layers(self, layers: list[nn.Module], prepare: Callable[..., None] | None = None) -> None:
        """Compiles them in place: modules, their parameters' names and their hooks stay as they are. prepare: called
        with the arguments of a layer before it runs."""
        for layer in layers:
            layer.forward = self.function(layer.forward, prepare)

    def function(self, function: Callable[..., Any], prepare: Callable[..., None] | None = None) -> Callable[..., Any]:
        """Returns the compiled function. prepare: called with the arguments before each call."""
        compiled = torch.compile(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.failed:
                return function(*args, **kwargs)
            if prepare is not None:
                prepare(*args, **kwargs)
            try:
                return compiled(*args, **kwargs)
            except COMPILE_ERRORS as error:
                self.give_up(error)
                return function(*args, **kwargs)

        return call

    def give_up(self, error: BaseException) -> None:
        if not self.failed:
            self.failed = True
            reason = str(error).strip().splitlines()
            log.warning(
                "the model is trained without torch.compile, which failed: %s: %s (--no-compile does not try)",
                type(error).__name__, reason[0] if reason else "no reason given",
            )  # fmt: skip


def lengths_vary(hidden: Tensor, *args: Any, runs: Runs | None = None, **kwargs: Any) -> None:
    """Marks the dimension of tokens in the arguments of a layer of transformers, [1, T, ...]."""
    length = hidden.shape[:2]
    if length[0] != 1:
        return
    one_length = runs is not None and runs.one_length
    for value in (hidden, *args, *kwargs.values()):
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, Tensor) and tensor.shape[:2] == length:
                if one_length:
                    torch._dynamo.mark_static(tensor, 1)
                else:
                    varies(tensor, 1)


def _compile_errors() -> tuple[type[BaseException], ...]:
    from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

    return TorchDynamoException, BackendCompilerFailed


COMPILE_ERRORS = _compile_errors()


def keep_compiled_code() -> None:
    """Makes torch keep compiled code where later processes find it, unless TORCHINDUCTOR_CACHE_DIR names a place."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(cache) / "slime" / "torchinductor"))
