"""A GPTModel that reads images, as Qwen3-VL and Qwen3.5 do: transformers' own vision tower before layers of Megatron.

    L  tokens of the row that this rank holds       S  those of them that it computes between layers: L, or with
    I  image tokens of the whole row                   sequence parallelism its share of L
    M  image tokens among the S

The tower is whole on every rank of the first pipeline stage, and each of them computes all images of a row. A rank puts
the features of its own tokens in the place of their embeddings, and adds others to the outputs of its first layers, if
the model has such (Qwen3-VL).
With sequence parallelism ranks have the gradients of different tokens, which Megatron adds up as those of norms; with
context parallelism too, which it adds up as those of replicas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slime.converters.families.config_json import rope, text_of
from slime.trainer.backends.megatron.model.head import PolicyModel
from slime.trainer.backends.megatron.model.row import RowImages
from slime.types.errors import InvalidField

# Defaults of transformers' Qwen3VLTextRotaryEmbedding and Qwen3_5TextRotaryEmbedding, by model_type.
_MROPE_SECTIONS = {"qwen3_vl": (24, 20, 20), "qwen3_5": (11, 11, 10)}


def _plain_tower(config: Mapping[str, Any]) -> nn.Module:
    if config["model_type"] == "qwen3_5":
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

        sees = Qwen3_5Config.from_dict(dict(config)).vision_config
        return Qwen3_5VisionModel._from_config(sees, dtype=torch.float32)
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    sees = Qwen3VLConfig.from_dict(dict(config)).vision_config
    return Qwen3VLVisionModel._from_config(sees, dtype=torch.float32)


class VisionTower(nn.Module):
    """transformers' vision model of `config`, the object of config.json."""

    def __init__(
        self, config: Mapping[str, Any], dtype: torch.dtype, *, recompute: bool, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.tower = _plain_tower(config)
        self.to(dtype)
        if recompute:
            self.tower._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))
        for parameter in self.parameters():
            # As of a norm: each tensor-parallel rank has the gradient of its share of the tokens.
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def _apply(self, fn: Any, recurse: bool = True) -> VisionTower:
        # Frequencies of positions stay float32 when weights become bfloat16, as in transformers.
        buffers = [(m, name, b) for m in self.modules() for name, b in m.named_buffers(recurse=False)]
        super()._apply(fn, recurse)
        for module, name, buffer in buffers:
            setattr(module, name, buffer.to(getattr(module, name).device))
        return self

    def forward(self, images: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns the features [I, hidden] that replace embeddings, then those that layers add, from the first on."""
        weight = self.tower.pos_embed.weight
        pixels, grids = (images[name].to(weight.device) for name in ("pixel_values", "image_grid_thw"))
        seen = self.tower(pixels.to(weight.dtype), grid_thw=grids, return_dict=True)
        return [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]


@dataclasses.dataclass(frozen=True)
class _Fed:
    """Features that layers add to their outputs. places: [M] int64 into S; features: for each layer [M, hidden]."""

    places: Tensor
    features: Sequence[Tensor]


class VisionModel(PolicyModel):
    """A PolicyModel with a vision tower on the first stage. vision: the object of config.json.

    Images of a row are `packed_seq_params.slime_images`, if it has any.
    """

    def __init__(self, *args: Any, vision: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_axes = rotary_axes(vision, 2 * self.rotary_pos_emb.inv_freq.numel())
        if not self.pre_process:
            return
        self.visual = VisionTower(
            vision, self.config.params_dtype, recompute=self.config.recompute_granularity == "full",
            sequence_parallel=self.config.sequence_parallel,
        )  # fmt: skip
        for number in range(len(vision["vision_config"].get("deepstack_visual_indexes") or ())):
            self.decoder.layers[number].register_forward_hook(_Feed(number), with_kwargs=True)

    def _preprocess(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        hidden, *rest = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if self.pre_process:
            hidden = self._with_images(hidden, packed_seq_params)
        return hidden, *rest

    def _with_images(self, hidden: Tensor, packing: Any) -> Tensor:
        """[S, 1, hidden] -> [S, 1, hidden]"""
        images: RowImages | None = getattr(packing, "slime_images", None)
        if images is None:
            if not torch.is_grad_enabled():
                return hidden
            # A gradient buffer is reduced once every parameter in it has a gradient.
            touched = sum((p.sum() for p in self.visual.parameters() if p.requires_grad), hidden.new_zeros(()))
            return hidden + (0.0 * touched).to(hidden.dtype)
        features = self.visual(images.arguments)
        if len(features[0]) != images.count:
            raise InvalidField(
                "multimodal_train_inputs", f"images of {len(features[0])} tokens", f"{images.count}, as in the prompts"
            )
        places, numbers = images.places, images.numbers
        if self.config.sequence_parallel:
            first = len(hidden) * parallel_state.get_tensor_model_parallel_rank()
            held = (places >= first) & (places < first + len(hidden))
            places, numbers = places[held] - first, numbers[held]
        places, numbers = places.to(hidden.device), numbers.to(hidden.device)
        embedded, *later = (part.index_select(0, numbers).to(hidden.dtype) for part in features)
        hidden = hidden.index_copy(0, places, embedded[:, None])
        if later and torch.is_grad_enabled() and later[0].requires_grad:
            leaves: list[Tensor] = []
            hidden = _Collect.apply(hidden, leaves, *later)
            later = leaves
        packing.slime_fed = _Fed(places, later)
        return hidden


class _Collect(torch.autograd.Function):
    """Hands on hidden states, and the gradients that layers behind them gave to leaves which stand for features.

    Recomputed layers run a backward pass each. If they saw the features themselves, each of those would go through the
    tower, whose graph can be gone through once.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaves: list[Tensor], *features: Tensor) -> Tensor:
        leaves += [part.detach().requires_grad_() for part in features]
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # The layers are behind: their backward passes are done.
        return gradient, None, *(leaf.grad for leaf in ctx.leaves)


class _Feed:
    """Adds features of images to the output of layer `number`; a hook of it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, layer: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        # With the row, which a recomputed layer is given again, and not with the model, which may be at another row.
        fed: _Fed | None = getattr(kwargs.get("packed_seq_params"), "slime_fed", None)
        if fed is None:
            return output
        hidden, *rest = output
        return hidden.index_add(0, fed.places, fed.features[self._number][:, None].to(hidden.dtype)), *rest


def rotary_axes(config: Mapping[str, Any], channels: int) -> list[int]:
    """Returns for each of the `channels` that positions rotate in a head the axis (0 time, 1 height, 2 width) of its
    position.

    Axes alternate, and time has the channels that are left.
    """
    sections = rope(text_of(config)).get("mrope_section", _MROPE_SECTIONS[config["model_type"]])
    half = [0] * (channels // 2)
    for axis in (1, 2):
        for place in range(axis, min(3 * sections[axis], len(half)), 3):
            half[place] = axis
    return half + half
