"""Models that read images, for packed rows that have images in some of their prompts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from slime.types.errors import InvalidField
from slime.types.models.vision import fed_to_layers


def accept_images(model: Any) -> None:
    """Makes the model's forward take `images`, arguments of `get_image_features`, and `image_places`, [1, T] bool.

    Image tokens at those places are embedded as the features of the images, in order; a token of the same id elsewhere
    was written by the model, and is embedded like any other. The forward raises InvalidField if the images make another
    number of tokens.
    """
    plain = model.forward

    @functools.wraps(plain)
    def forward(
        input_ids: Tensor, images: dict[str, Tensor] | None = None, image_places: Tensor | None = None, **kwargs: Any
    ) -> Any:
        embedded = model.get_input_embeddings()(input_ids)
        places, in_layers = image_places, list[Tensor]()
        if images:
            places = image_places & (input_ids == model.config.image_token_id)
            features = model.get_image_features(**images)
            seen = torch.cat(list(features.pooler_output))
            # Some versions of transformers split them by image.
            deep = getattr(features, "deepstack_features", None) or ()
            in_layers = [each if isinstance(each, Tensor) else torch.cat(each) for each in deep]
            if len(seen) != int(places.sum()):
                raise InvalidField(
                    "multimodal_train_inputs",
                    f"images of {len(seen)} tokens",
                    f"{int(places.sum())}, as in the prompts",
                )
            embedded = embedded.masked_scatter(places[..., None], seen.to(embedded.dtype))
        if torch.is_grad_enabled() and hasattr(model, "unshard"):
            # Ranks with images and ranks without have to reduce the gradients of the same weights.
            touched = sum((p.sum() for p in _seeing(model)), embedded.new_zeros(()))
            embedded = embedded + (0.0 * touched).to(embedded.dtype)
        with fed_to_layers(model, places, in_layers):
            return plain(inputs_embeds=embedded, **kwargs)

    model.forward = forward


def _seeing(model: Any) -> list[Tensor]:
    """Returns the trainable parameters outside the language model."""
    spoken = {id(p) for p in model.get_decoder().parameters()}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in spoken]
