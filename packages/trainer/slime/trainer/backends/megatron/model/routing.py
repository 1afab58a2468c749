"""Routing replay in the routers of megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from slime.trainer.backends.routing import LayerRouting, RoutingReplay


def attach(chunks: Sequence[torch.nn.Module], *, from_rollout: bool) -> RoutingReplay:
    """Has the routers of this rank's chunks ask the returned object; layers that predict ahead choose by themselves."""
    layers = []
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, TopKRouter) and "mtp" not in name.split("."):
                assert module.layer_number is not None
                layer = _Megatron(module.layer_number - 1)
                module.router_replay = layer
                layers.append(layer)
    replay = RoutingReplay(layers, from_rollout=from_rollout)
    for layer in layers:
        layer.pass_ = replay
    return replay


def of_chunk(chunk: torch.nn.Module) -> list[LayerRouting]:
    """Returns the layers of one chunk."""
    routers = (module for module in chunk.modules() if isinstance(module, TopKRouter))
    return [router.router_replay for router in routers if isinstance(router.router_replay, LayerRouting)]


class _Megatron(LayerRouting):
    """In place of megatron-core's RouterReplay, which knows one row at a time and no token without experts."""

    pass_: RoutingReplay

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """(scores, experts), [t, topk] each."""
        return self.forward(
            scores,
            lambda: default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk),
            trains=self.pass_.training,
        )
