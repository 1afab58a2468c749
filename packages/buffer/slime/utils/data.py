"""Compatibility: `slime.utils.data`, prompt files as the samples of an in-process data source.

It is in slime-buffer, which reads prompt files without the other packages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from slime.buffer.sources.base import Columns
from slime.buffer.sources.dataset import read_dataset
from slime.types import Sample
from slime.types.models.vision import IMAGE
from slime.types.prompt_files.readers import reader_of
from slime.types.prompt_files.slices import split_slice

__all__ = ["Dataset", "filter_long_prompt", "read_file"]


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a prompt file; `PATH@[a:b]` takes a slice of them.

    Raises MissingFile, InvalidFile for a row that cannot be read, InvalidSetting for another ending.
    """
    file, rows = split_slice(path)
    read = (row for _, row in reader_of(file, "path")(file))
    if all(bound is None or bound >= 0 for bound in (rows.start, rows.stop)):
        yield from islice(read, rows.start, rows.stop)
    else:
        yield from list(read)[rows]


def filter_long_prompt(
    origin_samples: Sequence[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """Returns the samples whose prompts have at most `max_length` tokens, in order; chat messages are not counted."""
    return [
        sample
        for sample in origin_samples
        if max_length is None
        or not isinstance(sample.prompt, str)
        or len(tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]) <= max_length
    ]


class PromptFile:
    """The prompts of a file as samples, in the order of an epoch.

    samples: in the order of the last `shuffle`; origin_samples: in that of the file.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: Mapping[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """apply_chat_template: render prompts with the tokenizer's chat template. Raises what `read_dataset` raises."""
        images = (multimodal_keys or {}).get(IMAGE)
        columns = Columns(prompt_key, label_key, metadata_key, tool_key or Columns.tools, images)
        samples = [prompt.to_sample() for prompt in read_dataset(path, columns, all_columns=False).prompts]
        if apply_chat_template:
            for sample in samples:
                renderer = processor if images and processor else tokenizer
                sample.prompt = _rendered(sample, renderer, apply_chat_template_kwargs)
        self.origin_samples = filter_long_prompt(samples, tokenizer, processor, max_length)
        self.samples = self.origin_samples
        self.seed = seed
        self.epoch_id = -1

    def shuffle(self, new_epoch_id: int) -> None:
        """Puts `samples` into the order of an epoch, which depends on the seed and the epoch alone."""
        if new_epoch_id == self.epoch_id:
            return
        self.samples = list(self.origin_samples)
        random.Random(self.seed + new_epoch_id).shuffle(self.samples)
        self.epoch_id = new_epoch_id

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.origin_samples)


# The name that code written for slime imports.
Dataset = PromptFile


def _rendered(sample: Sample, renderer: Any, kwargs: Mapping[str, Any] | None) -> str:
    prompt = sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    tools = sample.metadata.get("tools")
    options = {"tokenize": False, "add_generation_prompt": True, **(kwargs or {})}
    return str(renderer.apply_chat_template(messages, tools=tools, **options))
