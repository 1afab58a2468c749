"""Reads the images of a prompt, from a column or from chat messages, into `multimodal_inputs` of a sample.

An image is a path relative to the data file, `data:image/...;base64,...`, bare base64, bytes, or {"bytes", "path"} as
in parquet files. URLs are refused: nothing is downloaded for a row of data.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.types.errors import InvalidFile, InvalidSetting, NotAvailable, SlimeError, counted
from slime.types.models.vision import IMAGE

PLACEHOLDER = "<image>"
PLANNED = ("audio", "video")
EXPECTED = "a path, base64, bytes, or an object of bytes and path"
# A shorter text is reported as a path that does not exist.
SHORTEST_BASE64 = 64
_ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")

# (value, expected) -> the error, which names the place of the value.
Refuse = Callable[[Any, str], SlimeError]


@dataclass(frozen=True)
class Image:
    """An encoded image: bytes, or a file that is read when its prompt is used. where: names the image in errors."""

    where: str
    content: bytes | Path

    def read(self) -> bytes:
        """Returns the encoded image. Raises InvalidFile if its file is gone."""
        if isinstance(self.content, bytes):
            return self.content
        try:
            return self.content.read_bytes()
        except OSError as error:
            raise InvalidFile(f"{self.where}: {self.content}: {error.strerror}", value=str(self.content)) from error


def check_keys(keys: Mapping[str, Any]) -> None:
    """Checks --multimodal-keys. Raises NotAvailable for kinds that are planned, InvalidSetting for unknown ones."""
    flag = "--multimodal-keys"
    for kind, column in keys.items():
        if kind in PLANNED:
            raise NotAvailable.unavailable(f"{flag} {kind}", f"the only kind is {IMAGE}")
        if kind != IMAGE or not isinstance(column, str) or not column:
            raise InvalidSetting.must_be(flag, f"{IMAGE!r} and the name of a column", got={kind: column})


def with_images(
    prompt: str | list[dict[str, Any]], value: Any, *, base: Path, where: str, refuse: Refuse
) -> tuple[str | list[dict[str, Any]], list[Image]]:
    """Returns (the prompt as chat messages with image items, the images); without images, the prompt as it is.

    value: the column's value: an image, a list of images, or None. base: directory of relative paths.
    Raises the error of `refuse` for an image that cannot be used, and if there is not one image per placeholder.
    """
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    images = [_image(item, f"{where}[{i}]", base, refuse) for i, item in enumerate(values)]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    rendered = [message | {"content": list(_items(message.get("content")))} for message in messages]
    rendered = [
        new if any(_is_image(item) for item in new["content"]) else old
        for old, new in zip(messages, rendered, strict=True)
    ]
    count = sum(_is_image(item) for message in rendered for item in _parts(message))
    if count != len(images):
        raise refuse(counted(len(images), "image"), f"{count}, one for each {PLACEHOLDER} of the prompt")
    return (rendered, images) if images else (prompt, [])


def images_in_messages(
    messages: Sequence[dict[str, Any]], *, where: str, refuse: Refuse
) -> tuple[list[dict[str, Any]], list[Image]]:
    """Returns (messages without the data of their images, the images), for items {"type": "image", "image": data} and
    {"type": "image_url", "image_url": {"url": data}} with data as base64. Raises the error of `refuse` for others."""
    images: list[Image] = []
    stripped = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            items: list[Any] = []
            for item in content:
                if not _is_image(item):
                    items.append(item)
                    continue
                data = item.get(item["type"])
                data = data.get("url") if isinstance(data, dict) else data
                images.append(_image(data, f"{where}: image {len(images)}", None, refuse))
                items.append({"type": IMAGE})
            message = message | {"content": items}
        stripped.append(message)
    return stripped, images


def _items(content: Any) -> Iterator[Any]:
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            yield part
            continue
        for piece in re.split(f"({PLACEHOLDER})", text):
            if piece:
                yield {"type": IMAGE} if piece == PLACEHOLDER else {"type": "text", "text": piece}


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_image(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") in (IMAGE, "image_url")


def _image(value: Any, where: str, base: Path | None, refuse: Refuse) -> Image:
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        value = value.get("bytes") or value["path"]
    if isinstance(value, str):
        value = _decode_text(value, base, refuse)
    if not isinstance(value, (bytes, Path)) or not value:
        raise refuse(value, EXPECTED)
    _check(value, refuse)
    return Image(where, value)


def _decode_text(text: str, base: Path | None, refuse: Refuse) -> bytes | Path:
    if _ADDRESS.match(text):
        raise refuse(text, f"{EXPECTED}: addresses are not fetched")
    path = None if base is None or text.startswith("data:") else base / text
    if path is not None and len(text) < 4096 and path.is_file():
        return path
    head, comma, encoded = text.partition(",") if text.startswith("data:") else ("", "", text)
    if (comma and not head.endswith(";base64")) or (path is not None and len(text) < SHORTEST_BASE64):
        raise refuse(text, f"an image file at {path}" if path is not None else "data:image/...;base64,...")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise refuse(text, EXPECTED if path is None else f"an image file at {path}, or base64") from None


def _check(content: bytes | Path, refuse: Refuse) -> None:
    """Raises the error of `refuse` if the header of the image cannot be read."""
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(content) if isinstance(content, bytes) else content):
            return
    except (OSError, ValueError, PIL.Image.DecompressionBombError) as error:
        found = f"{len(content)} bytes" if isinstance(content, bytes) else str(content)
        raise refuse(found, f"an image that can be decoded ({error})") from None
