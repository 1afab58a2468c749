"""`slime-buffer check`, `repair` and `backup`: work on the directory of a buffer that is not served."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from slime.buffer.groups.quarantine import Quarantine
from slime.buffer.groups.steps import Steps
from slime.buffer.maintenance.strays import find_strays, set_strays_aside
from slime.buffer.store.base import State
from slime.buffer.store.blobs import FilePayloads
from slime.buffer.store.opening import DATABASE, PAYLOADS, Directory
from slime.buffer.store.sqlite import SqliteStore
from slime.types.errors import DataLoss, InvalidSetting, MissingFile

# A server that goes on may delete a payload between the copy of the database and that of the payload.
ATTEMPTS = 5


def check(directory: Path) -> list[str]:
    """Lists problems of the files of a buffer that does not serve; changes nothing. Raises InvalidFile for a database
    that is gone or damaged."""
    with _opened(directory) as (store, payloads, quarantine):
        problems = []
        after: int | None = None
        while page := store.groups(after=after, limit=64):
            after = page[-1].group_index
            for group in page:
                error = quarantine.problem(group)
                if error is not None:
                    problems.append(f"group {group.group_index} ({group.state}): {error.message}")
        strays, newer = find_strays(store, payloads)
        problems += [f"no group names {payloads.directory / name}: of a crash" for name in sorted(strays)]
        problems += [f"the database is older than {payloads.directory / name}" for name in sorted(newer)]
        return problems


def repair(directory: Path) -> tuple[int, int]:
    """Returns (payloads moved to lost+found, damaged groups): moves what no group names, and takes groups that cannot
    be read out of the run. Raises InvalidFile for a database that is gone or damaged."""
    with _opened(directory) as (store, payloads, quarantine):
        aside = set_strays_aside(store, payloads, also_newer=True)
        return aside, quarantine.check((State.READY, State.LEASED, State.COMPLETED, State.SEALED))


def backup(directory: Path, target: Path) -> tuple[int, int]:
    """Copies a buffer to `target`, also while a server uses `directory`; returns (groups, payloads). Raises
    InvalidSetting where `target` exists."""
    source = _database(directory)
    if target.exists():
        raise InvalidSetting(f"{target} exists: a backup is a new directory", field="DEST", value=str(target))
    partial = target.with_name(target.name + ".partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise InvalidSetting(
            f"{partial} exists: another backup is running or was interrupted; remove it", field="DEST",
            value=str(partial),
        ) from None  # fmt: skip
    try:
        _copy_database(source, partial / DATABASE)
        for attempt in range(ATTEMPTS):
            try:
                groups, names = _copy_payloads(directory / PAYLOADS, partial)
                break
            except FileNotFoundError as error:
                if attempt == ATTEMPTS - 1:
                    raise DataLoss(f"payload {error.filename} is gone: see slime-buffer check {directory}") from None
                _copy_database(source, partial / DATABASE)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return groups, names


def _database(directory: Path) -> Path:
    path = directory / DATABASE
    if not path.is_file() and not any((directory / PAYLOADS).glob("*/*")):
        raise MissingFile(f"no buffer in {directory}", field="DIR", value=str(directory), expected="a --buffer-dir")
    return path


def _copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as reading:
        with closing(sqlite3.connect(target)) as writing:
            reading.backup(writing)


def _copy_payloads(source: Path, partial: Path) -> tuple[int, int]:
    with closing(sqlite3.connect(partial / DATABASE)) as connection:
        (groups,) = connection.execute("SELECT count(*) FROM groups").fetchone()
        names = [name for (name,) in connection.execute("SELECT payload FROM groups WHERE payload IS NOT NULL")]
    target = partial / PAYLOADS
    target.mkdir(exist_ok=True)
    wanted = {target / name for name in names}
    for path in target.glob("*/*"):
        if path not in wanted:
            path.unlink()
    for name in names:
        if not (target / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copy2(source / name, target / name)
    return groups, len(names)


@contextmanager
def _opened(directory: Path) -> Iterator[tuple[SqliteStore, FilePayloads, Quarantine]]:
    _database(directory)
    with closing(Directory(str(directory))):
        payloads = FilePayloads(directory / PAYLOADS)
        with closing(SqliteStore(directory / DATABASE, has_payloads=bool(payloads.names()))) as store:
            steps = Steps(store, payloads, release_committed=False)
            yield store, payloads, Quarantine(store, payloads, steps, on_unsealed=lambda steps: None)
