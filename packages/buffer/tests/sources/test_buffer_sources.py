from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.buffer.groups.evaluation import read_evaluation_files
from slime.buffer.settings import BufferSettings
from slime.buffer.sources.base import Columns, Prompt
from slime.buffer.sources.dataset import Cursor, Dataset, read_dataset
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, NotAvailable


def test_a_row_becomes_a_prompt(write_jsonl):
    chat = [{"role": "user", "content": "hi"}]
    path = write_jsonl(
        [
            {"input": "1+1=", "label": "2", "metadata": {"source": "sums"}},
            {"input": chat, "label": {"any": ["json"]}, "metadata": None, "tools": [{"name": "f"}]},
            {"input": "x", "label": 3, "tools": '[{"name": "g"}]'},
        ]
    )
    first, second, third = read_dataset(path, Columns(label="label")).prompts
    assert first == Prompt("1+1=", "2", {"source": "sums"})
    assert second == Prompt(chat, {"any": ["json"]}, {"tools": [{"name": "f"}]})
    assert third == Prompt("x", 3, {"tools": [{"name": "g"}]})


def test_parquet_reads_as_jsonl_does(tmp_path: Path):
    rows = [
        {"question": "a", "answer": "1", "metadata": {"k": 1}},
        {"question": "b", "answer": "2", "metadata": {"k": 2}},
    ]
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    columns = Columns(input="question", label="answer")
    assert read_dataset(str(path), columns).prompts == [Prompt("a", "1", {"k": 1}), Prompt("b", "2", {"k": 2})]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [("[2:4]", [2, 3]), ("[:2]", [0, 1]), ("[4:]", [4, 5]), ("[-2:]", [4, 5]), ("[1:-3]", [1, 2]), ("[:]", range(6))],
)
def test_a_slice_takes_rows(write_jsonl, rows, expected):
    path = write_jsonl([{"input": str(i)} for i in range(6)])
    assert [p.prompt for p in read_dataset(f"{path}@{rows}", Columns()).prompts] == [str(i) for i in expected]


def test_a_slice_does_not_read_behind_its_end(write_jsonl, tmp_path):
    path = write_jsonl([{"input": "a"}, {"input": "b"}])
    with open(path, "a") as file:
        file.write("{broken\n")
    assert len(read_dataset(f"{path}@[:2]", Columns())) == 2
    with pytest.raises(InvalidFile, match="line 3"):
        read_dataset(path, Columns())


@pytest.mark.parametrize("rows", ["[1:2:3]", "[a:b]", "[1]", "[-:]"])
def test_another_slice_is_an_error(write_jsonl, rows):
    with pytest.raises(InvalidSetting, match=r"must be PATH@\[a:b\]"):
        read_dataset(write_jsonl([{"input": "a"}]) + "@" + rows, Columns())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": "a"}\n{"input": \n', "line 2: not JSON: Expecting value at character 11"),
        ('{"input": "a"}\n\n[1]\n', r"line 3 must be a JSON object, got \[1\]"),
        ('{"prompt": "a", "label": 1}\n', "line 1: no column 'input'; it has 'prompt', 'label'"),
        ('{"input": 3}\n', "line 1: column 'input' holds 3, expected text or"),
        ('{"input": ["hi"]}\n', "expected chat messages: objects with a role"),
        ('{"input": "a", "metadata": [1]}\n', r"line 1: column 'metadata' holds \[1\], expected an object"),
        ('{"input": "a", "tools": "f"}\n', "column 'tools'"),
        (
            '{"input": "a"}\n{"input": "a", "metadata": {"k": [1, NaN]}}\n',
            r"line 2: column 'metadata' holds .*NaN.*, expected a finite number.*, got nan at metadata\.k\[1\]",
        ),
        ('{"input": "a"}\n{"input": ' + "[" * 100_000, "line 2: not JSON"),
        ('{"input": "a", "label": ' + "9" * 5000 + "}", "line 1: not JSON"),
        ("", "no rows"),
        ("\n\n", "no rows"),
    ],
)
def test_a_bad_file_names_the_place(tmp_path: Path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidFile, match=message) as error:
        read_dataset(str(path), Columns())
    assert str(error.value).startswith("--prompt-data: ") and str(path) in str(error.value)


def test_an_empty_evaluation_set_is_named_with_its_flag(tmp_path: Path):
    (tmp_path / "none.jsonl").write_text("")
    settings = BufferSettings(eval_prompt_data=["sums", f"{tmp_path}/none.jsonl"])
    with pytest.raises(InvalidFile, match="^--eval-prompt-data sums: .*none.jsonl: no rows"):
        read_evaluation_files(settings)


