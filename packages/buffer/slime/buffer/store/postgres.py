"""State in a PostgreSQL database."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from slime.buffer.store.base import State, Wait
from slime.buffer.store.postgres_session import DAMAGED, DISK_FULL, OUTAGE_SECONDS, PASSING, PostgresSession, line
from slime.buffer.store.sql import (
    ADDED,
    CONTENT_TABLES,
    CONTENTS,
    FILL_CONTENTS,
    LACKS_CONTENTS,
    SCHEMA,
    TABLES,
    VERSION,
    SqlStore,
)
from slime.buffer.store.urls import STORE
from slime.types.errors import (
    DataLoss,
    InvalidField,
    InvalidFile,
    InvalidSetting,
    MissingFile,
    OutOfSpace,
    SlimeError,
    Unavailable,
    counted,
)

log = logging.getLogger(__name__)

META = "CREATE TABLE buffer_meta (version INTEGER NOT NULL, epoch INTEGER NOT NULL, server TEXT)"
FROM_3 = (
    f"{CONTENTS} {FILL_CONTENTS.format(groups='groups')} ALTER TABLE groups DROP COLUMN template, DROP COLUMN summaries"
)
TYPES = {"INTEGER": "BIGINT", "BLOB": "BYTEA", "REAL": "DOUBLE PRECISION", "TEXT": 'TEXT COLLATE "C"'}
CLOSE_SECONDS = 10.0


class PostgresStore(SqlStore):
    """The state in the first schema of the search path. Raises ConfigError for a database that cannot be used.

    has_payloads: returns whether there are samples, which a new database would not know; if so, no state is created.
    standby: see `PostgresSession.start`.
    existing: create no state, and raise MissingFile if there is none.
    """

    in_list = "group_index = ANY(?)"
    older = "it was restored from an older backup"

    def __init__(
        self,
        url: str,
        *,
        power: bool = False,
        has_payloads: Callable[[], bool] = lambda: False,
        standby: Wait | None = None,
        existing: bool = False,
    ) -> None:
        super().__init__()
        self._in_transaction = False
        self._session = PostgresSession(url)
        self._session.start(standby)
        self._psycopg = self._session.psycopg
        self.name = self._session.name
        try:
            self._open(power, has_payloads, existing)
        except self._psycopg.Error as error:
            self._session.connection.close()
            raise self._session.unusable(error) from error
        except BaseException:
            self._session.connection.close()
            raise

    def check(self) -> None:
        # A call that holds the lock notices a takeover by itself.
        if self.lock.acquire(blocking=False):
            try:
                with suppress(Unavailable, self._psycopg.Error):
                    self._ready(wait_seconds=0)
                    self._session.connection.execute("SELECT 1")
            finally:
                self.lock.release()
        if self._session.taken_over is not None:
            raise self._session.taken_over

    # Opening.

    def _open(self, power: bool, has_payloads: Callable[[], bool], existing: bool) -> None:
        connection = self._session.connection
        if power and connection.execute("SHOW fsync").fetchone()[0] == "off":
            raise InvalidSetting.conflict(
                "--buffer-durability power", f"{STORE} {self.name}", "fsync is off in that database"
            )
        query = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema() AND tablename = ANY(%s)"
        found = {name for (name,) in connection.execute(query, [["buffer_meta", *TABLES]])}
        with connection.transaction():
            if "buffer_meta" in found:
                self._check_version()
            missing = {"buffer_meta", *TABLES} - found
            if "buffer_meta" in found:
                missing -= self._migrated(missing)
            if not found:
                if has_payloads():
                    raise self._lost("it is empty")
                if existing:
                    raise MissingFile(
                        f"no buffer in {self.name}", field=STORE, value=self.name, expected="the database of a run"
                    )
                for statement in (META, SCHEMA):
                    connection.execute(_translated_types(statement))
                connection.execute("INSERT INTO buffer_meta VALUES (%s, 0, NULL)", [VERSION])
            elif missing:
                raise self._lost(f"it has no table {', '.join(sorted(missing))}")
            else:
                self._check_state()
            for statement in ADDED:
                connection.execute(_translated_types(statement))
            (self._session.epoch,) = connection.execute(
                "UPDATE buffer_meta SET epoch = epoch + 1, server = %s RETURNING epoch", [self._session.server]
            ).fetchone()

    def _migrated(self, missing: set[str]) -> set[str]:
        """Brings a schema of version 3 or 4 to this version, and returns the tables that this adds."""
        connection = self._session.connection
        ((version,),) = connection.execute("SELECT version FROM buffer_meta").fetchall()
        added = {*CONTENT_TABLES} if version == 3 else set()
        if version not in (3, 4) or missing != added:
            return set()
        log.info(
            "bringing %s to schema version %d; this waits for sessions that read it, such as pg_dump",
            self.name,
            VERSION,
        )
        if version == 3:
            connection.execute(_translated_types(FROM_3))
        connection.execute("UPDATE buffer_meta SET version = %s", [VERSION])
        return added

    def _check_version(self) -> None:
        rows = self._session.connection.execute("SELECT version FROM buffer_meta").fetchall()
        if len(rows) != 1:
            raise self._lost(f"its table buffer_meta has {counted(len(rows), 'row')}")
        if rows[0][0] > VERSION:
            raise InvalidFile(
                f"{self.name}: schema version {rows[0][0]}, expected at most {VERSION}: made by a newer slime-buffer",
                field=STORE, value=rows[0][0], expected=f"at most {VERSION}",
            )  # fmt: skip

    def _check_state(self) -> None:
        # Reads every row, values stored out of line included: a damaged page raises an error.
        for table in TABLES:
            self._session.connection.execute(f"SELECT count(hashtext(t::text)) FROM {table} t")
        if self._session.connection.execute(LACKS_CONTENTS).fetchone()[0]:
            raise self._lost("groups lack their prompts or summaries")

    def _lost(self, problem: str) -> InvalidFile:
        return InvalidFile(
            f"{self.name}: {problem}, and there are samples that belong to it: restore the database from a backup, or "
            "move the samples away to start afresh",
            field=STORE, value=self.name, expected="the database that the samples belong to",
        )  # fmt: skip

    def _ready(self, wait_seconds: float = OUTAGE_SECONDS) -> None:
        """Reconnects if the connection is broken. Raises Unavailable if that fails, or cannot save a transaction."""
        if self._session.connection.closed:
            if self._in_transaction:
                raise Unavailable(f"{self.name}: the connection broke during a transaction")
            # Another server may have written since.
            self._values.clear()
        self._session.ready(wait_seconds)

    # Queries.

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self.lock:
            self._again("BEGIN")
            self._in_transaction = True
            try:
                yield
                self._session.connection.execute("COMMIT")
            except BaseException as error:
                self._values.clear()
                with suppress(self._psycopg.Error):
                    if not self._session.connection.closed:
                        self._session.connection.execute("ROLLBACK")
                known = self._error_of(error)
                if known is None:
                    raise
                raise known from error
            finally:
                self._in_transaction = False

    def _again(self, query: str, values: Sequence[Any] = ()) -> Any:
        """Executes a query outside of a transaction, a second time if the connection turns out to be broken."""
        for attempt in range(2):
            self._ready()
            try:
                return self._session.connection.execute(query, values)
            except self._psycopg.Error as error:
                if attempt or not self._session.connection.closed:
                    raise self._error_of(error) or error from error
        raise AssertionError

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        query, plain = _translated(query), list(map(_plain, values))
        with self.lock:
            if self._in_transaction:
                self._ready()
                cursor = self._session.connection.execute(query, plain)
            else:
                cursor = self._again(query, plain)
            return cursor.fetchall() if cursor.description else []

    def _many(self, query: str, rows: Iterable[Sequence[Any]]) -> None:
        plain = [list(map(_plain, row)) for row in rows]
        with self.lock:
            self._ready()
            if len(plain) == 1:
                self._session.connection.execute(_translated(query), plain[0])
            elif plain:
                self._session.connection.cursor().executemany(_translated(query), plain)

    def _list(self, indexes: Iterable[int]) -> list[int]:
        return list(indexes)

    def _error_of(self, error: BaseException) -> SlimeError | None:
        """Returns the error for callers; None if `error` did not come from the database."""
        if not isinstance(error, self._psycopg.Error):
            return None
        state = error.sqlstate or ""
        if state == DISK_FULL:
            return OutOfSpace(f"{self.name}: {line(error)}", field=STORE, value=self.name, expected="free space")
        if state[:2] in DAMAGED:
            return DataLoss(
                f"{self.name}: {line(error)}: stop the buffer, and restore the database",
                field=STORE, value=self.name, expected="the whole state of a buffer",
            )  # fmt: skip
        if self._session.connection.closed or state[:2] in PASSING:
            if state[:2] in ("57", "25"):
                # The database stops, or accepts no more writes: another connection may reach a server that does.
                self._session.connection.close()
            return Unavailable(f"{self.name} does not answer: {line(error)}")
        if isinstance(error, self._psycopg.DataError) and "NUL" in str(error):
            return InvalidField("text", "a NUL character", "text without NUL characters")
        return None

    def close(self) -> None:
        self._session.close()
        if not self.lock.acquire(timeout=CLOSE_SECONDS):
            # A call holds the lock while it waits for a database that is connected but does not answer.
            self._session.cut()
            self.lock.acquire()
        try:
            self._session.connection.close()
        finally:
            self.lock.release()


@cache
def _translated(query: str) -> str:
    return query.replace("?", "%s")


def _translated_types(statement: str) -> str:
    for of_sqlite, of_postgres in TYPES.items():
        statement = statement.replace(of_sqlite, of_postgres)
    return statement


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, State) else value
