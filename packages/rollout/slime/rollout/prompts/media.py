"""Encodes prompts with images, with the model's processor instead of its tokenizer.

The processor replaces the placeholder that the chat template left for an image by the tokens of that image. A request
carries the prompt with its placeholders, and the images; the engine itself makes tokens and pixels of them. SGLang does
so even for `input_ids`: it expands each placeholder, and would take each token of an expanded image for one more image.
"""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.types.errors import InvalidField, InvalidFile
from slime.types.models.vision import Vision, images_id, require_vision

# Number of images whose tokens and pixels are cached: the samples of a group share theirs.
CACHED = 32


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with images. tokens: int32, those of the images included; placeholders: the same with one token for each
    image; images: data URIs; train_inputs, input_id: `multimodal_train_inputs` and `multimodal_train_input_id` of a
    sample."""

    tokens: np.ndarray
    placeholders: list[int]
    images: list[str]
    train_inputs: dict[str, np.ndarray]
    input_id: str


class Media:
    """The processor of the model in a Hugging Face directory.

    Raises InvalidSetting for a model that reads only text, NotAvailable for an unknown family, InvalidFile if the
    processor cannot be loaded; each names `flag`.
    """

    def __init__(self, directory: str, flag: str = "--hf-checkpoint") -> None:
        self.vision: Vision = require_vision(directory, flag)
        self.processor: Any = load_processor(directory, self.vision, flag)
        self.image_token: int = self.processor.image_token_id
        self._one = functools.lru_cache(CACHED)(lambda image: self._process(self.processor.image_token, [image], 1))

    def prompt(self, text: str, images: Sequence[bytes]) -> MediaPrompt:
        """Encodes a rendered text with a placeholder for each image. Raises InvalidField if the images do not fit
        it."""
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
        """Returns (ids with each placeholder replaced by its image's tokens, positions of those tokens, the model's
        arguments for the images). The first placeholders belong to the images; a model may write more.

        Raises InvalidField for too few placeholders or an image that cannot be decoded.
        """
        if list(ids).count(self.image_token) < len(images):
            raise _wrong_number(len(images), list(ids).count(self.image_token))
        processed = [self._one(image) for image in images]
        left = iter(processed)
        expanded: list[int] = []
        places: list[int] = []
        for token in ids:
            of_image, _ = next(left, ([], {})) if token == self.image_token else ([], {})
            places += [len(expanded) + i for i, part in enumerate(of_image) if part == self.image_token]
            expanded += of_image or [token]
        return expanded, places, self.vision.take(self.vision.join([inputs for _, inputs in processed]))

    def expand_masked(
        self, ids: Sequence[int], mask: Sequence[int], images: Sequence[bytes]
    ) -> tuple[list[int], list[int], dict[str, np.ndarray]]:
        """Returns what `expand` does, with the mask of the expanded ids in place of the positions: 0 for images."""
        expanded, _, inputs = self.expand(ids, images)
        left = iter(images)
        spread: list[int] = []
        for token, trained in zip(ids, mask, strict=True):
            image = next(left, None) if token == self.image_token else None
            spread += [trained] if image is None else [0] * len(self._one(image)[0])
        return expanded, spread, inputs

    def _process(self, text: str, images: Sequence[bytes], count: int) -> tuple[list[int], dict[str, np.ndarray]]:
        if count != len(images):
            raise _wrong_number(len(images), count)
        output: Mapping[str, Any] = self.processor(
            text=[text], images=[_decoded(image, i) for i, image in enumerate(images)], add_special_tokens=False
        )
        return list(output["input_ids"][0]), self.vision.take(output)


def data_uri(image: bytes) -> str:
    """Returns a data URI: `data:image/png;base64,...`, or with the image's own type."""
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


class ImagesAlone:
    """A processor for models with image grids, whose own class needs torchvision because it also reads videos.

    It has only the arguments and outputs that images need.
    """

    def __init__(self, tokenizer: Any, image_processor: Any, vision: Vision) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.image_token_id = vision.image_token
        self.image_token: str = tokenizer.convert_ids_to_tokens(vision.image_token)
        self.apply_chat_template = tokenizer.apply_chat_template
        self._vision = vision

    def __call__(
        self, *, text: Sequence[str], images: Sequence[Any] | None = None, add_special_tokens: bool = False
    ) -> dict[str, Any]:
        """Encodes texts; repeats each image token once per patch of its image. images: of one text, in order."""
        output: dict[str, Any] = {}
        counts: list[int] = []
        if images:
            processed = self.image_processor(images=list(images))
            output = {name: np.asarray(processed[name]) for name in self._vision.arguments}
            counts = (output[self._vision.grids].prod(1) // self._vision.merge**2).tolist()
        ids: list[list[int]] = self.tokenizer(list(text), add_special_tokens=add_special_tokens)["input_ids"]
        left = iter(counts)
        spread = [[t for t in row for _ in range(next(left, 1) if t == self.image_token_id else 1)] for row in ids]
        return output | {"input_ids": spread}


def load_processor(directory: str, vision: Vision, flag: str) -> Any:
    """Raises InvalidFile, naming `flag`, where it cannot be loaded."""
    from transformers import AutoProcessor, AutoTokenizer
    from transformers.utils import is_torchvision_available

    try:
        if vision.grids and not is_torchvision_available():
            # Imported by its own name: in some versions AutoImageProcessor needs torchvision.
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            tokenizer = AutoTokenizer.from_pretrained(directory)
            return ImagesAlone(tokenizer, Qwen2VLImageProcessorPil.from_pretrained(directory), vision)
        return AutoProcessor.from_pretrained(directory)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        # Processors that also read videos need torchvision, and their error has several lines.
        reason = " ".join(str(error).split())
        raise InvalidFile(
            f"{flag}: {directory}: its processor cannot be loaded: {reason}", field=flag, value=directory,
            expected="an image processor",
        ) from error  # fmt: skip
