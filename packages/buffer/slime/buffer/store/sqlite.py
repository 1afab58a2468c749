"""State in a SQLite database (WAL), through one connection.

`synchronous` is NORMAL or FULL. With NORMAL a committed transaction survives the death of the process; a power cut may
take the latest ones but leaves the database whole. With FULL it survives the power cut too.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from slime.buffer.store.base import Group, State, Step, Store
from slime.types.errors import DataLoss, InvalidFile, OutOfSpace, SlimeError
from slime.types.files import check_readable

VERSION = 3
SCHEMA = """
CREATE TABLE groups (
    group_index INTEGER PRIMARY KEY, dataset TEXT NOT NULL, state TEXT NOT NULL, template BLOB NOT NULL,
    first_sample INTEGER NOT NULL, num_samples INTEGER NOT NULL,
    payload TEXT, sizes TEXT NOT NULL, checksums TEXT NOT NULL, payload_bytes INTEGER NOT NULL, summaries BLOB,
    worker TEXT, token TEXT, expires_at REAL, attempt INTEGER NOT NULL,
    ended_token TEXT, ended_by TEXT, step INTEGER, reject_reason TEXT, weight_version INTEGER
);
CREATE INDEX groups_of_state ON groups (state, group_index);
CREATE INDEX groups_of_step ON groups (step) WHERE step IS NOT NULL;
CREATE INDEX groups_of_expiry ON groups (expires_at) WHERE expires_at IS NOT NULL;
CREATE UNIQUE INDEX groups_of_token ON groups (token) WHERE token IS NOT NULL;
CREATE UNIQUE INDEX groups_of_ended_token ON groups (ended_token) WHERE ended_token IS NOT NULL;
CREATE TABLE steps (step INTEGER PRIMARY KEY, state TEXT NOT NULL, group_indexes TEXT NOT NULL, plan TEXT);
CREATE TABLE prompt_batches (
    key TEXT PRIMARY KEY, added INTEGER NOT NULL, first INTEGER NOT NULL, digest TEXT
);
CREATE TABLE evaluation_prompts (
    dataset TEXT NOT NULL, position INTEGER NOT NULL, template BLOB NOT NULL, PRIMARY KEY (dataset, position)
);
CREATE TABLE state (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
# Newer than version 1, whose readers do not depend on it.
ADDED = "CREATE TABLE IF NOT EXISTS seal_records (step INTEGER PRIMARY KEY, record TEXT NOT NULL)"
# Migrations by the version that they start from.
MIGRATIONS = {
    1: """
ALTER TABLE groups ADD COLUMN checksums TEXT NOT NULL DEFAULT '[]';
ALTER TABLE prompt_batches ADD COLUMN digest TEXT;
""",
    2: "ALTER TABLE groups ADD COLUMN weight_version INTEGER;",
}
LISTS = ("sizes", "checksums")
# SQLite errors that a mistake of the program causes, rather than a damaged file.
MISTAKES = (sqlite3.ProgrammingError, sqlite3.IntegrityError, sqlite3.NotSupportedError)
FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)
GROUP_COLUMNS = tuple(field.name for field in fields(Group))
SELECT_GROUPS = f"SELECT {', '.join(GROUP_COLUMNS)} FROM groups "
INSERT_GROUP = f"INSERT INTO groups ({', '.join(GROUP_COLUMNS)}, payload_bytes) VALUES ({'?, ' * len(GROUP_COLUMNS)}?)"


