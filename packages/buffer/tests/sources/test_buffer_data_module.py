"""`slime.utils.data`: prompt files as plug-ins written for slime read them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from slime.types.errors import InvalidSetting
from slime.utils.data import Dataset, filter_long_prompt, read_file

NUM_GPUS = 0


class Letters:
    """A tokenizer whose tokens are letters."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True, "thinking": False}
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


@pytest.fixture
def path(tmp_path: Path) -> str:
    rows = [{"text": "q" * (i + 1), "answer": i, "metadata": {"row": i}} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(("rows", "answers"), [("", [0, 1, 2, 3, 4, 5]), ("@[1:3]", [1, 2]), ("@[-2:]", [4, 5])])
def test_rows_of_a_file_and_of_a_slice_of_it(path: str, rows: str, answers: list[int]) -> None:
    assert [row["answer"] for row in read_file(path + rows)] == answers


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"a file that ends in .jsonl, .jsonl.gz, .json, .csv or .parquet"):
        list(read_file("rows.tsv"))


def test_samples_of_a_file_without_prompts_that_are_too_long(path: str) -> None:
    dataset = Dataset(path, Letters(), None, 4, label_key="answer")
    assert [(s.prompt, s.label, s.metadata) for s in (dataset[0], dataset[3])] == [
        ("q", 0, {"row": 0}), ("qqqq", 3, {"row": 3}),
    ]  # fmt: skip
    assert len(dataset) == 4


def test_prompts_are_rendered_by_the_chat_template(path: str) -> None:
    options = {"apply_chat_template": True, "apply_chat_template_kwargs": {"thinking": False}}
    dataset = Dataset(path + "@[1:2]", Letters(), None, None, **options)
    assert dataset[0].prompt == "<user>qq<assistant>"


def test_an_epoch_has_an_order_of_its_own(path: str) -> None:
    dataset = Dataset(path, Letters(), None, None, label_key="answer", seed=3)
    dataset.shuffle(1)
    expected = list(range(6))
    random.Random(4).shuffle(expected)
    assert [sample.label for sample in dataset.samples] == expected
    dataset.shuffle(2)
    assert [sample.label for sample in dataset.samples] != expected
    dataset.shuffle(1)
    assert [sample.label for sample in dataset.samples] == expected


def test_chat_messages_are_not_counted() -> None:
    from slime.types import Sample

    messages = Sample(prompt=[{"role": "user", "content": "long"}])
    assert filter_long_prompt([messages, Sample(prompt="long")], Letters(), None, 2) == [messages]
