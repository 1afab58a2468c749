"""The one connection to a PostgreSQL database that has the right to serve it.

It holds an advisory lock of its session, and every statement goes through that session: a server whose connection
breaks can write nothing from that moment on. A server that begins also raises the `epoch` of the database, so one whose
connection comes back knows whether another has served meanwhile; then it never writes again.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slime.buffer.store.base import Wait
from slime.buffer.store.urls import STORE
from slime.types.errors import (
    ConfigError,
    InvalidFile,
    InvalidSetting,
    MissingFile,
    NotAvailable,
    SlimeError,
    Unavailable,
)

log = logging.getLogger(__name__)

# First key of the advisory lock, whose second is the schema: locks are shared by all programs of a database.
LOCK_CLASS = 0x51173
# The database notices within 20 seconds that the machine of a server is gone, and frees its lock.
LOCK_SECONDS = 30.0
# Longest wait, since the connection broke, of a call that needs it. Clients give a call 10 seconds beyond its own wait,
# and repeat one that fails.
OUTAGE_SECONDS = 6.0
PAUSE_SECONDS = 0.2
CONNECTION = {
    "application_name": "slime-buffer", "client_encoding": "utf8", "target_session_attrs": "read-write",
    "connect_timeout": 5, "tcp_user_timeout": 20000,
    "keepalives_idle": 5, "keepalives_interval": 5, "keepalives_count": 3,
}  # fmt: skip
SESSION = {
    "tcp_keepalives_idle": "5", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3",
    "idle_in_transaction_session_timeout": "0", "statement_timeout": "0", "lock_timeout": "0",
}  # fmt: skip
# Classes of SQLSTATE after which the same call may succeed: connection, resources, operator, conflicts, read-only.
PASSING = ("08", "53", "57", "40", "25", "55")
DAMAGED = ("XX", "58")


class StandbyEnded(SlimeError):
    """A server that stood by was told to end."""


@dataclass
class _Outage:
    """A broken connection: since when, and the last attempt to make another."""

    since: float
    tried_at: float = 0.0
    error: Unavailable | None = None


class PostgresSession:
    """Thread-safe as far as its callers are: they hold the lock of the store. Raises InvalidSetting for a wrong URL."""

    connection: Any

    def __init__(self, url: str) -> None:
        self.name = url.partition("?")[0]
        self.psycopg = _load()
        self.server = f"{socket.gethostname()} (process {os.getpid()})"
        self.epoch = 0
        self.taken_over: Unavailable | None = None
        self._parameters = CONNECTION | self._parsed(url)
        self._lost: _Outage | None = None
        self._closing = threading.Event()

    def start(self, standby: Wait | None) -> None:
        """Connects, and takes the right to serve. Raises ConfigError for a database that cannot be used.

        standby: waits, by calls of this, for as long as another server uses the database; without it LOCK_SECONDS, for
        a server that has just died.
        """
        self.open()
        try:
            self._acquire(standby)
        except self.psycopg.Error as error:
            self.connection.close()
            raise self.unusable(error) from error
        except BaseException:
            self.connection.close()
            raise

    def _parsed(self, url: str) -> dict[str, Any]:
        try:
            return self.psycopg.conninfo.conninfo_to_dict(url)
        except self.psycopg.Error as error:
            raise InvalidSetting.must_be(
                STORE, "a URL that PostgreSQL's clients take", got=self.name, reason=line(error)
            ) from None

    def open(self) -> None:
        """Connects, without the right to serve. Raises ConfigError for a database that cannot be used."""
        try:
            self.connection = self._connect()
        except self.psycopg.Error as error:
            raise self.unusable(error) from error

    def _connect(self) -> Any:
        connection = self.psycopg.connect(**self._parameters, autocommit=True)
        try:
            (schema,) = connection.execute("SELECT current_schema()").fetchone()
            (encoding,) = connection.execute("SHOW server_encoding").fetchone()
            if schema is None:
                raise InvalidSetting.must_be(
                    STORE, "a database with a schema that exists", got=self.name, reason="create the schema first"
                )
            if encoding != "UTF8":
                raise InvalidSetting.must_be(
                    STORE, "a database in UTF-8", got=self.name, reason=f"its encoding is {encoding}"
                )
            session = SESSION | ({"idle_session_timeout": "0"} if connection.info.server_version >= 140000 else {})
            (commit,) = connection.execute("SHOW synchronous_commit").fetchone()
            if commit == "off":
                session["synchronous_commit"] = "on"
            # The schema stays the one that was found, whichever are created later.
            connection.execute("SELECT set_config('search_path', quote_ident(%s), false)", [schema])
            for name, value in session.items():
                connection.execute("SELECT set_config(%s, %s, false)", [name, value])
        except BaseException:
            connection.close()
            raise
        return connection

    def _try_lock(self, connection: Any) -> bool:
        query = "SELECT pg_try_advisory_lock(%s, oid::int) FROM pg_namespace WHERE nspname = current_schema()"
        return connection.execute(query, [LOCK_CLASS]).fetchone()[0]

    def _acquire(self, standby: Wait | None) -> None:
        """Waits until no other server uses the database."""
        deadline = time.monotonic() + LOCK_SECONDS
        told = False
        while not self._locked(standby):
            if standby is None and time.monotonic() >= deadline:
                raise InvalidSetting.must_be(
                    STORE, "a database or schema of its own", got=self.name, reason=f"{self._holder()} uses it"
                )
            if not told:
                log.warning("%s: %s uses it; waiting for its end", self.name, self._holder())
                told = True
            self._pause(standby)

    def _locked(self, standby: Wait | None) -> bool:
        try:
            if self.connection.closed:
                self.connection = self._connect()
            return self._try_lock(self.connection)
        except self.psycopg.OperationalError:
            if standby is None:
                raise
            self.connection.close()
            return False

    def _holder(self) -> str:
        with suppress(self.psycopg.Error):
            row = self.connection.execute("SELECT server FROM buffer_meta").fetchone()
            if row is not None:
                return f"the slime-buffer on {row[0]}"
        return "another slime-buffer"

    def _pause(self, standby: Wait | None) -> None:
        if standby is None:
            time.sleep(PAUSE_SECONDS)
        elif standby(PAUSE_SECONDS):
            raise StandbyEnded(f"{self.name}: {self._holder()} uses it")

    def ready(self, wait_seconds: float = OUTAGE_SECONDS) -> None:
        """Connects again where the connection is broken. Raises Unavailable where that fails."""
        if self.taken_over is not None:
            raise self.taken_over
        if not self.connection.closed:
            return
        if self._lost is None:
            self._lost = _Outage(time.monotonic())
        lost = self._lost
        # A call that waited for another's attempt does not begin one of its own.
        if lost.error is not None and time.monotonic() - lost.tried_at < PAUSE_SECONDS:
            raise lost.error
        while True:
            try:
                self.connection = self._reconnected()
                self._lost = None
                log.warning("%s: connected again", self.name)
                return
            except (self.psycopg.Error, ConfigError) as error:
                lost.tried_at = time.monotonic()
                if self._closing.is_set() or lost.tried_at - lost.since >= wait_seconds:
                    lost.error = Unavailable(f"{self.name} does not answer: {line(error)}")
                    raise lost.error from error
            self._closing.wait(PAUSE_SECONDS)

    def _reconnected(self) -> Any:
        connection = self._connect()
        try:
            free = self._try_lock(connection)
            epoch, server = connection.execute("SELECT epoch, server FROM buffer_meta").fetchone()
            if epoch != self.epoch:
                self.taken_over = Unavailable(
                    f"{self.name}: the slime-buffer on {server} has taken over: this one serves no more"
                )
                raise self.taken_over
            if not free:
                # The session that broke is not over yet, or another server is about to take over.
                raise self.psycopg.OperationalError("another session holds its lock")
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        self._closing.set()

    def cut(self) -> None:
        """Ends the connection under a call that waits for an answer, from another thread."""
        with suppress(OSError, self.psycopg.Error), socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)

    def unusable(self, error: Exception) -> SlimeError:
        state = getattr(error, "sqlstate", None)
        # An error while connecting has no state.
        if state is None and re.search('database ".*" does not exist', str(error)):
            return MissingFile(
                f"{STORE} {self.name}: {line(error)}", field=STORE, value=self.name, expected="a database that exists"
            )
        if state is not None and state[:2] in DAMAGED:
            return InvalidFile(
                f"{self.name} is damaged: {line(error)}: restore a backup",
                field=STORE, value=self.name, expected="the whole state of a buffer",
            )  # fmt: skip
        return InvalidSetting(
            f"{STORE} {self.name}: {line(error)}", field=STORE, value=self.name, expected="a database that answers"
        )


def _load() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise NotAvailable.not_installed(STORE, "psycopg", "slime-buffer[postgresql]") from error
    return psycopg


def line(error: BaseException) -> str:
    """Returns the first line of a message: the others hold the query, or hints for its author."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def look(url: str) -> str:
    """Returns who uses a database, or an empty text. Raises ConfigError for one that cannot be used."""
    session = PostgresSession(url)
    session.open()
    with session.connection:
        return "" if session._try_lock(session.connection) else session._holder()
