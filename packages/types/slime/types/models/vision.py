"""Models that read images: the known families, their arguments for a sample's images, and the images' positions.

`Sample.multimodal_inputs` is {"image": [bytes of a PNG or JPEG file, ...]}, in the order of the prompt.
`Sample.multimodal_train_inputs` holds arrays by the names of the model's arguments; the first dimension of each counts
images, or tiles or patches of images, so the arrays of several samples are concatenated along it.
`Sample.multimodal_train_input_id` is equal for two samples only if their images are equal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slime.types.errors import InvalidField, InvalidSetting, NotAvailable

IMAGE = "image"


@dataclass(frozen=True)
class Vision:
    """A family of models that read images. arguments: the processor's arrays that the model takes, the pixels first.

    by_prompt: the arrays have a leading dimension that counts prompts.
    grids: for models that count the positions of image tokens by time, height and width: the argument with the number
    of patches along each, [images, 3]. A token covers merge x merge patches; image_token: its id.
    model_type: the family's name in config.json. optional: for families whose vision part a trainer leaves out in runs
    on text: how the names of its tensors begin.
    """

    arguments: tuple[str, ...]
    by_prompt: bool = False
    grids: str = ""
    merge: int = 1
    image_token: int = -1
    model_type: str = ""
    optional: str = ""

    def take(self, output: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the `multimodal_train_inputs` of one prompt, from the processor's output for it."""
        taken = {name: np.asarray(output[name]) for name in self.arguments if name in output}
        return {name: array[0] for name, array in taken.items()} if self.by_prompt else taken

    def join(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Joins the arguments for the images of several prompts. Raises InvalidField if a prompt lacks any."""
        joined = {}
        for name in self.arguments:
            arrays = [np.asarray(part[name]) for part in parts if part.get(name) is not None]
            if len(arrays) not in (0, len(parts)) or (not arrays and name == self.arguments[0]):
                raise InvalidField(f"multimodal_train_inputs.{name}", None, "an array in each sample that has images")
            if arrays:
                whole = np.concatenate([_padded(array, arrays) for array in arrays])
                joined[name] = whole[None] if self.by_prompt else whole
        return joined

    def positions(self, image_mask: np.ndarray, inputs: Mapping[str, Any] | None) -> np.ndarray:
        """Returns the positions [3, L] (int64) that a family with `grids` uses in place of 0, 1, ... L - 1.

        image_mask: [L] bool, true for the tokens of images; inputs: `multimodal_train_inputs` of these images.
        Raises InvalidField if the images have more or fewer tokens than the mask, or text stands within an image.
        """
        positions = np.empty((3, len(image_mask)), np.int64)
        indexes = np.flatnonzero(image_mask)
        grids = np.asarray((inputs or {}).get(self.grids, ()), np.int64).reshape(-1, 3) // (1, self.merge, self.merge)
        if int(grids.prod(1).sum()) != len(indexes):
            raise InvalidField(
                "multimodal_train_inputs",
                f"images of {grids.prod(1).sum()} tokens",
                f"{len(indexes)}, as in the prompts",
            )
        filled = next_position = image_tokens = 0
        for grid in grids:
            start, size = int(indexes[image_tokens]), int(grid.prod())
            if indexes[image_tokens + size - 1] != start + size - 1:
                raise InvalidField("tokens", f"text within an image's {size} tokens", "the tokens of an image in a row")
            positions[:, filled:start] = np.arange(next_position, next_position + start - filled)
            next_position += start - filled
            positions[:, start : start + size] = next_position + np.indices(grid).reshape(3, -1)
            next_position += int(grid.max())
            filled, image_tokens = start + size, image_tokens + size
        positions[:, filled:] = np.arange(next_position, next_position + len(image_mask) - filled)
        return positions


_TILES = Vision(("pixel_values", "pixel_attention_mask"), by_prompt=True)
_GRIDS = Vision(("pixel_values", "image_grid_thw"), grids="image_grid_thw", merge=2)
# By model_type of config.json. Models whose image tokens attend to each other in both directions are not supported.
_VISIONS = {
    "llava": Vision(("pixel_values",)), "idefics3": _TILES, "smolvlm": _TILES, "qwen2_vl": _GRIDS, "qwen2_5_vl": _GRIDS,
    "qwen3_vl": _GRIDS, "qwen3_5": replace(_GRIDS, optional="model.visual."),
}  # fmt: skip
FAMILIES = {model_type: replace(vision, model_type=model_type) for model_type, vision in _VISIONS.items()}


def vision_of(config: Mapping[str, Any]) -> Vision | None:
    """Returns the family of a config.json; None if the model reads text only or its family is unknown."""
    found = FAMILIES.get(str(config.get("model_type")))
    if found is None or not found.grids:
        return found
    if found.optional and config.get("vision_config") is None:
        return None
    merge = (config.get("vision_config") or {}).get("spatial_merge_size", found.merge)
    return replace(found, merge=merge, image_token=config.get("image_token_id", found.image_token))


def trained_vision(config: Mapping[str, Any], train_vision: bool | None) -> Vision | None:
    """Returns the family of a config.json as a trainer builds it; None if it builds a model that reads text only.

    train_vision: the value of --train-vision.
    """
    found = vision_of(config)
    return None if found is not None and found.optional and not train_vision else found


def require_vision(directory: str, flag: str) -> Vision:
    """Returns the family of the model in a Hugging Face directory.

    Raises InvalidSetting naming `flag` for a model that reads text only, NotAvailable for an unknown family.
    """
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    found, kind = vision_of(config), config.get("model_type")
    if found is not None:
        return found
    known = ", ".join(FAMILIES)
    if "vision_config" in config:
        raise NotAvailable.unavailable(f"{flag} with a {kind} ({directory})", f"known families are {known}")
    reason = f"the model in {directory} ({kind}) reads text only; families that read images are {known}"
    raise InvalidSetting.requires(flag, "a model that reads images", reason)


@contextlib.contextmanager
def fed_to_layers(model: Any, places: Any, features: Sequence[Any]) -> Iterator[None]:
    """Makes the language model of transformers' `model` add features to the outputs of its first layers, as Qwen3-VL
    does, until it is left.

    places: [B, T] bool, the image tokens; features: for each of those layers [image tokens, hidden]; none for other
    families.
    """

    def give(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "visual_pos_masks": places, "deepstack_visual_embeds": features}

    handle = model.get_decoder().register_forward_pre_hook(give, with_kwargs=True) if features else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def images_of(inputs: Mapping[str, Any] | None) -> list[bytes]:
    """Returns the images in a sample's `multimodal_inputs`. Raises InvalidField for anything but images as bytes."""
    for kind, items in (inputs or {}).items():
        if kind != IMAGE or not isinstance(items, list) or not all(isinstance(item, bytes) for item in items):
            raise InvalidField(f"multimodal_inputs.{kind}", items, "image: a list of encoded images, as bytes")
    return (inputs or {}).get(IMAGE, [])


def images_id(images: Sequence[bytes]) -> str:
    """Returns an id that only equal lists of images share."""
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        digest.update(len(image).to_bytes(8, "little") + image)
    return digest.hexdigest()


def _padded(array: np.ndarray, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Pads each dimension but the first with zeros, to the largest size among `arrays`."""
    sizes = [max(other.shape[axis] for other in arrays) for axis in range(1, array.ndim)]
    return np.pad(array, [(0, 0), *((0, size - have) for size, have in zip(sizes, array.shape[1:], strict=True))])
