"""State in a SQLite database (WAL), through one connection.

`synchronous` is NORMAL or FULL. With NORMAL a committed transaction survives the death of the process; a power cut may
undo the latest transactions but leaves the database consistent. With FULL they survive a power cut, too.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slime.buffer.store.sql import (
    ADDED,
    CONTENTS,
    FILL_CONTENTS,
    GROUPS,
    INDEXES,
    LACKS_CONTENTS,
    SCHEMA,
    VERSION,
    SqlStore,
)
from slime.types.errors import DataLoss, InvalidFile, OutOfSpace, SlimeError
from slime.types.files import check_readable

log = logging.getLogger(__name__)

# Migrations, by the schema version that they start from.
MIGRATIONS = {
    1: """
ALTER TABLE groups ADD COLUMN checksums TEXT NOT NULL DEFAULT '[]';
ALTER TABLE prompt_batches ADD COLUMN digest TEXT;
""",
    2: "ALTER TABLE groups ADD COLUMN weight_version INTEGER;",
    # SQLite before 3.35 drops no columns.
    3: f"""
ALTER TABLE groups RENAME TO groups_3; {GROUPS} {CONTENTS}
INSERT INTO groups SELECT
    group_index, dataset, state, first_sample, num_samples, payload, sizes, checksums, payload_bytes, worker, token,
    expires_at, attempt, ended_token, ended_by, step, reject_reason, weight_version
FROM groups_3;
{FILL_CONTENTS.format(groups="groups_3")}
DROP TABLE groups_3; {INDEXES}
""",
    4: "",
}
# SQLite errors caused by a bug in the program rather than a damaged file.
MISTAKES = (sqlite3.ProgrammingError, sqlite3.IntegrityError, sqlite3.NotSupportedError)
FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)


class SqliteStore(SqlStore):
    """The state in the file `path`. Raises InvalidFile if it has a newer schema, is damaged, or is not a database.

    has_payloads: payloads exist, which a new database would not know; if so, none is created.
    """

    older = "it was copied without its -wal file, or a power cut took its end"
    in_list = "group_index IN (SELECT value FROM json_each(?))"

    def __init__(self, path: Path, *, synchronous: str = "NORMAL", has_payloads: bool = False) -> None:
        self.path = path
        self.name = str(path)
        if has_payloads and not path.exists():
            raise self._lost("there is none")
        if path.exists():
            check_readable(path, "--buffer-dir")
        super().__init__()
        try:
            self._connection = sqlite3.connect(
                path, check_same_thread=False, isolation_level=None, cached_statements=256
            )
        except sqlite3.DatabaseError as error:
            raise InvalidFile(
                f"{path}: {error}", field="buffer_dir", value=str(path), expected="a file that can be read and written"
            ) from None
        try:
            self._open(synchronous, has_payloads)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            if error.sqlite_errorcode in FULL:
                raise self._error_of(error) from error
            raise InvalidFile(
                f"{path}: {error}", field="buffer_dir", value=str(path), expected="the state of a buffer"
            ) from None
        except InvalidFile:
            self._connection.close()
            raise

    def _open(self, synchronous: str, has_payloads: bool) -> None:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise InvalidFile(
                f"{self.path}: schema version {version}, expected at most {VERSION}: made by a newer slime-buffer",
                field="buffer_dir",
                value=version,
                expected=f"at most {VERSION}",
            )
        if version == 0 and has_payloads:
            raise self._lost("it is empty, or was copied without its -wal file")
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(f"PRAGMA synchronous = {synchronous}")
        if version:
            self._quick_check(version)
        if 0 < version < VERSION:
            log.info("bringing %s to schema version %d", self.path, VERSION)
        for known in range(version, VERSION) if version else ():
            self._connection.executescript(f"BEGIN; {MIGRATIONS[known]} PRAGMA user_version = {known + 1}; COMMIT;")
        if version == 0:
            self._connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        for statement in ADDED:
            self._connection.execute(statement)

    def _lost(self, problem: str) -> InvalidFile:
        return InvalidFile(
            f"{self.path}: the payloads beside it hold samples, and {problem}: restore the database, with its -wal "
            "file, from a backup (slime-buffer backup), or move the payloads away to start afresh",
            field="buffer_dir",
            value=str(self.path),
            expected="the database that the payloads belong to",
        )

    def _quick_check(self, version: int) -> None:
        problems = [text for (text,) in self._connection.execute("PRAGMA quick_check(3)") if text != "ok"]
        if not problems and version > 3 and self._connection.execute(LACKS_CONTENTS).fetchone()[0]:
            problems = ["groups lack their prompts or summaries"]
        if problems:
            raise InvalidFile(
                f"{self.path} is damaged: {'; '.join(problems)[:500]}: restore a backup",
                field="buffer_dir",
                value=str(self.path),
                expected="the whole state of a buffer",
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self.lock:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                self._connection.execute("COMMIT")
            except BaseException as error:
                self._values.clear()
                # SQLite has already rolled back where the disk is full.
                with suppress(sqlite3.DatabaseError):
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, MISTAKES):
                    raise self._error_of(error) from error
                raise

    def _error_of(self, error: sqlite3.DatabaseError) -> SlimeError:
        if error.sqlite_errorcode in FULL:
            return OutOfSpace(f"{self.path}: {error}", field="buffer_dir", value=str(self.path), expected="free space")
        return DataLoss(
            f"{self.path}: {error}: stop the buffer, and see slime-buffer check",
            field="buffer_dir",
            value=str(self.path),
            expected="the whole state of a buffer",
        )

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self.lock:
            try:
                return self._connection.execute(query, values).fetchall()
            except sqlite3.DatabaseError as error:
                # An error inside a transaction fails the transaction.
                if isinstance(error, MISTAKES) or self._connection.in_transaction:
                    raise
                raise self._error_of(error) from error

    def _many(self, query: str, rows: Iterable[Sequence[Any]]) -> None:
        with self.lock:
            self._connection.executemany(query, rows)

    def _list(self, indexes: Iterable[int]) -> str:
        return json.dumps(list(indexes))

    def close(self) -> None:
        with self.lock:
            self._connection.close()
