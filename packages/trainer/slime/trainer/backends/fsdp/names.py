"""Tensors of the model as the files of a Hugging Face directory have them, where transformers keeps another form.

transformers holds the experts of a layer in two tensors; the files have three matrices per expert.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.types.errors import NotAvailable
from slime.types.models.vision import vision_of


def disk_parts(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Returns the files' tensors for a whole tensor of `model`, in order; their shapes for one on the meta device.

    Raises NotAvailable for a model that reads images where transformers is older than 5.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        if vision_of(model.config.to_dict()) is None:
            return {name: tensor}
        raise NotAvailable.requires("images", "the package transformers 5", "pip install 'transformers>=5'") from error
    parts: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return parts


def other_in_files(model: Any, flag: str) -> frozenset[str]:
    """Returns the tensors of `model` that are not in its files as they are, for `disk_parts` to take.

    Raises NotAvailable naming a tensor whose form in the files takes several tensors of the model.
    """
    differing = set()
    for name, tensor in model.state_dict().items():
        whole = torch.empty_like(tensor, device="meta")
        try:
            parts = disk_parts(model, name, whole)
        except (KeyError, ValueError, RuntimeError, AttributeError) as error:
            raise _not_available(model, flag, name) from error
        if sum(part.numel() for part in parts.values()) != tensor.numel():
            raise _not_available(model, flag, name)
        if parts.get(name) is not whole:
            differing.add(name)
    return frozenset(differing)


def left_out(model: Any, directory: str, trained: Container[str]) -> list[str]:
    """Names the tensors in the files of `directory` that the class of `model` leaves out by design: layers that predict
    further tokens, and what reads images in a model that is trained on text."""
    patterns = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    names = SafetensorsDir(directory).tensors if patterns else {}
    return [name for name in names if name not in trained and any(pattern.search(name) for pattern in patterns)]


def _not_available(model: Any, flag: str, name: str) -> NotAvailable:
    kind = model.config.model_type
    return NotAvailable(
        f"{flag}: {name} of a {kind} model has no form of its own in the model's files",
        field=flag, value=kind, expected="a model whose files have its tensors, or parts of them",
    )  # fmt: skip
