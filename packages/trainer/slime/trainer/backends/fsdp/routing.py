"""Routing replay in models of `transformers`: their routers take the largest scores with `torch.topk`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slime.trainer.backends.routing import LayerRouting
from slime.types.models.experts import experts_of

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def attach(model: nn.Module) -> list[LayerRouting]:
    """Has the routers of `model` ask the returned objects, one a layer with experts."""
    layers = []
    shape = experts_of(model.config.to_dict())
    count = shape.experts if shape is not None else 0
    for name, module in model.named_modules():
        place = _LAYER.search(name)
        if place is None or not type(module).__name__.lower().endswith("topkrouter"):
            continue
        layer = LayerRouting(int(place[1]))
        module.forward = _asking(layer, module.forward, count)
        layers.append(layer)
    return layers


def _asking(layer: LayerRouting, forward: Callable[..., Any], count: int) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Ask(layer, count):
            return forward(*args, **kwargs)

    return call


class _Ask(TorchFunctionMode):
    """Answers the call of topk over all experts; others choose groups of experts."""

    def __init__(self, layer: LayerRouting, count: int) -> None:
        super().__init__()
        self._layer, self._count = layer, count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk) or args[0].dim() != 2 or args[0].shape[1] != self._count:
            return func(*args, **kwargs)

        def own_choice() -> Any:
            return func(*args, **kwargs)

        return self._layer.choose(args[0], own_choice)
