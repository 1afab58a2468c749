"""SIGKILL of the buffer and of its database while workers and a trainer run: no group is lost or trained on twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from buffer_samples import finish
from buffer_workload import buffer_process, listening, train_everything
from kept_ports import kept_port
from postgres_server import PostgresServer, missing, postgres_server

from slime.types.clients import BufferClient
from slime.types.errors import Unavailable
from slime.types.rpc import RpcSettings


@pytest.fixture
def port() -> int:
    """A server that was killed leaves it to the next one."""
    return kept_port()


@pytest.fixture
def flags(storage: Callable[[], dict[str, str]], tmp_path: Path, port: int) -> list[str]:
    settings = {**(storage() or {"buffer_dir": str(tmp_path / "state")}), "port": str(port)}
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.stores("sqlite", "postgresql and s3")
def test_a_buffer_that_is_killed_goes_on_where_it_was(flags: list[str], tmp_path: Path) -> None:
    with ExitStack() as stack:
        process = stack.enter_context(buffer_process(*flags))
        address = listening(process)

        def kill(_: int) -> None:
            nonlocal process
            process.kill()
            process = stack.enter_context(buffer_process(*flags))

        train_everything(address, 32, kill, every=3)
    assert not [path for path in tmp_path.glob("state/payloads/*/*") if path.is_file()]


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    """A database server that no other test uses."""
    if reason := missing():
        pytest.skip(reason)
    with postgres_server() as server:
        yield server


SESSIONS = "FROM pg_stat_activity WHERE application_name = 'slime-buffer' AND pid <> pg_backend_pid()"


def test_a_database_that_is_killed_in_the_middle_of_transactions_loses_nothing(
    database: PostgresServer, tmp_path: Path
) -> None:
    flags = ["--buffer-store", database.new_store(), "--buffer-dir", str(tmp_path / "samples")]
    with buffer_process(*flags) as process:
        address = listening(process)

        def kill(step: int) -> None:
            if step % 2:
                # Only the session's process is killed: the database ends all others and recovers by itself.
                ((pid,),) = database.execute(f"SELECT pid {SESSIONS}")
                os.kill(pid, signal.SIGKILL)
            else:
                database.kill()
                database.start()

        train_everything(address, 32, kill, every=3)
        assert process.poll() is None


def test_a_second_server_takes_over_from_one_that_is_killed(
    postgres: PostgresServer, tmp_path: Path, port: int
) -> None:
    flags = ["--buffer-store", postgres.new_store(), "--buffer-dir", str(tmp_path / "samples"), "--port", str(port)]
    with ExitStack() as stack:
        serving = stack.enter_context(buffer_process(*flags, "--standby"))
        address = listening(serving)
        waiting = stack.enter_context(buffer_process(*flags, "--standby"))
        assert waiting.stderr is not None
        assert f"(process {serving.pid}) uses it" in waiting.stderr.readline()

        def kill(step: int) -> None:
            if step == 3:
                serving.kill()

        train_everything(address, 32, kill, every=3)
        assert waiting.poll() is None


def test_a_server_that_another_has_taken_over_from_writes_nothing(postgres: PostgresServer, tmp_path: Path) -> None:
    store = postgres.new_store()
    flags = ["--buffer-store", store, "--buffer-dir", str(tmp_path / "samples"), "--standby"]
    with buffer_process(*flags) as first:
        address = listening(first)
        ((session,),) = postgres.execute(f"SELECT pid {SESSIONS}")
        with buffer_process(*flags) as second, BufferClient(address, settings=RpcSettings(retry_seconds=0)) as client:
            client.open_run("run")
            client.add_prompts(["a", "b"], key="k")
            (lease,) = client.lease_groups(1)
            first.send_signal(signal.SIGSTOP)
            # As the database does once the machine of a session has not answered for 20 seconds.
            postgres.execute(f"SELECT pg_terminate_backend({session})")
            with BufferClient(listening(second), client.writer) as other:
                assert other.lease_groups(1)[0].group.samples[0].prompt == "b"
                before = other.stats()
                first.send_signal(signal.SIGCONT)
                for write in (
                    lambda: client.complete_group(lease.token, finish(lease.group.samples)),
                    lambda: client.add_prompts(["c"]),
                    lambda: client.open_run("run"),
                ):
                    with pytest.raises(Unavailable):
                        write()
                _, errors = first.communicate(timeout=30)
                assert first.returncode == 1 and f"(process {second.pid}) has taken over" in errors
                assert other.stats() == before
                assert other.complete_group(lease.token, finish(lease.group.samples)) is False


def test_a_server_that_stands_by_ends_at_a_signal(postgres: PostgresServer, tmp_path: Path) -> None:
    flags = ["--buffer-store", postgres.new_store(), "--buffer-dir", str(tmp_path / "samples"), "--standby"]
    with buffer_process(*flags) as first:
        listening(first)
        with buffer_process(*flags) as second:
            assert second.stderr is not None and "waiting" in second.stderr.readline()
            second.send_signal(signal.SIGTERM)
            assert second.wait(30) == 0
