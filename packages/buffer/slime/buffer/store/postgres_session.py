"""The buffer's connection to PostgreSQL, which at most one server of a database holds at a time.

The session holds an advisory lock, and every statement goes through the session, so a server whose connection breaks
can no longer write. A server that starts also raises the `epoch` of the database. A server that reconnects thereby
knows whether another one has served meanwhile; if so, it never writes again.
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
    OutOfSpace,
    SlimeError,
    Unavailable,
)

log = logging.getLogger(__name__)

# First key of the advisory lock; the second one is the schema. All programs that use a database share its locks.
LOCK_CLASS = 0x51173
# Seconds to wait for the lock: the database notices within 20 seconds that a server's machine is gone, and frees it.
LOCK_SECONDS = 30.0
# Longest wait of a call for a broken connection, in seconds. Clients allow 10 seconds beyond their own wait, and retry.
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
# Classes of SQLSTATE worth a retry: connection, resources, operator intervention, conflicts, read-only.
PASSING = ("08", "53", "57", "40", "25", "55")
DAMAGED = ("XX", "58")
DISK_FULL = "53100"


class StandbyEnded(SlimeError):
    """A standby server was told to end."""


@dataclass
class _Outage:
    """A broken connection: when it was noticed, and the last attempt to reconnect. Times are monotonic seconds."""

    since: float
    tried_at: float = 0.0
    error: Unavailable | None = None


class PostgresSession:
    """A session with the right to serve. Callers hold the store's lock. Raises InvalidSetting for an invalid URL."""

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
        """Connects and takes the right to serve. Raises ConfigError for a database that cannot be used.

        standby: called again and again while another server uses the database. Without it the wait ends after
        LOCK_SECONDS, enough for the lock of a server that has just died.
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
            if connection.info.server_version >= 120000:
                # A plan that is made while a table is empty would serve until the next vacuum, however full it is then.
                session["plan_cache_mode"] = "force_custom_plan"
            (commit,) = connection.execute("SHOW synchronous_commit").fetchone()
            if commit == "off":
                session["synchronous_commit"] = "on"
            # Pin the schema that was found, whichever are created later.
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
        warned = False
        while not self._locked(standby):
            if standby is None and time.monotonic() >= deadline:
                raise InvalidSetting.must_be(
                    STORE, "a database or schema of its own", got=self.name, reason=f"{self._holder()} uses it"
                )
            if not warned:
                log.warning("%s: %s uses it; waiting for its end", self.name, self._holder())
                warned = True
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
        """Reconnects if the connection is broken. Raises Unavailable if that fails."""
        if self.taken_over is not None:
            raise self.taken_over
        if not self.connection.closed:
            return
        if self._lost is None:
            self._lost = _Outage(time.monotonic())
        lost = self._lost
        # A call that waited for another call's attempt makes none of its own.
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
                    f"{self.name}: the slime-buffer on {server} has taken over; this one no longer serves"
                )
                raise self.taken_over
            if not free:
                # The broken session has not ended yet, or another server is about to take over.
                raise self.psycopg.OperationalError("another session holds its lock")
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        self._closing.set()

    def cut(self) -> None:
        """Closes the connection from another thread, even while a call waits for an answer."""
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
        if state == DISK_FULL:
            return OutOfSpace(f"{self.name}: {line(error)}", field=STORE, value=self.name, expected="free space")
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
    """Returns the first line of an error's message; the others are the query and hints."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def look(url: str) -> str:
    """Returns the server that uses a database, '' for none. Raises ConfigError for a database that cannot be used."""
    session = PostgresSession(url)
    session.open()
    with session.connection:
        return "" if session._try_lock(session.connection) else session._holder()
