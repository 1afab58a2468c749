"""The processor of a model that reads images, from its directory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.types.errors import InvalidFile
from slime.types.vision import Vision


class ImagesAlone:
    """A processor for models that count images by their grids, whose own class wants torchvision, for videos.

    Of its arguments and its output it has what images need.
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
        """As many image tokens in the place of each as the image has; of one text, `images` in their order."""
        output: dict[str, Any] = {}
        counts: list[int] = []
        if images:
            made = self.image_processor(images=list(images))
            output = {name: np.asarray(made[name]) for name in self._vision.arguments}
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
            # By its own name: not every version's AutoImageProcessor does without torchvision.
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            tokenizer = AutoTokenizer.from_pretrained(directory)
            return ImagesAlone(tokenizer, Qwen2VLImageProcessorPil.from_pretrained(directory), vision)
        return AutoProcessor.from_pretrained(directory)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        # Those that read videos too are built on torchvision, and say so over several lines.
        reason = " ".join(str(error).split())
        raise InvalidFile(
            f"{flag}: {directory}: its processor cannot be loaded: {reason}", field=flag, value=directory,
            expected="a processor of images",
        ) from error  # fmt: skip
