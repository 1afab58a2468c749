"""Readers of prompt files, chosen by the ending of the file's name; each yields rows one by one."""

from __future__ import annotations

import csv
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from slime.types.errors import InvalidFile, InvalidSetting, NotAvailable, counted
from slime.types.files import json_reason

# Largest CSV cell, in characters: some prompts exceed the csv module's own limit of 131,072.
MOST_CHARACTERS = 1 << 30
# The package that reads prompts unless a caller names another one.
BUFFER = "slime-buffer"


class RowReader(Protocol):
    """Yields (where, row): `where` names the row in an error message, `line 7` or `row 6`.

    Raises MissingFile, or InvalidFile naming the row that cannot be read.
    """

    def __call__(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]: ...


def read_jsonl(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("line N", row), N from 1. Raises InvalidFile naming the line that is not a JSON object."""
    with open(path, "rb") as file:
        yield from _rows(path, file)


def read_jsonl_gz(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads a gzip-compressed file as `read_jsonl` does. Raises InvalidFile also for a damaged file."""
    try:
        with gzip.open(path, "rb") as file:
            yield from _rows(path, file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidFile(f"{path}: not gzip, or damaged: {error}", value=path, expected="a gzip file") from None


def _rows(path: str, lines: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        try:
            # Decoded here, because json.loads reads a line that begins with ff fe as UTF-16.
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidFile(
                f"{path}, line {number}: not UTF-8: byte {line[error.start]:#04x} at {error.start}",
                field=f"line {number}",
                value=line[:80],
                expected="a JSON object in UTF-8",
            ) from None
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # also for numbers of thousands of digits, and deep lists
            raise InvalidFile(
                f"{path}, line {number}: not JSON: {json_reason(error)}",
                field=f"line {number}",
                value=line[:80].decode("utf-8", "replace").rstrip(),
                expected="a JSON object",
            ) from None
        if not isinstance(row, dict):
            raise InvalidFile.must_be(f"{path}, line {number}", "a JSON object", got=row)
        yield f"line {number}", row


def read_json(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("row N", row), N from 0, of a list of objects; a file of one object per line is read as .jsonl.

    Raises InvalidFile.
    """
    with open(path, "rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        if start.startswith(b"{"):
            yield from read_jsonl(path)
            return
        file.seek(0)
        content = file.read()
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidFile(f"{path}: not JSON: {error}", value=path, expected="a list of objects") from None
    if not isinstance(rows, list):
        raise InvalidFile.must_be(path, "a list of objects, or one object per line", got=rows)
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InvalidFile.must_be(f"{path}, row {number}", "a JSON object", got=row)
        yield f"row {number}", row


def read_csv(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("line N", row), N from 2: the first line names the columns, and every value is text.

    Raises InvalidFile naming the line.
    """
    line = 1
    # The limit belongs to the process; readers have none of their own.
    csv.field_size_limit(max(MOST_CHARACTERS, csv.field_size_limit()))
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            names = next(rows, [])
            if len(set(names)) < len(names):
                raise InvalidFile.must_be(f"{path}, line 1", "names of columns, each once", got=names)
            line = rows.line_num + 1
            for cells in rows:
                if cells and len(cells) != len(names):
                    raise InvalidFile.must_be(f"{path}, line {line}", counted(len(names), "cell"), got=len(cells))
                if cells:
                    yield f"line {line}", dict(zip(names, cells, strict=True))
                line = rows.line_num + 1
    except csv.Error as error:
        raise InvalidFile(f"{path}, line {line}: not CSV: {error}", value=path, expected="CSV in UTF-8") from None
    except UnicodeDecodeError as error:
        # The file is decoded in blocks, and this one may begin lines after the last row.
        line, byte = _first_undecodable(path) or (line, error.object[error.start])
        raise InvalidFile(
            f"{path}, line {line}: not UTF-8: byte 0x{byte:02x}", value=path, expected="CSV in UTF-8"
        ) from None


def _first_undecodable(path: str) -> tuple[int, int] | None:
    """Returns the line, from 1, and the byte at which a file is not UTF-8."""
    with open(path, "rb") as file:
        for line, text in enumerate(file, start=1):
            try:
                text.decode("utf-8")
            except UnicodeDecodeError as error:
                return line, text[error.start]
    return None


def read_parquet(path: str, package: str = BUFFER) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("row N", row), N from 0.

    Raises InvalidFile if the file is not a parquet file, NotAvailable without pyarrow, which an extra of `package`
    installs.
    """
    # Importing pyarrow takes a third of a second, and most runs read jsonl.
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise NotAvailable.not_installed(path, "pyarrow", f"{package}[parquet]") from error

    try:
        # Pre-buffering keeps all columns of the file in memory until its last row is read.
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
        rows = (row for batch in file.iter_batches(batch_size=1024) for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"row {number}", row
    # Damaged pages also raise errors of Python's own, or decode to invalid text.
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InvalidFile(
            f"{path}: not a parquet file, or damaged: {error}", value=path, expected="a parquet file"
        ) from None


READERS: Mapping[str, RowReader] = {
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl_gz,
    ".json": read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
ENDINGS = ", ".join(list(READERS)[:-1]) + f" or {list(READERS)[-1]}"


def reader_of(path: str | os.PathLike[str], flag: str, package: str = BUFFER) -> RowReader:
    """Returns the reader for the ending of `path`. Raises InvalidSetting for another ending.

    package: the package whose extra the error for a missing pyarrow names.
    """
    name = os.fspath(path).lower()
    for ending, read in READERS.items():
        if name.endswith(ending):
            return partial(read_parquet, package=package) if read is read_parquet else read
    raise InvalidSetting.must_be(flag, f"a file that ends in {ENDINGS}", got=os.fspath(path))
