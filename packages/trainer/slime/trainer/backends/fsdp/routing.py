"""Routing replay in models of `transformers`: their routers take the largest scores with `torch.topk`."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slime.trainer.backends.routing import LayerRouting, RoutingReplay, replays_routing
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import NotAvailable
from slime.types.models.experts import experts_of

log = logging.getLogger(__name__)

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def replay_of(model: nn.Module, settings: TrainerSettings) -> RoutingReplay | None:
    """Returns the replay that the model's routers ask from now on; None where nothing is to be replayed.

    Raises NotAvailable for routers of another form.
    """
    if not replays_routing(settings, experts_of(model.config.to_dict()) is not None):
        return None
    layers = attach(model)
    if not layers:
        name = type(model).__name__
        raise NotAvailable(f"experts of {name} cannot be replayed: its routers have another form", field=name)
    if settings.compile:
        log.info("the model is trained without torch.compile: experts are replayed")
    return RoutingReplay(layers, from_rollout=settings.use_rollout_routing_replay)


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