class SqliteStore(Store):
    """The state below `path`. Raises InvalidFile where the database is of a newer version, damaged, or none.

    has_payloads: whether there are samples that only an older database can know: then none is made.
    """

    def __init__(self, path: Path, *, synchronous: str = "NORMAL", has_payloads: bool = False) -> None:
        self.path = path
        if has_payloads and not path.exists():
            raise self._lost("there is none")
        if path.exists():
            check_readable(path, "--buffer-dir")
        self.lock = threading.RLock()
        # Read on every call, written by few; emptied when a transaction fails.
        self._values: dict[str, Any] = {}
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
            self._quick_check()
        for known in range(version, VERSION) if version else ():
            self._connection.executescript(f"BEGIN; {MIGRATIONS[known]} PRAGMA user_version = {known + 1}; COMMIT;")
        if version == 0:
            self._connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        self._connection.execute(ADDED)

    def _lost(self, what: str) -> InvalidFile:
        return InvalidFile(
            f"{self.path}: the payloads beside it hold samples, and {what}: restore the database, with its -wal file, "
            "from a backup (slime-buffer backup), or move the payloads away to begin anew",
            field="buffer_dir",
            value=str(self.path),
            expected="the database that the payloads belong to",
        )

    def _quick_check(self) -> None:
        problems = [text for (text,) in self._connection.execute("PRAGMA quick_check(3)") if text != "ok"]
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
                # Inside a transaction, the transaction fails with the error.
                if isinstance(error, MISTAKES) or self._connection.in_transaction:
                    raise
                raise self._error_of(error) from error

    def get(self, name: str, default: Any = None) -> Any:
        with self.lock:
            if name not in self._values:
                rows = self._rows("SELECT value FROM state WHERE name = ?", name)
                self._values[name] = json.loads(rows[0][0]) if rows else None
            value = self._values[name]
        return default if value is None else value

    def put(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._rows(
            "INSERT INTO state VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            name,
            json.dumps(value),
        )

    def insert_groups(self, groups: Sequence[Group]) -> None:
        with self.lock:
            self._connection.executemany(
                INSERT_GROUP,
                (
                    (*(_column(name, getattr(group, name)) for name in GROUP_COLUMNS), sum(group.sizes))
                    for group in groups
                ),
            )

    def update_groups(self, indexes: Iterable[int], **columns: Any) -> None:
        if "sizes" in columns:
            columns["payload_bytes"] = sum(columns["sizes"])
        values = [_column(name, value) for name, value in columns.items()]
        assignments = ", ".join(f"{name} = ?" for name in columns)
        with self.lock:
            self._connection.executemany(
                f"UPDATE groups SET {assignments} WHERE group_index = ?", ((*values, index) for index in indexes)
            )

    def groups(
        self,
        *,
        states: Sequence[State] = (),
        indexes: Sequence[int] | None = None,
        after: int | None = None,
        limit: int = -1,
        in_no_step: bool = False,
    ) -> list[Group]:
        conditions: list[str] = ["TRUE"]
        values: list[Any] = []
        if states:
            conditions.append(f"state IN ({', '.join('?' * len(states))})")
            values += states
        if indexes is not None:
            # A JSON list, for SQLite bounds the number of its parameters.
            conditions.append("group_index IN (SELECT value FROM json_each(?))")
            values.append(json.dumps(list(indexes)))
        if after is not None:
            conditions.append("group_index > ?")
            values.append(after)
        if in_no_step:
            conditions.append("step IS NULL")
        query = f"{SELECT_GROUPS} WHERE {' AND '.join(conditions)} ORDER BY group_index LIMIT ?"
        return [_group(row) for row in self._rows(query, *values, limit)]

    def group_of_token(self, token: str) -> Group | None:
        return next(map(_group, self._rows(SELECT_GROUPS + "WHERE token = ?", token)), None)

    def groups_of_request(self, request: str) -> list[Group]:
        # A range, which the index serves: "/" is the character after ".".
        rows = self._rows(
            SELECT_GROUPS + "WHERE token >= ? AND token < ? ORDER BY group_index", f"{request}.", f"{request}/"
        )
        return list(map(_group, rows))

    def group_of_ended_token(self, token: str) -> Group | None:
        return next(map(_group, self._rows(SELECT_GROUPS + "WHERE ended_token = ?", token)), None)

    def due_leases(self, now: float) -> list[int]:
        return [i for (i,) in self._rows("SELECT group_index FROM groups WHERE expires_at <= ? ORDER BY 1", now)]

    def next_expiry(self) -> float | None:
        return self._rows("SELECT min(expires_at) FROM groups WHERE expires_at IS NOT NULL")[0][0]

    def weight_versions(self, states: Sequence[State]) -> list[tuple[int, State, int | None]]:
        query = f"WHERE state IN ({', '.join('?' * len(states))}) ORDER BY group_index"
        rows = self._rows(f"SELECT group_index, state, weight_version FROM groups {query}", *states)
        return [(index, State(state), version) for index, state, version in rows]

    def count(self, state: State) -> int:
        return self._rows("SELECT count(*) FROM groups WHERE state = ?", state)[0][0]

    def counts(self) -> dict[str, int]:
        return dict(self._rows("SELECT state, count(*) FROM groups GROUP BY state"))

    def reject_counts(self) -> dict[str, int]:
        return dict(self._rows("SELECT reject_reason, count(*) FROM groups WHERE state = 'rejected' GROUP BY 1"))

    def payload_bytes(self) -> int:
        return self._rows("SELECT coalesce(sum(payload_bytes), 0) FROM groups")[0][0]

    def payload_names(self) -> set[str]:
        return {name for (name,) in self._rows("SELECT payload FROM groups WHERE payload IS NOT NULL")}

    def step(self, step: int) -> Step | None:
        return next(map(_step, self._rows("SELECT * FROM steps WHERE step = ?", step)), None)

    def steps(self, *, after: int | None = None, upto: int | None = None) -> list[Step]:
        rows = self._rows(
            "SELECT * FROM steps WHERE (?1 IS NULL OR step > ?1) AND (?2 IS NULL OR step <= ?2) ORDER BY step",
            after,
            upto,
        )
        return [_step(row) for row in rows]

    def insert_step(self, step: Step) -> None:
        self._rows(
            "INSERT INTO steps VALUES (?, ?, ?, ?)", step.step, step.state, json.dumps(step.group_indexes), step.plan
        )

    def update_step(self, step: int, **columns: Any) -> None:
        assignments = ", ".join(f"{name} = ?" for name in columns)
        self._rows(f"UPDATE steps SET {assignments} WHERE step = ?", *columns.values(), step)

    def seal_record(self, step: int) -> dict[str, Any]:
        rows = self._rows("SELECT record FROM seal_records WHERE step = ?", step)
        return json.loads(rows[0][0]) if rows else {}

    def insert_seal_record(self, step: int, record: dict[str, Any]) -> None:
        self._rows("INSERT OR REPLACE INTO seal_records VALUES (?, ?)", step, json.dumps(record))

    def delete_step(self, step: int) -> None:
        self._rows("DELETE FROM steps WHERE step = ?", step)

    def prompt_batch(self, key: str) -> tuple[int, str | None] | None:
        return next(iter(self._rows("SELECT first, digest FROM prompt_batches WHERE key = ?", key)), None)  # type: ignore[arg-type]

    def prompt_batches(self) -> list[tuple[str, int, int, str | None]]:
        return self._rows("SELECT key, added, first, digest FROM prompt_batches ORDER BY first, key")  # type: ignore[return-value]

    def insert_prompt_batch(self, key: str, added: int, first: int, digest: str | None) -> None:
        self._rows("INSERT INTO prompt_batches VALUES (?, ?, ?, ?)", key, added, first, digest)

    def evaluation_prompts(self, dataset: str) -> list[bytes]:
        query = "SELECT template FROM evaluation_prompts WHERE dataset = ? ORDER BY position"
        return [template for (template,) in self._rows(query, dataset)]

    def insert_evaluation_prompts(self, dataset: str, templates: Sequence[bytes]) -> int:
        first = len(self.evaluation_prompts(dataset))
        with self.lock:
            self._connection.executemany(
                "INSERT INTO evaluation_prompts VALUES (?, ?, ?)",
                ((dataset, position, template) for position, template in enumerate(templates, first)),
            )
        return first

    def evaluation_datasets(self) -> list[str]:
        return [name for (name,) in self._rows("SELECT DISTINCT dataset FROM evaluation_prompts ORDER BY 1")]

    def close(self) -> None:
        with self.lock:
            self._connection.close()


def _column(name: str, value: Any) -> Any:
    return json.dumps(value) if name in LISTS else value


def _group(row: tuple[Any, ...]) -> Group:
    group = Group(*row)
    group.state = State(group.state)
    group.sizes, group.checksums = (tuple(json.loads(text)) for text in (group.sizes, group.checksums))  # type: ignore[arg-type]
    return group


def _step(row: tuple[Any, ...]) -> Step:
    return Step(row[0], State(row[1]), tuple(json.loads(row[2])), row[3])
