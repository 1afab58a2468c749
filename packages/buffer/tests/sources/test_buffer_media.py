"""Rows with images, and chat messages of clients that carry images."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest

from slime.buffer.groups.prompts import prompt_of_message
from slime.buffer.settings import BufferSettings
from slime.buffer.sources.base import Columns, Prompt
from slime.buffer.sources.dataset import read_dataset
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidFile, InvalidSetting, NotAvailable
from slime.v1 import buffer_pb2

COLUMNS = Columns(images="images")


def png(colour: str) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), colour).save(file, "PNG")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def uri(content: bytes) -> str:
    return f"data:image/png;base64,{text(content)}"


def read(directory: Path, row: Any, columns: Columns = COLUMNS) -> Prompt:
    (directory / "red.png").write_bytes(RED)
    file = directory / "data.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (prompt,) = read_dataset(str(file), columns).prompts
    return prompt


def test_placeholders_become_items_of_messages_and_images_bytes_of_the_sample(tmp_path: Path) -> None:
    sample = read(tmp_path, {"input": "a<image>b<image>", "images": ["red.png", uri(BLUE)]}).to_sample()
    assert sample == Sample(
        prompt=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"},
                ],
            }
        ],
        multimodal_inputs={"image": [RED, BLUE]},
    )  # fmt: skip


@pytest.mark.parametrize("value", ["red.png", ["red.png"], text(RED), uri(RED), {"path": "red.png", "bytes": None}])
def test_an_image_is_a_path_or_base64_alone_or_in_a_list(tmp_path: Path, value: Any) -> None:
    assert read(tmp_path, {"input": "<image>", "images": value}).to_sample().multimodal_inputs == {"image": [RED]}


def test_images_of_a_conversation_go_to_its_turns_in_order(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": "<image>"},
        {"role": "user", "content": [{"type": "text", "text": "and <image>"}, {"type": "image"}]},
    ]
    prompt = read(tmp_path, {"input": messages, "images": [uri(RED), uri(BLUE), "red.png"]})
    assert isinstance(prompt.prompt, list) and prompt.prompt[0] == messages[0]
    assert [item["type"] for item in prompt.prompt[2]["content"]] == ["text", "image", "image"]
    assert prompt.to_sample().multimodal_inputs == {"image": [RED, BLUE, RED]}


def test_rows_without_images_stay_what_they_are(tmp_path: Path) -> None:
    for images in ({}, {"images": None}, {"images": []}):
        assert read(tmp_path, {"input": "text"} | images) == Prompt("text")
    # Without the flag, `<image>` is ordinary text.
    assert read(tmp_path, {"input": "<image>"}, Columns()) == Prompt("<image>")


def test_parquet_has_bytes(tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"
    rows = [{"input": "<image>", "images": [{"bytes": RED, "path": None}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    (prompt,) = read_dataset(str(file), COLUMNS).prompts
    assert prompt.to_sample().multimodal_inputs == {"image": [RED]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "<image><image>", "images": ["red.png"]}, '"1 image", expected 2, one for each <image>'),
        ({"input": "none", "images": ["red.png"]}, '"1 image", expected 0'),
        ({"input": "<image>"}, '"0 images", expected 1'),
        ({"input": "<image>", "images": "blue.png"}, "expected an image file at .*blue.png"),
        ({"input": "<image>", "images": "https://example.org/a.png"}, "addresses are not fetched"),
        ({"input": "<image>", "images": "file:///tmp/a.png"}, "addresses are not fetched"),
        ({"input": "<image>", "images": text(b"no image" * 20)}, "an image that can be decoded"),
        ({"input": "<image>", "images": "data.jsonl"}, "an image that can be decoded"),
        ({"input": "<image>", "images": "data:text/plain,hi"}, "expected an image file|expected a path|data:"),
        ({"input": "<image>", "images": [3]}, "expected a path, base64, bytes"),
    ],
)
def test_what_is_wrong_with_an_image_names_its_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(InvalidFile, match=rf"data.jsonl, line 1: column 'images'.*({message})"):
        read(tmp_path, row)


def test_an_image_that_is_gone_by_the_time_it_is_needed_is_named(tmp_path: Path) -> None:
    prompt = read(tmp_path, {"input": "<image>", "images": "red.png"})
    (tmp_path / "red.png").unlink()
    with pytest.raises(InvalidFile, match=r"line 1: column 'images'\[0\]: .*red.png: No such file"):
        prompt.to_sample()


def test_another_column_of_images_is_another_set_of_prompts(tmp_path: Path) -> None:
    row = {"input": "text"}
    read(tmp_path, row)
    file = str(tmp_path / "data.jsonl")
    plain, other = (read_dataset(file, columns).identity for columns in (Columns(), COLUMNS))
    assert plain != other


@pytest.mark.parametrize(
    ("keys", "error"),
    [({"video": "clips"}, NotAvailable), ({"audio": "sounds"}, NotAvailable), ({"picture": "images"}, InvalidSetting),
     ({"image": ""}, InvalidSetting), ({"image": 3}, InvalidSetting)],
)  # fmt: skip
def test_other_kinds_of_media_are_refused_by_name(keys: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="--multimodal-keys"):
        BufferSettings(multimodal_keys=keys)


def message(*items: Any) -> buffer_pb2.Prompt:
    return buffer_pb2.Prompt(messages_json=json.dumps([{"role": "user", "content": list(items)}]))


def test_messages_of_clients_bring_their_images() -> None:
    given = message(
        {"type": "image", "image": uri(RED)},
        {"type": "text", "text": "and <image>"},
        {"type": "image_url", "image_url": {"url": uri(BLUE)}},
    )
    sample = prompt_of_message(given, 0).to_sample()
    assert sample.multimodal_inputs == {"image": [RED, BLUE]}
    assert sample.prompt[0]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "and <image>"},
        {"type": "image"},
    ]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "image"},
        {"type": "image", "image": "red.png"},
        {"type": "image_url", "image_url": {"url": "http://a/b"}},
    ],
)
def test_images_of_clients_are_in_the_message_and_nowhere_else(item: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=r"prompts\[0\].messages_json"):
        prompt_of_message(message(item), 0)
