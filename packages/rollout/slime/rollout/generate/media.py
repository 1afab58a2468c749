"""Prompts with images: the model's processor in the place of its tokenizer.

The processor writes an image's tokens where the chat template left one placeholder. A request carries the prompt with
those placeholders, and the images: an engine makes tokens and pixels of them by itself. SGLang does so with
`input_ids` too: it keeps them, and spreads each placeholder; a run of image tokens that is there already would be that
many images to it.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.rollout.generate.processor import load_processor
from slime.types.errors import InvalidField
from slime.types.vision import Vision, images_id, require_vision

# Images whose tokens and pixels are kept: the samples of a group have the same.
CACHED = 32


@dataclass(frozen=True)
class MediaPrompt:
    """tokens: int32, those of the images included; placeholders: the same with one token for each image; images: data
    URIs; train_inputs, input_id: `multimodal_train_inputs` and `multimodal_train_input_id` of a sample."""

    tokens: np.ndarray
    placeholders: list[int]
    images: list[str]
    train_inputs: dict[str, np.ndarray]
    input_id: str


class Media:
    """The processor of the model in a Hugging Face directory.

    Raises InvalidSetting for a model that reads text alone, NotAvailable for one of a family that is not known,
    InvalidFile where its processor cannot be loaded; each names `flag`.
    """

    def __init__(self, directory: str, flag: str = "--hf-checkpoint") -> None:
        self.vision: Vision = require_vision(directory, flag)
        self.processor: Any = load_processor(directory, self.vision, flag)
        self.image_token: int = self.processor.image_token_id
        self._one = functools.lru_cache(CACHED)(lambda image: self._process(self.processor.image_token, [image], 1))

    def prompt(self, text: str, images: Sequence[bytes]) -> MediaPrompt:
        """text: rendered, a placeholder for each image. Raises InvalidField for images that do not fit it."""
        placeholders = list(self.processor.tokenizer.encode(text, add_special_tokens=False))
        tokens, inputs = self._process(text, images, placeholders.count(self.image_token))
        return MediaPrompt(
            tokens=np.asarray(tokens, np.int32),
            placeholders=placeholders,
            images=[data_uri(image) for image in images],
            train_inputs=inputs,
            input_id=images_id(images),
        )

    def expand(self, ids: Sequence[int], images: Sequence[bytes]) -> tuple[list[int], list[int], dict[str, np.ndarray]]:
        """(ids with the tokens of each image in the place of its placeholder, where image tokens stand in them, the
        model's arguments for the images). The first placeholders are those of the images; a model may write more.

        Raises InvalidField for too few placeholders, or for an image that cannot be decoded.
        """
        if list(ids).count(self.image_token) < len(images):
            raise _wrong_number(len(images), list(ids).count(self.image_token))
        each = [self._one(image) for image in images]
        left = iter(each)
        expanded: list[int] = []
        places: list[int] = []
        for token in ids:
            of_image, _ = next(left, ([], {})) if token == self.image_token else ([], {})
            places += [len(expanded) + i for i, part in enumerate(of_image) if part == self.image_token]
            expanded += of_image or [token]
        return expanded, places, self.vision.take(self.vision.join([inputs for _, inputs in each]))

    def _process(self, text: str, images: Sequence[bytes], count: int) -> tuple[list[int], dict[str, np.ndarray]]:
        if count != len(images):
            raise _wrong_number(len(images), count)
        output: Mapping[str, Any] = self.processor(
            text=[text], images=[_decoded(image, i) for i, image in enumerate(images)], add_special_tokens=False
        )
        return list(output["input_ids"][0]), self.vision.take(output)


def data_uri(image: bytes) -> str:
    """`data:image/png;base64,...`, or with another kind of image."""
    import PIL.Image

    with PIL.Image.open(io.BytesIO(image)) as opened:
        kind = opened.get_format_mimetype() or "image/png"
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


def _decoded(image: bytes, number: int) -> Any:
    import PIL.Image

    try:
        return PIL.Image.open(io.BytesIO(image)).convert("RGB")
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise InvalidField(
            f"image[{number}]", f"{len(image)} bytes", f"an image that can be decoded ({error})"
        ) from None


def _wrong_number(images: int, placeholders: int) -> InvalidField:
    return InvalidField("image", f"{images} images", f"{placeholders}, one for each placeholder of the prompt")
