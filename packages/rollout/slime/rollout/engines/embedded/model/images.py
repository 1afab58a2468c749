"""Reads the images of a request, in SGLang's form, and feeds them to the first forward pass over a prompt."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slime.rollout.engines.embedded.model.response import Response
from slime.types.errors import InvalidField
from slime.types.models.vision import Vision

EXPECTED = "images as base64, or as data:image/...;base64,...: the embedded engine fetches nothing"


def parse_image_data(value: Any, count: int, *, batched: bool) -> list[list[bytes]]:
    """Returns the encoded images of each of `count` prompts. value: the request's `image_data`. Raises InvalidField."""
    if not value:
        return [[] for _ in range(count)]
    each = value if batched else [value]
    if not isinstance(each, list) or len(each) != count:
        raise InvalidField("image_data", value, f"a list with an entry for each of {count} prompts")
    return [
        [_decoded(item, f"image_data[{i}]") for item in (images if isinstance(images, list) else [images])]
        for i, images in enumerate([entry or [] for entry in each])
    ]


def _decoded(value: Any, field: str) -> bytes:
    if not isinstance(value, str) or not value:
        raise InvalidField(field, value, EXPECTED)
    head, comma, encoded = value.partition(",") if value.startswith("data:") else ("", "", value)
    if comma and not head.endswith(";base64"):
        raise InvalidField(field, head, EXPECTED)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidField(field, value, EXPECTED) from None


@dataclass(frozen=True)
class EmbeddedPrompts:
    """Prompts as the language model takes them in. embedded: [U, P, hidden]; places: [U, P] bool, the image tokens;
    in_layers: what each of the first layers adds at these places, [image tokens, hidden], in families that do so."""

    embedded: torch.Tensor
    places: torch.Tensor
    in_layers: list[torch.Tensor]


def embed_images(model: Any, vision: Vision, ids_UP: torch.Tensor, prompts: Sequence[Response]) -> EmbeddedPrompts:
    """Embeds left-padded prompts, with image features at the image tokens.

    ids_UP: int64. Tokens of the same id that the model generated keep their text embedding. Raises InvalidField if the
    prompts hold another number of image tokens than the model returns features.
    """
    embedded = model.get_input_embeddings()(ids_UP)
    places = torch.zeros_like(ids_UP, dtype=torch.bool)
    length = ids_UP.shape[1]
    for row, prompt in enumerate(prompts):
        start = length - len(prompt.prompt_ids) - len(prompt.output_ids)
        places[row, [start + place for place in prompt.image_places]] = True
    joined = vision.join([prompt.media for prompt in prompts if prompt.media])
    features = model.get_image_features(**_tensors(model, joined))
    seen = torch.cat(list(features.pooler_output))
    if len(seen) != int(places.sum()):
        raise InvalidField("image_data", f"{int(places.sum())} tokens", f"{len(seen)}, as the model makes of them")
    # Some versions of transformers split them by image.
    deep = getattr(features, "deepstack_features", None) or ()
    in_layers = [each if isinstance(each, torch.Tensor) else torch.cat(each) for each in deep]
    return EmbeddedPrompts(embedded.masked_scatter(places[..., None], seen.to(embedded.dtype)), places, in_layers)


def grid_positions(
    vision: Vision, plain_UP: torch.Tensor, prompts: Sequence[Response]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the positions of left-padded prompts [3, U, P], and the offset of later tokens' positions [U, 1].

    plain_UP: the positions without images.
    """
    positions_3UP = plain_UP.expand(3, *plain_UP.shape).clone()
    ahead_U1 = plain_UP.new_zeros(len(prompts), 1)
    for row, prompt in enumerate(prompts):
        if prompt.media:
            length = len(prompt.prompt_ids) + len(prompt.output_ids)
            places = np.zeros(length, bool)
            places[prompt.image_places] = True
            counted = vision.positions(places, prompt.media)
            positions_3UP[:, row, -length:] = torch.from_numpy(counted)
            ahead_U1[row] = int(counted.max()) + 1 - length
    return positions_3UP, ahead_U1


def _tensors(model: Any, arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.from_numpy(array).to(model.device) for name, array in arrays.items()}
    return {name: t.to(model.dtype) if t.is_floating_point() else t for name, t in tensors.items()}
