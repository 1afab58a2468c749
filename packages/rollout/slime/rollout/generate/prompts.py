"""Prompts to token ids, by the tokenizer of the checkpoint; responses are never tokenised."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.types import Sample
from slime.types.errors import InvalidFile, MissingFile
from slime.types.vision import images_id, images_of, vision_of

if TYPE_CHECKING:
    from slime.rollout.generate.media import Media, MediaPrompt

CACHED_PROMPTS = 4096
# These have their pixels with them.
CACHED_MEDIA = 64
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check_directory(hf_checkpoint: str) -> None:
    """Raises MissingFile where there is no directory or no tokenizer in it; loads nothing.

    A name that is no path is left to transformers (its cache, or the hub).
    """
    path = Path(hf_checkpoint)
    is_path = path.is_absolute() or hf_checkpoint.startswith(".") or path.exists()
    if is_path and not path.is_dir():
        raise MissingFile(
            f"--hf-checkpoint: no such directory {hf_checkpoint}", field="--hf-checkpoint", value=hf_checkpoint
        )
    if is_path and not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise MissingFile(
            f"--hf-checkpoint {hf_checkpoint}: no tokenizer in it, expected tokenizer.json",
            field="--hf-checkpoint",
            value=hf_checkpoint,
            expected="tokenizer.json",
        )


def load_tokenizer(hf_checkpoint: str) -> Any:
    """The tokenizer as transformers loads it. Raises MissingFile, or InvalidFile where it cannot be read."""
    check_directory(hf_checkpoint)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(hf_checkpoint)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidFile(
            f"--hf-checkpoint {hf_checkpoint}: its tokenizer cannot be loaded: {error}",
            field="--hf-checkpoint",
            value=hf_checkpoint,
        ) from error


def context_length(hf_checkpoint: str) -> int | None:
    """The model's longest sequence in tokens, where its config.json says one."""
    path = Path(hf_checkpoint) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    length = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    return int(length) if length else None


def reads_images(hf_checkpoint: str) -> bool:
    """Whether the model is of a family whose images are known here."""
    path = Path(hf_checkpoint) / "config.json"
    return path.is_file() and vision_of(json.loads(path.read_text())) is not None


class PromptEncoder:
    """apply_chat_template: render text prompts as one user message. Lists of messages are always rendered.

    The samples of a group have one prompt: it is encoded once. hf_checkpoint: where the processor of prompts with
    images is; it is loaded with the first of them.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        apply_chat_template: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        hf_checkpoint: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.apply_chat_template = apply_chat_template
        self.template_kwargs = dict(template_kwargs or {})
        self._hf_checkpoint = hf_checkpoint
        self._loading = threading.Lock()
        self._media: Media | None = None
        self._cache: OrderedDict[str, np.ndarray] = OrderedDict()
        self._media_cache: OrderedDict[str, MediaPrompt] = OrderedDict()

    def media(self) -> Media:
        """Raises what `Media` raises."""
        from slime.rollout.generate.media import Media

        with self._loading:
            if self._media is None:
                self._media = Media(self._hf_checkpoint)
            return self._media

    def with_media(self, sample: Sample) -> MediaPrompt:
        """Of a sample with images. Raises InvalidField naming what of them is wrong."""
        images, tools = images_of(sample.multimodal_inputs), sample.metadata.get("tools")
        key = f"{_key(sample, tools)} {images_id(images)}"
        found = self._media_cache.get(key)
        if found is None:
            media = self.media()
            found = media.prompt(self._render(media.processor, sample, tools), images)
            self._media_cache[key] = found
            if len(self._media_cache) > CACHED_MEDIA:
                self._media_cache.popitem(last=False)
        return found

    def encode(self, sample: Sample) -> np.ndarray:
        """int32 [prompt length]; not to be written to."""
        if sample.multimodal_inputs:
            return self.with_media(sample).tokens
        tools = sample.metadata.get("tools")
        key = _key(sample, tools)
        cached = self._cache.get(key)
        if cached is None:
            cached = np.asarray(self._encode(sample, tools), np.int32)
            cached.flags.writeable = False
            self._cache[key] = cached
            if len(self._cache) > CACHED_PROMPTS:
                self._cache.popitem(last=False)
        return cached

    def _encode(self, sample: Sample, tools: Any) -> list[int]:
        return self.tokenizer.encode(self._render(self.tokenizer, sample, tools), add_special_tokens=False)

    def _render(self, renderer: Any, sample: Sample, tools: Any) -> str:
        prompt = sample.prompt
        if isinstance(prompt, str) and not self.apply_chat_template:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        kwargs = self.template_kwargs | sample.apply_chat_template_kwargs
        return renderer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True, **kwargs
        )


def _key(sample: Sample, tools: Any) -> str:
    key = sample.prompt if isinstance(sample.prompt, str) else json.dumps(sample.prompt)
    if sample.apply_chat_template_kwargs or tools:
        key = json.dumps([key, sample.apply_chat_template_kwargs, tools])
    return key
