"""Records which experts each token is sent to, for `return_routed_experts`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from slime.types.errors import NotAvailable

FLAG = "--enable-return-routed-experts"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class RoutingRecorder:
    """Reads the routers of a `transformers` model, whose last output holds the experts [tokens, k]."""

    def __init__(self, model: Any) -> None:
        """Raises NotAvailable for a model without such routers."""
        text = model.config.get_text_config()
        self._layers = int(text.num_hidden_layers)
        self._seen: dict[int, torch.Tensor] = {}
        num_routers = 0
        for name, module in model.named_modules():
            place = _LAYER.search(name)
            if place is not None and type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._hook(int(place[1])))
                num_routers += 1
        if not num_routers:
            raise NotAvailable.requires(
                FLAG, "a mixture of experts", f"{type(model).__name__} has no router known here"
            )

    def _hook(self, layer: int) -> Any:
        def record(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._seen[layer] = output[-1]

        return record

    def take(self, rows: int) -> np.ndarray:
        """Returns the experts of the last forward pass, over [rows, T] tokens: int32 [rows, T, layers, k], -1 for dense
        layers."""
        first = next(iter(self._seen.values()))
        tokens, k = first.shape
        found = np.full((tokens, self._layers, k), -1, dtype=np.int32)
        for layer, experts in self._seen.items():
            found[:, layer] = experts.to("cpu", torch.int32).numpy()
        self._seen.clear()
        return found.reshape(rows, tokens // rows, self._layers, k)