def test_bytes_that_are_no_text_name_the_line(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"input": "a"}\n\xff\xfe\n')
    with pytest.raises(InvalidFile, match="line 2: not UTF-8: byte 0xff at 0"):
        read_dataset(str(path), Columns())
    path.write_bytes(b"\xff\xfe{\x00")
    with pytest.raises(InvalidFile, match="line 1: not UTF-8: byte 0xff at 0"):
        read_dataset(str(path), Columns())


def test_a_mark_of_utf_8_at_the_beginning_is_no_error(tmp_path: Path):
    path = tmp_path / "marked.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"input": "\xc3\xa4"}\n')
    assert [prompt.prompt for prompt in read_dataset(str(path), Columns()).prompts] == ["ä"]


@pytest.mark.parametrize("column", ["metadata", "label"])
def test_a_row_that_no_message_can_carry_is_refused_when_the_file_is_read(write_jsonl, column):
    columns = Columns(label="label" if column == "label" else None)
    assert read_dataset(write_jsonl([{"input": "a", column: {"a": nested(100)}}]), columns)
    with pytest.raises(InvalidFile, match=f"line 1: column '{column}' holds .*, expected a tree of at most 100 levels"):
        read_dataset(write_jsonl([{"input": "a", column: {"a": nested(101)}}]), columns)


def nested(levels: int) -> list:
    return [] if levels == 1 else [nested(levels - 1)]


def test_a_damaged_parquet_is_named_or_read(tmp_path: Path):
    path = tmp_path / "p.parquet"
    rows = [{"input": f"prompt {i} " * 5, "label": str(i)} for i in range(200)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        data = bytearray(whole)
        for place in random.integers(0, len(data), 8):
            data[place] = random.integers(256)
        path.write_bytes(data)
        try:
            read_dataset(str(path), Columns(label="label"))
        except InvalidFile as error:
            refused += str(path) in str(error)
    assert refused > 100


def test_a_missing_label_names_the_row(write_jsonl):
    with pytest.raises(InvalidFile, match="line 2: no column 'label'"):
        read_dataset(write_jsonl([{"input": "a", "label": 1}, {"input": "b"}]), Columns(label="label"))


def test_columns_that_rows_may_leave_out_are_in_some_row_where_they_are_named(write_jsonl):
    path = write_jsonl([{"input": "a"}, {"input": "b", "extra": {"x": 1}}])
    assert [p.metadata for p in read_dataset(path, Columns(metadata="extra")).prompts] == [{}, {"x": 1}]
    with pytest.raises(InvalidFile, match="no row has a column 'functions'"):
        read_dataset(path, Columns(tools="functions"))
    assert len(read_dataset(path, Columns(tools="functions"), all_columns=False)) == 2


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(MissingFile, match="no such file"):
        read_dataset(str(tmp_path / "none.jsonl"), Columns())
    (tmp_path / "p.tsv").write_text("a")
    with pytest.raises(InvalidSetting, match=r"\.tsv"):
        read_dataset(str(tmp_path / "p.tsv"), Columns())
    (tmp_path / "p.parquet").write_text("no parquet")
    with pytest.raises(InvalidFile, match="not a parquet file"):
        read_dataset(str(tmp_path / "p.parquet"), Columns())


@given(size=st.integers(1, 7), counts=st.lists(st.integers(0, 20), max_size=6), shuffle=st.booleans())
def test_epochs_visit_every_prompt_once_however_they_are_cut(size, counts, shuffle):
    dataset = Dataset([Prompt(str(i)) for i in range(size)], shuffle=shuffle, seed=5)
    cursor, taken = Cursor(), []
    for count in counts:
        prompts, cursor = dataset.take(cursor, count)
        assert len(prompts) == count
        taken += [int(prompt.prompt) for prompt in prompts]
    for epoch, start in enumerate(range(0, len(taken), size)):
        order = list(range(size))
        if shuffle:
            random.Random(5 + epoch).shuffle(order)
        part = taken[start : start + size]
        assert part == order[: len(part)]
    assert cursor.epoch * size + cursor.offset == sum(counts)


def test_parquet_without_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        NotAvailable, match=r'rows.parquet requires the package pyarrow: pip install "slime-buffer\[parquet\]"'
    ):
        read_dataset(str(tmp_path / "rows.parquet"), Columns())
