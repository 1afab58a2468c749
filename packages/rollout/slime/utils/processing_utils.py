"""Compatibility: `slime.utils.processing_utils`, tokenizers, processors and images of plug-ins."""

from __future__ import annotations

import base64
import importlib
import io
import logging
from typing import Any

__all__ = [
    "build_processor_kwargs", "encode_image_for_rollout_engine", "load_processor", "load_tokenizer",
    "process_vision_info",
]  # fmt: skip

log = logging.getLogger(__name__)


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Returns the tokenizer of a Hugging Face directory or name, as transformers loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Returns the processor of images and text of a Hugging Face directory or name; None for a model without images."""
    from transformers import AutoProcessor, ProcessorMixin

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError) as error:
        log.warning("%s has no processor: %s", name_or_path, error)
        return None
    return processor if isinstance(processor, ProcessorMixin) else None


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the keywords of a processor's call on these inputs: token ids come as lists, images, videos and audio as
    torch tensors, and nothing else beside them."""
    keywords = dict(multimodal_inputs or {}) | {"return_mm_token_type_ids": False}
    for kind, form in (("text", None), ("images", "pt"), ("videos", "pt"), ("audio", "pt")):
        name = f"{kind}_kwargs"
        keywords[name] = keywords.get(name, {}) | {"return_tensors": form}
    return keywords


def process_vision_info(prompt: Any, processor: Any) -> dict[str, Any]:
    """Returns {"images": [...], "videos": [...]} of chat messages; needs the package qwen-vl-utils."""
    read = importlib.import_module("qwen_vl_utils").process_vision_info
    size = getattr(getattr(processor, "image_processor", None), "patch_size", None)
    images, videos = read(prompt, **({} if size is None else {"image_patch_size": size}))
    return {"images": images, "videos": videos}


def encode_image_for_rollout_engine(image: Any) -> str:
    """Returns a PIL image as the base64 text of an RGB PNG, the form of /generate's `image_data`."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")
