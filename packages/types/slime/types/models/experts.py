"""Sizes of mixtures of experts, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Experts(NamedTuple):
    """Sizes of a mixture of experts. layers: all layers of the model, dense ones included. top_k: experts per token.
    experts: experts per layer."""

    layers: int
    top_k: int
    experts: int


def experts_of(config: Mapping[str, Any]) -> Experts | None:
    """Returns the sizes of the model's experts; None for a dense model. config: the content of config.json."""
    text = config.get("text_config") or config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(text[name]) for name in names if text.get(name)), 0)
    if not experts or not text.get("num_experts_per_tok"):
        return None
    return Experts(int(text["num_hidden_layers"]), int(text["num_experts_per_tok"]), experts)
