"""Rows of a jsonl file: one JSON object a line, blank lines skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from slime.types.errors import InvalidFile


def read_jsonl(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields ("line N", row), N from 1. Raises InvalidFile naming the line that is no JSON object."""
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
