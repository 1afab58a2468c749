"""LoRA adapters that clients ask for, and the frozen model that all of a service's adapters share."""

from __future__ import annotations

import copy
import itertools
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from slime.launcher.tinker.requests import integer
from slime.trainer.backends.fsdp import model as loading
from slime.trainer.backends.fsdp.lora import is_tied, target_layers
from slime.trainer.settings.checks import ALL_LINEAR
from slime.types.errors import InvalidField, NotAvailable
from slime.types.models.vision import vision_of

_ATTENTION = re.compile(r"attn|attention")
_PARTS = ("train_attn", "train_mlp", "train_unembed")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterRequest:
    """A LoRA adapter as the SDK asks for it: its rank, and the parts of the model that have updates. seed: of its first
    numbers, None for the service's."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @staticmethod
    def read(config: Any) -> AdapterRequest:
        """Reads a request's lora_config. Raises InvalidField."""
        if not isinstance(config, Mapping):
            raise InvalidField("lora_config", config, "an object with a rank; `slime tinker --full-weights` needs none")
        seed = None if config.get("seed") is None else integer(config, "seed", 0)
        parts = {part: config.get(part, True) is not False for part in _PARTS}
        return AdapterRequest(integer(config, "rank", 1), seed, **parts)

    @staticmethod
    def known(about: Mapping[str, Any] | None) -> AdapterRequest | None:
        """Returns the adapter of a run's `about`, None for one of full weights."""
        return None if about is None else AdapterRequest(**about)

    @property
    def about(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def answer(self) -> dict[str, Any]:
        """The fields by which answers describe it."""
        return {"lora_rank": self.rank, **{part: getattr(self, part) for part in _PARTS}}


class SharedBase:
    """The model in `directory`, frozen: one copy of its weights for all adapters. Used on one thread."""

    def __init__(self, directory: str, *, bf16: bool, device: torch.device) -> None:
        self._directory = directory
        self._bf16 = bf16
        self._device = device
        self._model: Any = None

    def model(self) -> nn.Module:
        """Returns modules of their own around the shared weights; a model that reads images shares none."""
        if self._model is None:
            model: Any = loading.load_model(self._directory, flag="--hf-checkpoint").requires_grad_(False)
            if self._bf16:
                loading.round_parameters(model)
            if vision_of(model.config.to_dict()) is not None:
                # Its forward pass is a function around this very model.
                return model
            self._model = model.to(self._device)
        weights = itertools.chain(self._model.parameters(), self._model.buffers())
        found: nn.Module = copy.deepcopy(self._model, {id(tensor): tensor for tensor in weights})
        return found


def layers_of(model: Any, request: AdapterRequest) -> list[str]:
    """Returns the names of the layers that get updates. Raises NotAvailable if there are none."""
    inner = target_layers(model, [ALL_LINEAR])
    names = [name for name in inner if getattr(request, "train_attn" if _ATTENTION.search(name) else "train_mlp")]
    if request.train_unembed:
        if is_tied(model):
            log.warning("lora_config.train_unembed: this model's output layer is its embedding, and is not trained")
        else:
            head = model.get_output_embeddings()
            names += [name for name, module in model.named_modules() if module is head]
    if not names:
        asked = ", ".join(part for part in _PARTS if getattr(request, part)) or "no part"
        raise NotAvailable.unavailable(f"lora_config with {asked} for this model", "it would have no layer to train")
    return names
