"""The output of `slime-rollout generate`: groups are kept beside it as they complete, until all of them are there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from slime.types import Sample
from slime.types.directories import path_errors
from slime.types.errors import InvalidSetting, NotAvailable, SlimeError, counted
from slime.types.files import whole_file

PARQUET = ".parquet"
# A name without an ending also gets JSON lines; readers of other formats would not understand them.
ENDINGS = (".jsonl", PARQUET)
FORMAT = "unfinished output of slime-rollout generate"
SECONDS_BETWEEN_LINES = 30.0


def check_output(path: Path, overwrite: bool) -> None:
    """Raises InvalidSetting for a path that cannot be written, or not without `overwrite`; pipes are accepted.

    Raises NotAvailable for Parquet without pyarrow.
    """
    if path.suffix.lower() not in ("", *ENDINGS) and (path.is_file() or not path.exists()):
        raise InvalidSetting.must_be("--output", f"a file that ends in {' or '.join(ENDINGS)}", got=str(path))
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidSetting.must_be("--output", "a file in a directory that exists", got=str(path))
    if path.is_file() and path.stat().st_size and not overwrite:
        raise InvalidSetting.requires(f"--output {path}", "--overwrite", "the file exists and is not empty")
    if path.suffix.lower() == PARQUET:
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise NotAvailable.not_installed(f"--output {path}", "pyarrow", "slime-rollout[parquet]") from error


class KeptGroups:
    """Complete groups by the number of their prompt. Thread-safe.

    They are kept in OUTPUT.part, a line each, from which the same command goes on after it was ended. identity: of what
    was asked; a file of other prompts or settings is refused. A pipe or a device has no such file beside it.
    Raises InvalidSetting, also while another process writes to the same output.
    """

    def __init__(self, output: Path, identity: str, *, overwrite: bool = False) -> None:
        self.groups: dict[int, list[Sample]] = {}
        self.path = output.with_name(f"{output.name}.part")
        self._output = output
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        if output.exists() and not output.is_file():
            return
        with path_errors(self.path, "--output"):
            # Not truncated: another process may be writing to it.
            self._file = open(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+b")
            try:
                self._lock_file()
                self._check_ours()
                if overwrite or not self._read(identity):
                    self._begin(identity)
            except BaseException:
                self._file.close()
                raise

    def _lock_file(self) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidSetting.must_be(
                "--output", "a file that no other process writes", got=str(self._output)
            ) from None

    def _check_ours(self) -> None:
        assert self._file is not None
        first = self._file.readline()
        self._file.seek(0)
        try:
            ours = not first or json.loads(first)["format"] == FORMAT
        except (ValueError, KeyError, TypeError):
            ours = False
        if not ours:
            raise InvalidSetting.must_be(
                "--output", f"a name beside which there is no {self.path.name} of somebody else", got=str(self._output)
            )

    def _begin(self, identity: str) -> None:
        assert self._file is not None
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps({"format": FORMAT, "identity": identity}).encode() + b"\n")
        self._file.flush()

    def _read(self, identity: str) -> bool:
        """Reads the groups of an earlier run; returns False for an empty file. A line that was cut off is dropped."""
        assert self._file is not None
        end = 0
        for number, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                break
            try:
                found = json.loads(line)
                if number == 0:
                    same = found["identity"] == identity
                else:
                    self.groups[found["prompt"]] = [Sample.from_dict(sample) for sample in found["samples"]]
            except (ValueError, KeyError, TypeError, SlimeError):
                same = False
            if not same:
                raise InvalidSetting.requires(
                    f"--output {self._output}", "--overwrite",
                    f"{self.path} holds answers to other prompts, or with other settings",
                )  # fmt: skip
            end += len(line)
        self._file.seek(end)
        self._file.truncate()
        return end > 0

    def add(self, prompt: int, samples: list[Sample]) -> None:
        """Keeps a group. Raises OutOfSpace."""
        with self._lock:
            self.groups[prompt] = samples
            if self._file is not None:
                with path_errors(self.path, "--output"):
                    group = {"prompt": prompt, "samples": [sample.to_dict() for sample in samples]}
                    self._file.write(json.dumps(group, default=_plain).encode() + b"\n")
                    self._file.flush()

    def finish(self) -> list[list[Sample]]:
        """Writes the output; returns the groups in the order of their prompts."""
        groups = [self.groups[prompt] for prompt in sorted(self.groups)]
        write_samples(self._output, [sample for group in groups for sample in group])
        if self._file is not None:
            self.path.unlink(missing_ok=True)
        return groups

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            if not self.groups:
                self.path.unlink(missing_ok=True)


class ProgressLine:
    """Says on standard error how many prompts are answered: in one line on a terminal, else in a line now and then.

    total: the prompts to answer.
    """

    def __init__(self, total: int, answered: int) -> None:
        self.total, self._first = total, answered
        self._started = self._last = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __call__(self, answered: int) -> None:
        now = time.monotonic()
        done = answered == self.total
        if now - self._last < (0.2 if self._terminal else SECONDS_BETWEEN_LINES) and not (done and self._terminal):
            return
        self._last = now
        left = (now - self._started) / (answered - self._first) * (self.total - answered)
        text = f"{answered} of {counted(self.total, 'prompt')} answered, {left:.0f} s left"
        line = f"\r\x1b[K{text}" if self._terminal else text
        with contextlib.suppress(OSError):
            print(line, end="" if self._terminal and not done else "\n", file=sys.stderr, flush=True)


def write_samples(path: Path, samples: list[Sample]) -> None:
    """Writes samples, as Parquet where the name says so, else as one JSON object per line."""
    if path.suffix.lower() == PARQUET:
        _write_parquet(path, samples)
        return
    whole = path.is_file() or not path.exists()
    # A device or a pipe is written as it is, and closed within `path_errors`, since closing writes the rest.
    with path_errors(path, "--output"), whole_file(path, field="--output") if whole else path.open("w") as file:
        for sample in samples:
            file.write(json.dumps(sample.to_dict(), default=_plain) + "\n")


def _write_parquet(path: Path, samples: list[Sample]) -> None:
    """Columns are the keys of `Sample.to_dict`: numbers, text and lists of numbers as they are, all else as JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [sample.to_dict() for sample in samples]
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: pa.array(_column(row.get(name) for row in rows)) for name in names})
    with whole_file(path, "wb", field="--output") as file:
        pq.write_table(table, file, compression="zstd")


def _column(values: Iterable[Any]) -> list[Any]:
    plain = [value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value for value in values]
    given = [value for value in plain if value is not None]
    if all(isinstance(value, str) for value in given) or all(isinstance(value, (bool, int, float)) for value in given):
        return plain
    if all(isinstance(value, list) and all(isinstance(each, (int, float)) for each in value) for value in given):
        return plain
    return [None if value is None else json.dumps(value, default=_plain) for value in plain]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} in a sample cannot be written as JSON")
