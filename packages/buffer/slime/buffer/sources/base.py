"""Prompts, and the conversion of a prompt file's rows to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.buffer.sources.media import Image, with_images
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidFile
from slime.types.models.vision import IMAGE
from slime.types.sample.validate import check_finite
from slime.types.wire.json_fields import SHALLOW, is_utf8, too_deep


@dataclass
class Prompt:
    """A prompt of the data. prompt: text or chat messages; label: any JSON value or None; metadata: a JSON object;
    images: the images that stand in the prompt, in order."""

    prompt: str | list[dict[str, Any]]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    images: list[Image] = field(default_factory=list)

    def to_sample(self) -> Sample:
        """Returns a sample that starts from this prompt. Raises InvalidFile if an image's file is gone."""
        media = {IMAGE: [image.read() for image in self.images]} if self.images else None
        return Sample(prompt=self.prompt, label=self.label, metadata=self.metadata, multimodal_inputs=media)


@dataclass(frozen=True)
class Columns:
    """Names of the columns of a prompt file."""

    input: str = "input"
    label: str | None = None
    metadata: str = "metadata"
    tools: str = "tools"
    # None: `<image>` in a prompt is ordinary text.
    images: str | None = field(default=None, repr=False)

    @property
    def identity(self) -> str:
        return repr(self) if self.images is None else f"{self!r}, images {self.images!r}"


def prompt_of_row(row: Mapping[str, Any], columns: Columns, *, path: str, where: str) -> Prompt:
    """Converts a row. Raises InvalidFile naming the file, the row, the column and the expected value.

    path: the prompt file. where: names the row in errors, as `RowReader` does.
    """

    def invalid(column: str, value: Any, expected: str) -> InvalidFile:
        return InvalidFile(
            f"{path}, {where}: column {column!r} holds {json.dumps(value, default=str)[:120]}, expected {expected}",
            field=column,
            value=value,
            expected=expected,
        )

    def required(column: str) -> Any:
        if column not in row:
            raise InvalidFile(
                f"{path}, {where}: no column {column!r}; it has {', '.join(map(repr, row)) or 'none'}",
                field=column,
                value=list(row),
                expected=f"a column {column!r}",
            )
        return row[column]

    prompt = required(columns.input)
    if isinstance(prompt, list):
        if not prompt or not all(isinstance(message, dict) and "role" in message for message in prompt):
            raise invalid(columns.input, prompt, "chat messages: objects with a role")
    elif not isinstance(prompt, str):
        raise invalid(columns.input, prompt, "text or a list of chat messages")
    images: list[Image] = []
    if columns.images is not None:
        column = columns.images
        prompt, images = with_images(
            prompt,
            row.get(column),
            base=Path(path).parent,
            where=f"{path}, {where}: column {column!r}",
            refuse=lambda value, expected: invalid(column, value, expected),
        )
    label = None if columns.label is None else required(columns.label)
    metadata = row.get(columns.metadata)
    if metadata is not None and not isinstance(metadata, dict):
        raise invalid(columns.metadata, metadata, "an object")
    metadata = dict(metadata or {})
    tools = row.get(columns.tools)
    if tools is not None:
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except (ValueError, RecursionError):
                raise invalid(columns.tools, tools, "a list of tool definitions, or that list as JSON text") from None
        if not isinstance(tools, list):
            raise invalid(columns.tools, tools, "a list of tool definitions")
        metadata["tools"] = tools
    for name, value in ((columns.input, prompt), (columns.label, label), (columns.metadata, metadata)):
        if not isinstance(value, str) and too_deep(value):
            raise invalid(str(name), value, f"a tree of {SHALLOW}")
        try:
            check_finite(str(name), value)
        except InvalidField as error:
            raise invalid(str(name), value, f"{error.expected}, got {error.value} at {error.field}") from None
    for name, value in ((columns.input, prompt), (columns.label, label)):
        if not is_utf8(value):
            raise invalid(str(name), value, "text that UTF-8 can hold, without halves of surrogate pairs")
    return Prompt(prompt, label, metadata, images)
