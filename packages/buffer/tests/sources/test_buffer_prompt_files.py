"""Prompt files of every ending give the same prompts, and a broken one names its place."""

from __future__ import annotations

import csv
import gzip
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.buffer.sources.base import Columns, Prompt
from slime.buffer.sources.dataset import read_dataset
from slime.types.errors import InvalidFile
from slime.types.prompt_files.readers import READERS, read_csv, read_parquet

ROWS = [{"input": f'Say {i}, ü\n"twice"', "label": str(i)} for i in range(5)]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name.endswith(".jsonl"):
        path.write_text(lines)
    elif path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=1))
    elif path.name.endswith(".csv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("ending", READERS)
def test_every_ending_gives_the_same_prompts(ending: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"rows{ending}", ROWS)
    columns = Columns(label="label")
    assert read_dataset(str(path), columns).prompts == [Prompt(row["input"], row["label"]) for row in ROWS]
    assert [p.label for p in read_dataset(f"{path}@[1:3]", columns).prompts] == ["1", "2"]
    assert [p.label for p in read_dataset(f"{path}@[-1:]", columns).prompts] == ["4"]


def test_a_json_file_may_hold_an_object_per_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.json"
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in ROWS))
    assert len(read_dataset(str(path), Columns())) == len(ROWS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"input": "x"}, 3]', "row 1 must be a JSON object, got 3"),
        ("a.json", b"3", "must be a list of objects, or one object per line, got 3"),
        ("a.json", b"[{]", "not JSON"),
        ("a.json", b"[" * 100_000, "not JSON"),
        ("a.json", b'{"input": [\n', "line 1: not JSON"),
        ("a.json", b"[]", "no rows"),
        ("a.json", b"\xff", "not JSON"),
        ("a.csv", b"", "no rows"),
        ("a.csv", b"input,label\nx\n", "line 2 must be 2 cells, got 1"),
        ("a.csv", b'input,label\n"x\ny",1\nx,1,2\n', "line 4 must be 2 cells, got 3"),
        ("a.csv", b"input,input\nx,y\n", "line 1 must be names of columns, each once"),
        ("a.csv", b'input\n"x" y\n', "line 2: not CSV"),
        ("a.csv", b"input\n\xff\n", "line 2: not UTF-8"),
        ("a.csv", b"prompt\nx\n", "line 2: no column 'input'; it has 'prompt'"),
        ("a.jsonl.gz", b'{"input": "x"}\n', "not gzip, or damaged"),
        ("a.jsonl.gz", gzip.compress(b'{"input": "x"}\n' * 9, mtime=0)[:-9], "not gzip, or damaged"),
        ("a.jsonl.gz", gzip.compress(b'{"input": "x"}\n[]', mtime=0), "line 2 must be a JSON object"),
    ],
)
def test_a_broken_file_names_the_place(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidFile, match=message) as error:
        read_dataset(str(tmp_path / name), Columns())
    assert str(tmp_path / name) in str(error.value)


def test_a_cell_may_be_longer_than_the_limit_of_the_csv_library(tmp_path: Path) -> None:
    limit = 131_072
    (tmp_path / "a.csv").write_text("input\n" + "x" * (2 * limit) + "\n")
    assert len(dict(read_csv(str(tmp_path / "a.csv")))["line 2"]["input"]) == 2 * limit


def test_a_parquet_file_is_read_in_a_part_of_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"input": [random.Random(n).randbytes(2_000).hex() for n in range(4_096)]})
    pyarrow.parquet.write_table(table, path, row_group_size=256, compression="none", use_dictionary=False)
    del table
    before = pyarrow.total_allocated_bytes()
    held = [pyarrow.total_allocated_bytes() - before for n, _ in enumerate(read_parquet(str(path))) if n % 256 == 0]
    assert len(held) == 16 and max(held) < path.stat().st_size / 2


@given(rows=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1))
def test_any_text_survives_csv(rows: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["input", "n"], *([text, str(n)] for n, text in enumerate(rows))])
    assert [row["input"] for _, row in read_csv(str(path))] == rows


@pytest.mark.parametrize("rows_before", [2, 5000])
def test_csv_in_another_encoding_is_refused_with_the_line(rows_before: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"input\n" + b"x\n" * rows_before + b"caf\xe9\n")
    with pytest.raises(InvalidFile, match=f"rows.csv, line {rows_before + 2}: not UTF-8: byte 0xe9$"):
        list(read_csv(str(path)))


def test_a_slice_behind_any_end_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"input": "x"}\n')
    with pytest.raises(InvalidFile, match="no rows"):
        read_dataset(f"{tmp_path}/p.jsonl@[99999999999999999999999:]", Columns())
    assert len(read_dataset(f"{tmp_path}/p.jsonl@[:99999999999999999999999]", Columns())) == 1
