"""Renders and tokenizes prompts with the tokenizer of the checkpoint.

With `--apply-chat-template` a prompt is rendered when its group is taken for an iteration: from then on
`sample.prompt` is the text that the model gets, and `sample.prompt_messages` has the messages behind it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from slime.rollout.chat import template
from slime.rollout.doors.workers import Workers
from slime.types import Sample
from slime.types.models.vision import images_id, images_of

if TYPE_CHECKING:
    from slime.rollout.prompts.media import Media, MediaPrompt

T = TypeVar("T")

CACHED_PROMPTS = 4096
# Fewer, because each holds the pixels of its images.
CACHED_MEDIA = 64


class PromptEncoder:
    """Renders and tokenizes prompts. apply_chat_template: render text prompts as one user message. Lists of messages
    are always rendered for the model; without the setting `sample.prompt` stays the list. Thread-safe.

    The samples of a group have one prompt: it is rendered and encoded once. hf_checkpoint: where the processor of
    prompts with images is; it is loaded with the first of them.
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
        self._caching = threading.Lock()
        self._workers = Workers("prompts")
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._cache: OrderedDict[str, np.ndarray] = OrderedDict()
        self._media_cache: OrderedDict[str, MediaPrompt] = OrderedDict()

    def render(self, samples: Iterable[Sample]) -> None:
        """Renders prompts that are not rendered yet: `prompt` becomes the text, `prompt_messages` keeps the messages.

        Does nothing without `apply_chat_template`.
        """
        if not self.apply_chat_template:
            return
        for sample in samples:
            if not _is_rendered(sample):
                text = self._text(sample)
                sample.prompt_messages = _messages(sample.prompt)  # type: ignore[attr-defined]
                sample.prompt = text

    async def prepare(self, samples: Iterable[Sample]) -> None:
        """Renders, off the event loop, the prompts that `render` and `encode` would have to render.

        Raises DeadlineExceeded if that takes too long: a template is a program, which may not end.
        """
        todo = [
            s for s in samples if not isinstance(s.prompt, str) or (self.apply_chat_template and not _is_rendered(s))
        ]
        todo = [s for s in todo if s.multimodal_inputs or self._key(s) not in self._texts]
        if todo:
            await self._workers.run("prompt", lambda: [self._text(sample) for sample in todo])

    def media(self) -> Media:
        """Returns the processor of images, loaded on the first call. Raises what `Media` raises."""
        from slime.rollout.prompts.media import Media

        with self._loading:
            if self._media is None:
                self._media = Media(self._hf_checkpoint)
            return self._media

    def with_media(self, sample: Sample) -> MediaPrompt:
        """Encodes the prompt of a sample with images. Raises InvalidField for images that cannot be used."""
        images = images_of(sample.multimodal_inputs)
        text = self._text(sample)
        return self._once(
            self._media_cache, f"{text} {images_id(images)}", CACHED_MEDIA, lambda: self.media().prompt(text, images)
        )

    def encode(self, sample: Sample) -> np.ndarray:
        """Returns the token ids of the prompt, int32 [prompt length], read-only."""
        if sample.multimodal_inputs:
            return self.with_media(sample).tokens
        text = self._text(sample)
        return self._once(self._cache, text, CACHED_PROMPTS, lambda: self._encode(text))

    def _encode(self, text: str) -> np.ndarray:
        ids = np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)
        ids.flags.writeable = False
        return ids

    def _text(self, sample: Sample) -> str:
        """Returns the text that the model gets."""
        prompt = sample.prompt
        if isinstance(prompt, str) and (not self.apply_chat_template or _is_rendered(sample)):
            return prompt
        tools = sample.metadata.get("tools")
        kwargs = self.template_kwargs | sample.apply_chat_template_kwargs
        renderer = self.media().processor if sample.multimodal_inputs else self.tokenizer

        return self._once(
            self._texts,
            self._key(sample),
            CACHED_PROMPTS,
            lambda: template.apply(renderer, _messages(prompt), tools or None, kwargs),
        )

    def _key(self, sample: Sample) -> str:
        inputs = sample.prompt, sample.apply_chat_template_kwargs, sample.metadata.get("tools")
        return json.dumps([*inputs, bool(sample.multimodal_inputs)])

    def _once(self, cache: OrderedDict[str, T], key: str, limit: int, make: Callable[[], T]) -> T:
        value = cache.get(key)
        if value is None:
            value = make()
            with self._caching:
                cache[key] = value
                if len(cache) > limit:
                    cache.popitem(last=False)
        return value


def _is_rendered(sample: Sample) -> bool:
    return "prompt_messages" in sample.__dict__


def _messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def unrendered(sample: Sample) -> str | list[dict[str, Any]]:
    """Returns the prompt as the data had it: text where it is one message of the user."""
    if not _is_rendered(sample):
        return sample.prompt
    messages = sample.prompt_messages  # type: ignore[attr-defined]
    alone = len(messages) == 1 and messages[0].get("role") == "user" and isinstance(messages[0].get("content"), str)
    return messages[0]["content"] if alone else messages
