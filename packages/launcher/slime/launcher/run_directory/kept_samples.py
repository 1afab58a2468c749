"""Samples that a run keeps for inspection: Parquet files below samples/, one for each step and each evaluation.

    samples/000012.parquet        trained on in step 12
    samples/eval-000010.parquet   of the evaluation after 10 steps

Every file has the columns of `SCHEMA`, so a directory of them reads as one table. R is the length of the response,
whose tokens are the last R of `tokens`; a list that the run did not have is null.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from slime.types import Sample
from slime.types.directories import path_errors
from slime.types.errors import InvalidFile
from slime.types.files import open_regular, whole_file

DIRECTORY = "samples"
TRAIN = "train"
# Most samples of a group that are kept.
SAMPLES_PER_GROUP = 4
# Rows that are read together, about a page of the viewer.
ROW_GROUP = 256
# Files whose footers are remembered.
MOST_FOOTERS = 8
NAME = re.compile(r"(eval-)?(\d{6,})\.parquet")
# Column, type, meaning.
SCHEMA = (
    ("step", "int64", "iteration that trained on the sample; for an evaluation, the iterations before it"),
    ("dataset", "string", "`train`, or the name of the evaluation set"),
    ("group_index", "int64", "group: its samples answer one prompt"),
    ("index", "int64", "sample; unique in the run"),
    ("prompt", "string", "prompt as the model got it; messages as JSON"),
    ("response", "string", "response as the reward function got it"),
    ("label", "string", "label: text, or JSON for any other value"),
    ("reward", "float64", "reward; null where it is not one number"),
    ("reward_json", "string", "reward that is not one number, as JSON"),
    ("status", "string", "how the response ended: `completed`, `truncated`, `aborted`, `failed`"),
    ("response_length", "int32", "R"),
    ("tokens", "list<int32>", "prompt and response"),
    ("loss_mask", "list<uint8>", "R: 1 where a token is trained on; null: everywhere"),
    ("engine_log_probs", "list<float32>", "R: by the engine that generated the token"),
    ("trainer_log_probs", "list<float32>", "R: by the trainer, before it trained on the sample; NaN where masked"),
    ("spans", "list<struct<start:int32,end:int32,weight_version:string>>",
     "response tokens that the model generated, and the version of its weights"),
    ("metadata", "string", "metadata of the prompt's row, as JSON"),
)  # fmt: skip


class KeptFile(NamedTuple):
    """A file of kept samples. step: the step that trained on them; for an evaluation, the number of steps before it."""

    path: Path
    step: int
    evaluation: bool


def kept_files(run: Path) -> list[KeptFile]:
    """Lists the files of a run by step, an evaluation before the step that follows it."""
    try:
        names = [path for path in (run / DIRECTORY).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(path, match) for path in names if (match := NAME.fullmatch(path.name))]
    files = [KeptFile(path, int(match[2]), match[1] is not None) for path, match in found]
    return sorted(files, key=lambda file: (file.step, not file.evaluation))


def remove_kept(run: Path, first_step: int = 0) -> None:
    """Removes the samples of `first_step` and later steps, and the directory if it is then empty."""
    for file in kept_files(run):
        # The evaluation after `first_step` steps belongs to the step before.
        if file.step >= first_step + file.evaluation or first_step == 0:
            file.path.unlink(missing_ok=True)
    directory = run / DIRECTORY
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


class KeptSamples:
    """Writes the samples of a run. Removes those of `first_step` and later steps, from before the run was resumed.

    first_step: None if no step is written again.
    """

    def __init__(self, run: Path, first_step: int | None) -> None:
        self._run = run
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kept-samples")
        if first_step is not None:
            remove_kept(run, first_step)

    def begin(self, step: int, samples: Sequence[Sample]) -> None:
        """Writes beside the caller. Raises the error of the write that was begun before."""
        self.wait()
        self._writing = self._thread.submit(self.write, step, samples)

    def wait(self) -> None:
        """Waits for what was begun, and raises its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def write(self, step: int, samples: Sequence[Sample], *, evaluation: bool = False) -> None:
        if not samples:
            return
        directory = self._run / DIRECTORY
        path = directory / f"{'eval-' if evaluation else ''}{step:06d}.parquet"
        with path_errors(path):
            directory.mkdir(parents=True, exist_ok=True)
        write_file(path, [row(step, sample) for sample in samples])


