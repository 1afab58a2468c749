"""A prompt file as an endless sequence of epochs.

Epoch e visits every prompt once, in the order of the file or, shuffled, in the order that `random.Random(seed + e)`
gives. A request that crosses the end of an epoch continues with the next epochs, however small the file, so that no
prompt comes twice within an epoch.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from itertools import islice

from slime.buffer.sources.base import Columns, Prompt, prompt_of_row
from slime.types.errors import InvalidField, InvalidFile, errors_name
from slime.types.files import check_readable
from slime.types.prompt_files.readers import reader_of
from slime.types.prompt_files.slices import split_slice


@dataclass(frozen=True)
class Cursor:
    """The next prompt to take: `offset` prompts of `epoch` were taken. offset may equal the number of prompts."""

    epoch: int = 0
    offset: int = 0


class Dataset:
    """Prompts with an order per epoch. It keeps no cursor: `take` is a pure function of one."""

    def __init__(self, prompts: list[Prompt], *, shuffle: bool = False, seed: int = 42, digest: str = "") -> None:
        self.prompts = prompts
        self.shuffle = shuffle
        self.seed = seed
        self.digest = digest
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def identity(self) -> str:
        """A text that two datasets share if a cursor means the same in both."""
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in order"
        return f"{len(self)} prompts {order}, sha256 {self.digest[:16]}"

    def order(self, epoch: int) -> list[int]:
        """Returns the positions in the file in the order of an epoch, a permutation of range(len(self))."""
        if self._order[0] != epoch:
            positions = list(range(len(self)))
            if self.shuffle:
                random.Random(self.seed + epoch).shuffle(positions)
            self._order = (epoch, positions)
        return self._order[1]

    def take(self, cursor: Cursor, count: int) -> tuple[list[Prompt], Cursor]:
        """Returns the next `count` prompts from `cursor` on, and the cursor after them.

        Raises InvalidField for a dataset without prompts.
        """
        if count > 0 and not self.prompts:
            raise InvalidField("dataset", "no prompts", "at least one prompt")
        taken: list[Prompt] = []
        epoch, offset = cursor.epoch, cursor.offset
        while len(taken) < count:
            if offset >= len(self):
                epoch, offset = epoch + 1, 0
            chosen = self.order(epoch)[offset : offset + count - len(taken)]
            taken += [self.prompts[position] for position in chosen]
            offset += len(chosen)
        return taken, Cursor(epoch, offset)


def read_dataset(
    source: str,
    columns: Columns,
    *,
    shuffle: bool = False,
    seed: int = 42,
    all_columns: bool = True,
    flag: str = "--prompt-data",
) -> Dataset:
    """Reads `PATH` or `PATH@[a:b]`, a Python slice of rows (negative bounds count from the end). PATH may be
    `reasoning_gym:NAME`.

    all_columns: if the column of metadata or tools does not have its default name, some row must have it.
    flag: the flag that names the file.

    Raises MissingFile, InvalidFile (broken row, empty file, empty slice) or InvalidSetting (unknown ending).
    """
    with errors_name(flag):
        path, prompts = _read(source, columns, all_columns, flag)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    bounds = source[source.rindex("@[") :] if "@[" in source else ""
    digest.update(bounds.encode() + columns.identity.encode())
    return Dataset(prompts, shuffle=shuffle, seed=seed, digest=digest.hexdigest())


def _read(source: str, columns: Columns, all_columns: bool, flag: str) -> tuple[str, list[Prompt]]:
    """Returns the file's path, and the prompts of the rows that `source` selects."""
    path, rows = split_slice(source, flag)
    check_readable(path, flag)
    read = reader_of(path, flag)(path)
    if _counts_from_start(rows):
        read = islice(read, rows.start, rows.stop)
        rows = slice(None)
    optional = (columns.metadata, columns.tools) if all_columns else ()
    absent = {name for name in optional if name not in (Columns.metadata, Columns.tools)}
    prompts = []
    for where, row in read:
        absent -= row.keys()
        prompts.append(prompt_of_row(row, columns, path=path, where=where))
    prompts = prompts[rows]
    if not prompts:
        raise InvalidFile(f"{source}: no rows", field=flag, value=source, expected="at least one row")
    if absent:
        name = min(absent)
        raise InvalidFile(
            f"{source}: no row has a column {name!r}", field=name, value=source, expected="a column of that name"
        )
    return path, prompts


def _counts_from_start(rows: slice) -> bool:
    return all(bound is None or bound >= 0 for bound in (rows.start, rows.stop))
