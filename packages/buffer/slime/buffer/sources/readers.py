"""Readers of prompt files: the rows of a jsonl or a parquet file, one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from slime.types.errors import InvalidFile, NotAvailable


class RowReader(Protocol):
    """Yields (where, row): `where` names the row in an error message, `line 7` or `row 6`.

    Raises MissingFile, or InvalidFile naming the row that cannot be read.
    """

    def __call__(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]: ...


def read_jsonl(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("line N", row), N from 1; skips blank lines. Raises InvalidFile naming a line that is no JSON object."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                # Left to json.loads, a line that begins with ff fe would be UTF-16.
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
                    f"{path}, line {number}: not JSON: {error}",
                    field=f"line {number}",
                    value=line[:80].decode("utf-8", "replace").rstrip(),
                    expected="a JSON object",
                ) from None
            if not isinstance(row, dict):
                raise InvalidFile.must_be(f"{path}, line {number}", "a JSON object", got=row)
            yield f"line {number}", row


def read_parquet(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("row N", row), N from 0.

    Raises InvalidFile where the file is no parquet, NotAvailable without pyarrow.
    """
    # Importing pyarrow takes a third of a second, and most runs read jsonl.
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise NotAvailable.not_installed(path, "pyarrow", "slime-buffer[parquet]") from error

    try:
        file = pyarrow.parquet.ParquetFile(path)
        rows = (row for batch in file.iter_batches(batch_size=1024) for row in batch.to_pylist())
        for number, row in enumerate(rows):
            yield f"row {number}", row
    # Damaged pages show as errors of Python too, and as text that is none.
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise InvalidFile(
            f"{path}: not a parquet file, or damaged: {error}", value=path, expected="a parquet file"
        ) from None


# By the ending of the file's name.
READERS: dict[str, RowReader] = {".jsonl": read_jsonl, ".parquet": read_parquet}