def row(step: int, sample: Sample) -> dict[str, Any]:
    """Returns the columns of one sample; `dataset` and `trainer_log_probs` are attributes that the run sets on it."""
    reward = sample.reward
    scalar = isinstance(reward, (int, float, np.number))
    return {
        "step": step,
        "dataset": getattr(sample, "dataset", TRAIN),
        "group_index": sample.group_index,
        "index": sample.index,
        "prompt": _text(sample.prompt),
        "response": sample.response,
        "label": None if sample.label is None else _text(sample.label),
        "reward": float(reward) if scalar else None,  # type: ignore[arg-type]
        "reward_json": None if scalar or reward is None else _text(reward),
        "status": sample.status.value,
        "response_length": sample.response_length,
        "tokens": sample.array("tokens"),
        "loss_mask": sample.array("loss_mask"),
        "engine_log_probs": sample.array("rollout_log_probs"),
        "trainer_log_probs": getattr(sample, "trainer_log_probs", None),
        "spans": [{"start": s.start, "end": s.end, "weight_version": s.weight_version} for s in sample.spans],
        "metadata": json.dumps(sample.metadata, default=str),
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def write_file(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(list(rows), schema=_arrow_schema())
    with whole_file(path, "wb") as file:
        pq.write_table(table, file, compression="zstd", row_group_size=ROW_GROUP)


def _arrow_schema() -> Any:
    import pyarrow as pa

    span = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("weight_version", pa.string())])
    types = {
        "int64": pa.int64(), "int32": pa.int32(), "string": pa.string(), "float64": pa.float64(),
        "list<int32>": pa.list_(pa.int32()), "list<uint8>": pa.list_(pa.uint8()),
        "list<float32>": pa.list_(pa.float32()),
    }  # fmt: skip
    return pa.schema([(name, types.get(kind, pa.list_(span))) for name, kind, _ in SCHEMA])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raises InvalidFile if the file is broken or gone."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, str(error)) from None


def _unreadable(path: Path, reason: str) -> InvalidFile:
    place = f"{DIRECTORY}/{path.name}"
    return InvalidFile(
        f"cannot read {place}: {reason}", field="samples", value=place, expected="a Parquet file of kept samples"
    )


class _Footers:
    """The footers of the files that were read last. That of a million rows takes a third of a second to read."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Any, ...], tuple[Any, list[int]]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path, opened: IO[bytes]) -> tuple[Any, list[int]]:
        """Returns the metadata of an open file, and the first rows of its row groups with the number of rows behind."""
        import pyarrow.parquet as pq

        status = os.fstat(opened.fileno())
        # A run that resumes writes another file in place of one.
        key = (path, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        metadata = pq.read_metadata(opened)
        sizes = (metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
        footer = metadata, list(itertools.accumulate(sizes, initial=0))
        with self._lock:
            self._known[key] = footer
            while len(self._known) > MOST_FOOTERS:
                self._known.popitem(last=False)
        return footer


_FOOTERS = _Footers()


def count_rows(path: Path) -> int:
    # Opened here, because pyarrow opens only paths in UTF-8.
    with _readable(path), open_regular(path) as opened:
        return _FOOTERS.of(path, opened)[1][-1]


def _with_arrays(table: Any) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for field in table.schema:
        numbers = pa.types.is_list(field.type) and (
            pa.types.is_integer(field.type.value_type) or pa.types.is_floating(field.type.value_type)
        )
        if numbers:
            columns[field.name] = [_arrays(chunk) for chunk in table[field.name].chunks]
    rest = table.drop_columns(list(columns)) if columns else table
    for row, *values in zip(rest.to_pylist(), *(itertools.chain(*column) for column in columns.values()), strict=True):
        yield row | dict(zip(columns, values, strict=True))


def _arrays(lists: Any) -> Iterator[np.ndarray | None]:
    values, offsets = lists.values.to_numpy(zero_copy_only=False), lists.offsets.to_numpy()
    for valid, begin, end in zip(lists.is_valid().to_pylist(), offsets, offsets[1:], strict=False):
        yield values[begin:end] if valid else None


def read_rows(
    path: Path, columns: Sequence[str] | None = None, *, start: int = 0, stop: int | None = None
) -> list[dict[str, Any]]:
    """Returns rows [start, stop) of a file; reads only the row groups that hold them. Raises InvalidFile."""
    return list(iterate_rows(path, columns, start=start, stop=stop))


def iterate_rows(
    path: Path,
    columns: Sequence[str] | None = None,
    *,
    start: int = 0,
    stop: int | None = None,
    arrays: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yields rows [start, stop) of a file. arrays: yield lists of numbers as numpy arrays, which take a tenth of the
    memory. Raises InvalidFile."""
    import pyarrow.parquet as pq

    wanted = [name for name, _, _ in SCHEMA] if columns is None else list(columns)
    # Read by this thread: pre-buffering reads a Python file on a thread of Arrow's, which can outlive the interpreter's
    # lock and then aborts a process that ends right after its last row.
    with _readable(path), open_regular(path) as opened:
        metadata, firsts = _FOOTERS.of(path, opened)
        with pq.ParquetFile(opened, metadata=metadata, pre_buffer=False) as file:
            missing = sorted(set(wanted) - set(file.schema_arrow.names))
            if missing:
                raise _unreadable(path, f"it has no column {missing[0]}")
            stop = firsts[-1] if stop is None else min(stop, firsts[-1])
            for number in range(max(bisect.bisect_right(firsts, start) - 1, 0), len(firsts) - 1):
                first = firsts[number]
                if first >= stop:
                    return
                begin, end = max(start - first, 0), min(stop, firsts[number + 1]) - first
                if begin < end:
                    table = file.read_row_group(number, columns=wanted, use_threads=False).slice(begin, end - begin)
                    yield from _with_arrays(table) if arrays else table.to_pylist()
