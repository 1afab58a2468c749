"""A PostgreSQL server of the machine's own package, in a directory of its own, that tests may kill."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import psycopg

# PostgreSQL refuses to run as root, so for root it runs as the user that its package creates.
USER = "postgres"


def missing() -> str:
    """Returns the reason why no server can be started here, or an empty text."""
    if _binaries() is None:
        return "PostgreSQL is not installed (Debian and Ubuntu: apt-get install postgresql)"
    if os.geteuid() == 0:
        try:
            pwd.getpwnam(USER)
        except KeyError:
            return f"PostgreSQL does not run as root, and there is no user {USER}"
        if shutil.which("setpriv") is None:
            return "PostgreSQL does not run as root, and there is no setpriv (Debian and Ubuntu: util-linux)"
    return ""


def _binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    on_path = shutil.which("postgres")
    return Path(on_path).resolve().parent if on_path and shutil.which("initdb") else None


class PostgresServer:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._names = map("run{}".format, itertools.count())
        self._account: list[str] = []
        if os.geteuid() == 0:
            user = pwd.getpwnam(USER)
            os.chown(directory, user.pw_uid, user.pw_gid)
            # Popen's own `user` would fork this process, whose threads of gRPC do not survive that.
            self._account = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--"]
        bin_directory = _binaries()
        assert bin_directory is not None
        self._bin = bin_directory
        self.data = directory / "data"
        words = [
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--data-checksums",
            "--no-sync",
        ]
        subprocess.run(
            [*self._account, str(self._bin / "initdb"), "-D", str(self.data), *words],
            check=True, capture_output=True, cwd=directory,
        )  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["-D", str(self.data), "-k", str(self.directory), "-h", ""]
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*self._account, str(self._bin / "postgres"), *words], stdout=log, stderr=log, cwd=self.directory
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.execute("SELECT 1")
                return
            except psycopg.OperationalError:
                assert self.process.poll() is None and time.monotonic() < deadline, self.log()
                time.sleep(0.05)

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def kill(self) -> None:
        """Kills every process of the server at once."""
        if self.process is None or self.process.poll() is not None:
            return
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in processes:
            # A process of the server may end by itself, and all do when its first one ends.
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        deadline = time.monotonic() + 30
        # Only the machine's first process can wait for the server's orphaned children, and not every init does.
        while any(map(_runs, processes[1:])) and time.monotonic() < deadline:
            time.sleep(0.01)

    def execute(self, query: str, schema: str = "public") -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url(schema), autocommit=True) as connection:
            cursor = connection.execute(query)
            return cursor.fetchall() if cursor.description else []

    def url(self, schema: str) -> str:
        return f"postgresql://postgres@/postgres?host={quote(str(self.directory))}&options=-csearch_path%3D{schema}"

    def new_store(self) -> str:
        """Returns the URL of an empty schema."""
        schema = next(self._names)
        self.execute(f"CREATE SCHEMA {schema}")
        return self.url(schema)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    # Other users cannot enter the directory of a test, and the path of a socket must be short.
    directory = Path(tempfile.mkdtemp(prefix="slime-postgres-", dir="/tmp"))
    try:
        server = PostgresServer(directory)
        try:
            server.start()
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
