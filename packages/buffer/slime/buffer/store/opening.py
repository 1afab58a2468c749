"""Opens the store and the payloads that the settings of a buffer name, and holds the locks that keep others out."""

from __future__ import annotations

import fcntl
import os
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from slime.buffer.settings import BufferSettings
from slime.buffer.store.base import Payloads, Store, Wait
from slime.buffer.store.blobs import FilePayloads
from slime.buffer.store.objects import ObjectPayloads
from slime.buffer.store.postgres import PostgresStore
from slime.buffer.store.sqlite import SqliteStore
from slime.types.directories import path_errors
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile
from slime.types.scratch import ScratchDirectory

DATABASE, PAYLOADS = "state.sqlite", "payloads"
STORE_ID = "store_id"


@dataclass
class Storage:
    store: Store
    payloads: Payloads
    _held: ExitStack

    def close(self) -> None:
        self._held.close()


def open_storage(settings: BufferSettings, *, standby: Wait | None = None, existing: bool = False) -> Storage:
    """Opens the storage of a buffer. Raises ConfigError if it cannot be used, or another server uses it.

    standby: see `Buffer`.
    existing: create nothing, and raise MissingFile if there is no buffer.
    """
    if existing:
        check_existing(settings)
    power = settings.buffer_durability == "power"
    with ExitStack() as held:
        path = None if settings.buffer_dir is None else Path(settings.buffer_dir)
        if settings.buffer_store is None:
            directory = Directory(settings.buffer_dir)
            held.callback(directory.close)
            path = directory.path
        elif path is not None and not existing:
            # Not locked: the lock of the database protects its payloads, too, which `_check_owner` ties to it.
            with path_errors(path, "--buffer-dir"):
                path.mkdir(parents=True, exist_ok=True)
        if settings.buffer_payloads is not None:
            payloads: Payloads = ObjectPayloads(settings.buffer_payloads)
        else:
            assert path is not None
            payloads = FilePayloads(path / PAYLOADS, fsync=power, create=not existing)
            has_state = (path / DATABASE).exists()
            if settings.buffer_store is not None and has_state:
                raise _used(path, f"has the {DATABASE} of a buffer without --buffer-store: name")
            if settings.buffer_store is None and not has_state and payloads.owner() is not None:
                raise _used(path, "keeps the samples of a --buffer-store: name that database, too, or")
        if settings.buffer_store is not None:
            store: Store = PostgresStore(
                settings.buffer_store, power=power, has_payloads=payloads.exist, standby=standby, existing=existing
            )
        else:
            assert path is not None
            store = SqliteStore(
                path / DATABASE, synchronous="FULL" if power else "NORMAL", has_payloads=payloads.exist()
            )
        held.callback(store.close)
        if settings.buffer_store is not None or settings.buffer_payloads is not None or store.get(STORE_ID) is not None:
            _check_owner(store, payloads, existing=existing)
        return Storage(store, payloads, held.pop_all())


def check_existing(settings: BufferSettings) -> None:
    """Raises MissingFile if --buffer-dir holds no part of a buffer. The store itself checks a database for one."""
    if settings.buffer_dir is None:
        return
    path = Path(settings.buffer_dir)
    in_files = settings.buffer_payloads is None
    if settings.buffer_store is None:
        found = (path / DATABASE).is_file() or in_files and any((path / PAYLOADS).glob("*/*"))
    else:
        found = not in_files or (path / PAYLOADS).is_dir()
    if not found:
        raise MissingFile(
            f"no buffer in {path}", field="--buffer-dir", value=str(path), expected="the --buffer-dir of a run"
        )


def _used(directory: Path, problem: str) -> InvalidSetting:
    # Each buffer would mistake the samples of the other for leftovers of a crash.
    return InvalidSetting(
        f"--buffer-dir {directory} {problem} another directory", field="--buffer-dir", value=str(directory),
        expected="a directory of its own",
    )  # fmt: skip


def _check_owner(store: Store, payloads: Payloads, *, existing: bool) -> None:
    """Raises InvalidFile if the payloads belong to another store; claims new ones for `store`, unless `existing`."""
    known, owner = store.get(STORE_ID), payloads.owner()
    if known is not None and owner == known:
        return
    # A server that was killed before it claimed the payloads has left no samples.
    if owner is not None or payloads.exist() or store.payload_names():
        raise _foreign(store, payloads, owner)
    if existing:
        return
    if known is None:
        with store.transaction():
            store.put(STORE_ID, known := uuid.uuid4().hex)
    payloads.claim(known)
    # Two databases may find the same place unclaimed; the one whose claim is stored has it.
    if (owner := payloads.owner()) != known:
        raise _foreign(store, payloads, owner)


def _foreign(store: Store, payloads: Payloads, owner: str | None) -> InvalidFile:
    mark = "" if owner is None else f"; payloads-of beside {payloads.name} names the database that claimed it"
    return InvalidFile(
        f"the samples in {payloads.name} are not those of {store.name}: restore the database that they belong to, "
        f"or name the place of that database's samples (a new place for a new database){mark}",
        field="--buffer-store", value=store.name, expected="the database that the samples belong to",
    )  # fmt: skip


class Directory:
    """A directory that one process uses at a time; without a path, a temporary one that `close` removes."""

    def __init__(self, path: str | None) -> None:
        self._scratch: ScratchDirectory | None = None
        if path is None:
            self._scratch = ScratchDirectory("slime-buffer-")
            path = str(self._scratch.path)
        self.path = Path(path)
        if self.path.is_file():
            raise InvalidSetting.must_be("--buffer-dir", "a directory", got=str(self.path), reason="it is a file")
        with path_errors(self.path, "--buffer-dir"):
            self.path.mkdir(parents=True, exist_ok=True)
            # The directory itself: a lock on a file in it is lost with the file.
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise InvalidSetting.must_be(
                "--buffer-dir", "a directory of its own", got=str(self.path), reason="another slime-buffer uses it"
            ) from None

    def close(self) -> None:
        os.close(self._lock)
        if self._scratch is not None:
            self._scratch.close()
