"""Mixtures of experts, as config.json describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Experts(NamedTuple):
    """The sizes of a mixture of experts. layers: of the model, dense ones counted. top_k: experts of a token. experts:
    of a layer."""

    layers: int
    top_k: int
    experts: int


def experts_of(config: Mapping[str, Any]) -> Experts | None:
    """Returns the shape of the model's experts; None for a dense model. config: the object of config.json."""
    text = config.get("text_config") or config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(text[name]) for name in names if text.get(name)), 0)
    if not experts or not text.get("num_experts_per_tok"):
        return None
    return Experts(int(text["num_hidden_layers"]), int(text["num_experts_per_tok"]), experts)
