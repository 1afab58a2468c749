"""The output of `slime-rollout generate`: groups are kept beside it as they complete, until all of them are there."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from slime.types import Sample
from slime.types.directories import path_errors
from slime.types.errors import InvalidField, InvalidSetting, NotAvailable, SlimeError, counted
from slime.types.files import whole_file

PARQUET = ".parquet"
# A name without an ending also gets JSON lines; readers of other formats would not understand them.
ENDINGS = (".jsonl", PARQUET)
FORMAT = "unfinished output of slime-rollout generate"
SECONDS_BETWEEN_LINES = 30.0
INT64, EXACT_IN_FLOAT64 = 2**63 - 1, 2**53


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
    was asked; a file of other prompts or settings is refused. total: the number of prompts. sources: fingerprints of
    the files and the model that settings name, by setting; `changed` lists the settings whose files have changed since
    the first group was kept. A pipe or a device has no such file beside it.
    Raises InvalidSetting, also while another process writes to the same output.
    """

    def __init__(
        self,
        output: Path,
        identity: str,
        *,
        total: int = sys.maxsize,
        sources: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.groups: dict[int, list[Sample]] = {}
        self.changed: list[str] = []
        self._total, self._sources = total, dict(sources or {})
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
        header = {"format": FORMAT, "identity": identity, "sources": self._sources}
        self._file.write(json.dumps(header).encode() + b"\n")
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
                    before = found.get("sources", {})
                    self.changed = [name for name in before if before[name] != self._sources.get(name)]
                else:
                    self.groups[self._number(found["prompt"])] = _group(found["samples"])
            except (ValueError, KeyError, TypeError, SlimeError):
                same = False
            if not same:
                what = f"holds answers to other prompts, or with other settings{', or is damaged' if number else ''}"
                raise InvalidSetting.requires(f"--output {self._output}", "--overwrite", f"{self.path} {what}")
            end += len(line)
        self._file.seek(end)
        self._file.truncate()
        return end > 0

    def _number(self, prompt: Any) -> int:
        if type(prompt) is not int or not 0 <= prompt < self._total:
            raise ValueError(prompt)
        return prompt

    def add(self, prompt: int, samples: list[Sample]) -> None:
        """Keeps a group. Raises OutOfSpace, and InvalidField for values of a plug-in that JSON cannot hold."""
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
            # After a full disk, what was not written yet is tried once more here.
            with path_errors(self.path, "--output"):
                self._file.close()
            if not self.groups:
                self.path.unlink(missing_ok=True)


def _group(samples: Any) -> list[Sample]:
    """Returns the samples of a kept group. Raises InvalidField, ValueError or TypeError where they are not whole."""
    group = [Sample.from_dict(sample) for sample in samples]
    for sample in group:
        sample.validate()
    if not group:
        raise ValueError("a group without samples")
    return group


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
    if all(isinstance(value, str) for value in given) or _are_of_one_kind(given):
        return plain
    if all(isinstance(value, list) for value in given) and _are_of_one_kind(list(itertools.chain(*given))):
        return plain
    return [None if value is None else json.dumps(value, default=_plain) for value in plain]


def _are_of_one_kind(values: Sequence[Any]) -> bool:
    """Returns whether one type of a Parquet column holds all values exactly: booleans, int64 or float64."""
    kinds = set(map(type, values))
    if kinds <= {bool}:
        return True
    whole = [value for value in values if type(value) is int] if int in kinds else [0]
    largest = INT64 if kinds == {int} else EXACT_IN_FLOAT64
    return kinds <= {int, float} and -largest <= min(whole) and max(whole) <= largest


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise InvalidField("a value of a sample", value, "text, numbers, lists and objects, which JSON can hold")
