"""Models that read images: which are known, and what a processor makes of a sample's images for them.

`Sample.multimodal_inputs` is {"image": [bytes of a PNG or JPEG file, ...]}, in the order of the prompt.
`Sample.multimodal_train_inputs` holds arrays by the names of the model's arguments; the first dimension of each counts
images, or tiles of images, so those of several samples are joined end to end.
`Sample.multimodal_train_input_id` is equal for two samples only where their images are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime.types.errors import InvalidField, InvalidSetting, NotAvailable

IMAGE = "image"


@dataclass(frozen=True)
class Vision:
    """A family of models. arguments: arrays of a processor that the model takes, the pixels first.

    by_prompt: those have a dimension in front that counts prompts.
    """

    arguments: tuple[str, ...]
    by_prompt: bool = False

    def take(self, output: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Of a processor's output for one prompt, what `multimodal_train_inputs` holds."""
        taken = {name: np.asarray(output[name]) for name in self.arguments if name in output}
        return {name: array[0] for name, array in taken.items()} if self.by_prompt else taken

    def join(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """One call's arguments for the images of several prompts. Raises InvalidField where a prompt lacks any."""
        joined = {}
        for name in self.arguments:
            arrays = [np.asarray(part[name]) for part in parts if part.get(name) is not None]
            if len(arrays) not in (0, len(parts)) or (not arrays and name == self.arguments[0]):
                raise InvalidField(f"multimodal_train_inputs.{name}", None, "an array in each sample that has images")
            if arrays:
                whole = np.concatenate([_padded(array, arrays) for array in arrays])
                joined[name] = whole[None] if self.by_prompt else whole
        return joined


_TILES = Vision(("pixel_values", "pixel_attention_mask"), by_prompt=True)
# By model_type of config.json. Their positions are those of text: what counts images in several dimensions, or lets
# tokens of one image see each other in both directions, has no place here.
FAMILIES: dict[str, Vision] = {"llava": Vision(("pixel_values",)), "idefics3": _TILES, "smolvlm": _TILES}


def vision_of(config: Mapping[str, Any]) -> Vision | None:
    """Of a config.json; None for a model that reads text alone, or of a family that is not known."""
    return FAMILIES.get(config.get("model_type", ""))


def require_vision(directory: str, flag: str) -> Vision:
    """Of the model in a Hugging Face directory.

    Raises InvalidSetting naming `flag` for a model that reads text alone, NotAvailable for a family not known here.
    """
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    found, kind = vision_of(config), config.get("model_type")
    if found is not None:
        return found
    known = ", ".join(FAMILIES)
    if "vision_config" in config:
        raise NotAvailable(
            f"{flag}: the images of a {kind} ({directory}) are not available, expected one of {known}",
            field=flag, value=kind, expected=known,
        )  # fmt: skip
    raise InvalidSetting(
        f"{flag}: the model in {directory} ({kind}) reads text alone, expected one that reads images: {known}",
        field=flag, value=kind, expected=known,
    )  # fmt: skip


def images_of(inputs: Mapping[str, Any] | None) -> list[bytes]:
    """Of a sample's `multimodal_inputs`. Raises InvalidField for anything but images as bytes."""
    for kind, items in (inputs or {}).items():
        if kind != IMAGE or not isinstance(items, list) or not all(isinstance(item, bytes) for item in items):
            raise InvalidField(f"multimodal_inputs.{kind}", items, "image: a list of encoded images, as bytes")
    return (inputs or {}).get(IMAGE, [])


def images_id(images: Sequence[bytes]) -> str:
    """Equal for equal lists alone."""
    digest = hashlib.blake2b(digest_size=16)
    for image in images:
        digest.update(len(image).to_bytes(8, "little") + image)
    return digest.hexdigest()


def _padded(array: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """Zeros behind each dimension but the first, up to the largest of `others`."""
    sizes = [max(other.shape[axis] for other in others) for axis in range(1, array.ndim)]
    return np.pad(array, [(0, 0), *((0, size - have) for size, have in zip(sizes, array.shape[1:], strict=True))])
