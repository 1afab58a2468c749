"""`slime-buffer check`, `repair` and `backup`: work on the state and the samples of a buffer that is not served."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from slime.buffer.groups.quarantine import Quarantine
from slime.buffer.groups.steps import Steps
from slime.buffer.maintenance.strays import find_strays, set_strays_aside
from slime.buffer.settings import BufferSettings
from slime.buffer.store import urls
from slime.buffer.store.base import Payloads, State
from slime.buffer.store.blobs import FilePayloads, file_of
from slime.buffer.store.objects import ObjectPayloads
from slime.buffer.store.opening import DATABASE, PAYLOADS, STORE_ID, Storage, check_existing, open_storage
from slime.buffer.store.sqlite import FULL
from slime.types.directories import path_errors, sync, write_error
from slime.types.errors import DataLoss, InvalidFile, InvalidSetting, MissingFile, OutOfSpace

# A running server may delete a payload between the copy of the database and that of the payload.
ATTEMPTS = 5


def check(settings: BufferSettings) -> list[str]:
    """Lists the problems of a buffer that is not served, and changes nothing but the schema of an earlier version.

    Raises ConfigError for a database that is gone, damaged or in use, and for samples that belong to another database.
    """
    with _opened(settings) as (storage, quarantine):
        problems = []
        after: int | None = None
        while page := storage.store.groups(after=after, limit=64):
            after = page[-1].group_index
            for group in page:
                error = quarantine.problem(group)
                if error is not None:
                    problems.append(f"group {group.group_index} ({group.state}): {error.message}")
        strays, newer = find_strays(storage.store, storage.payloads, storage.store.payload_names())
        problems += [f"no group names {storage.payloads.name}/{name}: left by a crash" for name in sorted(strays)]
        problems += [f"the database is older than {storage.payloads.name}/{name}" for name in sorted(newer)]
        return problems


def repair(settings: BufferSettings) -> tuple[int, int, str]:
    """Sets payloads aside that no group names, and takes groups that cannot be read out of the run.

    Returns (payloads set aside, damaged groups, where the payloads went). Raises ConfigError as `check` does.
    """
    with _opened(settings) as (storage, quarantine):
        aside = set_strays_aside(storage.store, storage.payloads, also_newer=True)
        damaged = quarantine.check((State.READY, State.LEASED, State.COMPLETED, State.SEALED))
        return aside, damaged, storage.payloads.lost_and_found


def backup(settings: BufferSettings, target: Path) -> tuple[int, int]:
    """Copies a buffer with its state in SQLite to the directory `target`, even while a server uses it; objects become
    files. Returns (groups, payloads) once the copy is on the disk. Raises InvalidSetting if `target` exists, cannot be
    written or is in the buffer, OutOfSpace."""
    check_existing(settings)
    assert settings.buffer_dir is not None
    directory = Path(settings.buffer_dir)
    if not (directory / DATABASE).is_file():
        raise MissingFile(
            f"no {DATABASE} in {directory}: it is lost, or the run has a {urls.STORE}",
            field="DIR", value=str(directory), expected=f"a directory with {DATABASE}",
        )  # fmt: skip
    if os.path.lexists(target):
        raise InvalidSetting(f"{target} exists: a backup is a new directory", field="DEST", value=str(target))
    if Path(os.path.realpath(directory)) in Path(os.path.realpath(target)).parents:
        raise InvalidSetting(f"{target} is in the buffer {directory}", field="DEST", value=str(target))
    objects = None if settings.buffer_payloads is None else ObjectPayloads(settings.buffer_payloads)
    partial = target.with_name(target.name + ".partial")
    with path_errors(target, "DEST"):
        try:
            partial.mkdir(parents=True)
        except FileExistsError:
            raise InvalidSetting(
                f"{partial} exists: another backup is running or was interrupted; remove it", field="DEST",
                value=str(partial),
            ) from None  # fmt: skip
    try:
        _copy_database(directory / DATABASE, partial / DATABASE)
        _copy_owner(objects or FilePayloads(directory / PAYLOADS, create=False), partial, settings)
        fetch = _from_files(directory / PAYLOADS) if objects is None else _from_objects(objects)
        for attempt in range(ATTEMPTS):
            try:
                groups, names = _copy_payloads(fetch, partial)
                break
            except DataLoss as error:
                if attempt == ATTEMPTS - 1:
                    raise DataLoss(f"{error.message}: see slime-buffer check") from None
                _copy_database(directory / DATABASE, partial / DATABASE)
        # A power cut after the rename would otherwise leave a backup with empty files.
        for path in (*partial.rglob("*"), partial):
            sync(path)
        partial.rename(target)
    except BaseException as error:
        shutil.rmtree(partial)
        if isinstance(error, sqlite3.DatabaseError) and error.sqlite_errorcode in FULL:
            # Only the copy is written to.
            raise OutOfSpace(
                f"DEST: no space left while writing {target} ({error})", field="DEST", value=str(target),
                expected="free space",
            ) from error  # fmt: skip
        if isinstance(error, sqlite3.DatabaseError):
            raise InvalidFile(
                f"{directory / DATABASE}: {error}: see slime-buffer check", field="DIR", value=str(directory),
                expected="the state of a buffer",
            ) from None  # fmt: skip
        if isinstance(error, OSError):
            raise write_error(error, target, "DEST") from error
        raise
    with path_errors(target, "DEST"):
        sync(target.parent)
    return groups, names


def _copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as reading:
        with closing(sqlite3.connect(target)) as writing:
            reading.backup(writing)


def _copy_owner(payloads: Payloads, partial: Path, settings: BufferSettings) -> None:
    """Marks the copied samples as those of the copied database. Raises InvalidSetting if they belong to another one."""
    with closing(sqlite3.connect(partial / DATABASE)) as connection:
        row = connection.execute("SELECT value FROM state WHERE name = ?", [STORE_ID]).fetchone()
    known = None if row is None else json.loads(row[0])
    if payloads.owner() != known:
        raise InvalidSetting.requires(
            f"backup {settings.buffer_dir}", f"the {urls.PAYLOADS} of its run",
            f"the samples in {payloads.name} belong to another run",
        )  # fmt: skip
    if known is not None:
        FilePayloads(partial / PAYLOADS).claim(known)


# Copies a file, or an object of so many bytes, to a file; raises DataLoss if it is gone.
Fetch = Callable[[str, int, Path], None]


def _from_files(source: Path) -> Fetch:
    def fetch(name: str, size: int, target: Path) -> None:
        try:
            shutil.copy2(source / name, target)
        except FileNotFoundError:
            raise DataLoss(f"payload {source / name} is gone") from None

    return fetch


def _from_objects(payloads: ObjectPayloads) -> Fetch:
    def fetch(name: str, size: int, target: Path) -> None:
        (data,) = payloads.read(name, [(0, size)])
        target.write_bytes(data)

    return fetch


def _copy_payloads(fetch: Fetch, partial: Path) -> tuple[int, int]:
    with closing(sqlite3.connect(partial / DATABASE)) as connection:
        (groups,) = connection.execute("SELECT count(*) FROM groups").fetchone()
        query = "SELECT payload, payload_bytes FROM groups WHERE payload IS NOT NULL"
        payloads = connection.execute(query).fetchall()
    # Groups may share a file; an object holds one.
    sizes = {file_of(name): size for name, size in payloads}
    target = partial / PAYLOADS
    target.mkdir(exist_ok=True)
    wanted = {target / name for name in sizes}
    for path in target.glob("*/*"):
        if path not in wanted:
            path.unlink()
    for name, size in sizes.items():
        if not (target / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            fetch(name, size, target / name)
    return groups, len(payloads)


@contextmanager
def _opened(settings: BufferSettings) -> Iterator[tuple[Storage, Quarantine]]:
    with closing(open_storage(settings, existing=True)) as storage:
        steps = Steps(storage.store, storage.payloads, release_committed=False)
        yield storage, Quarantine(storage.store, storage.payloads, steps, on_unsealed=lambda: None)
