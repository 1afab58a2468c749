"""Groups that are completed in one call share a file, and each frees its part when it leaves the buffer."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from buffer_samples import complete, finish

from slime.buffer.cli import main
from slime.buffer.service import RunningBuffer, serve
from slime.buffer.settings import BufferSettings
from slime.buffer.store.blobs import FilePayloads
from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.errors import InvalidFile, LeaseLost, OutOfSpace


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "state"


def start(directory: Path, **settings: object) -> RunningBuffer:
    return serve(BufferSettings(buffer_dir=str(directory), n_samples_per_prompt=2, **settings))  # type: ignore[arg-type]


def leased(client: BufferClient, count: int) -> list[tuple[str, list[Sample]]]:
    """Leases new groups; returns what completes them, with a reward that says which group it is."""
    client.add_prompts([f"p{number}" for number in range(count)])
    leases = client.lease_groups(count, worker_id="me")
    return [(lease.token, finish(lease.group.samples, lease.group.group_index)) for lease in leases]


def files(directory: Path, place: str = "payloads") -> list[Path]:
    return sorted(path for path in (directory / place).rglob("*") if path.is_file())


def rewards(client: BufferClient) -> dict[int, list[object]]:
    """Returns the rewards of all groups that have finished samples."""
    found: dict[int, list[object]] = {}
    for stored in client.read_groups():
        values = [sample.reward for sample in stored.group.samples]
        if values and None not in values:
            found[stored.group.group_index] = [*values]
    return found


def test_groups_free_their_parts_of_a_file_as_they_leave_in_whatever_way(directory: Path) -> None:
    with start(directory) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.complete_groups(leased(client, 6))
        (file,) = files(directory)
        assert file.name.startswith("0000000005-")
        client.drop_groups([0])
        client.drop_groups([1], quarantine=True)
        client.seal_step(0, 2)
        assert [sample.reward for sample in client.read_step(0, range(4))] == [2.0, 2.0, 3.0, 3.0]
        client.acknowledge_step(0)
        client.commit_steps(0)
        assert files(directory) == [file] and rewards(client) == {1: [1.0] * 2, 4: [4.0] * 2, 5: [5.0] * 2}
        assert client.requeue_groups("nobody", unsealed=True) == 2
        assert files(directory) == [file] and rewards(client) == {1: [1.0] * 2}
        client.drop_groups([1])
        assert files(directory) == []
        assert client.stats().damaged_payloads == 0


def test_the_samples_that_a_call_replaces_are_freed_and_so_are_those_of_a_token_that_occurs_twice(
    directory: Path,
) -> None:
    with start(directory) as service, BufferClient(service.address) as client:
        client.open_run("run")
        groups = leased(client, 3)
        for token, samples in groups:
            client.return_group(token, samples)
        returned = files(directory)
        assert len(returned) == 3
        again = client.lease_groups(3)
        groups = [(lease.token, finish(lease.group.samples, 7.0)) for lease in again]
        assert client.complete_groups([*groups, groups[0]]) == [False, False, False, True]
        (file,) = files(directory)
        assert file not in returned
        assert client.complete_groups(groups) == [True, True, True] and files(directory) == [file]
        client.seal_step(0, 3)
        assert [sample.reward for sample in client.read_step(0, range(6))] == [7.0] * 6
        client.acknowledge_step(0)
        client.commit_steps(0)
        assert files(directory) == []


def test_a_call_whose_lease_is_lost_leaves_no_file(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(directory) as service, BufferClient(service.address) as client:
        client.open_run("run")
        groups = leased(client, 3)
        write = service.buffer.payloads.write

        def lose(written: list) -> list[str]:
            names = write(written)
            client.drop_groups([1])
            return names

        with monkeypatch.context() as patch:
            patch.setattr(service.buffer.payloads, "write", lose)
            with pytest.raises(LeaseLost):
                client.complete_groups(groups)
        payloads = service.buffer.payloads
        assert files(directory) == [] and isinstance(payloads, FilePayloads) and not payloads._in_use
        assert client.complete_groups([groups[0], groups[2]]) == [False, False]
        assert len(files(directory)) == 1


@pytest.mark.parametrize("call", ["writev", "rename", "fsync"])
def test_a_full_disk_records_nothing_of_a_call(directory: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with start(directory, buffer_durability="power") as service, BufferClient(service.address) as client:
        client.open_run("run")
        groups = leased(client, 3)

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(OutOfSpace, match="3 groups: no space for"):
                client.complete_groups(groups)
        payloads = service.buffer.payloads
        assert files(directory) == [] and isinstance(payloads, FilePayloads) and not payloads._in_use
        assert client.stats().groups["leased"] == 3
        assert client.complete_groups(groups) == [False] * 3


@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "killed before the deletion"])
def test_a_file_of_which_a_part_was_freed_outlives_a_kill_until_the_rest_is_freed(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    copy = tmp_path / "copy"
    with start(directory) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.complete_groups(leased(client, 4))
        client.complete_groups(leased(client, 2))
        if not deleted:
            monkeypatch.setattr(service.buffer.payloads, "delete", lambda name: None)
        client.drop_groups([0, 2, 4, 5])
        assert len(files(directory)) == 2 - deleted
        # As a process leaves it that is killed.
        shutil.copytree(directory, copy)
    for kept in ({1: [1.0] * 2, 3: [3.0] * 2}, {3: [3.0] * 2}, {}):
        with start(copy) as service, BufferClient(service.address) as client:
            client.get_run()
            assert rewards(client) == kept and client.stats().damaged_payloads == 0
            assert len(files(copy)) == bool(kept) and len(files(copy, "lost+found")) == 1 - deleted
            if kept:
                client.drop_groups([min(kept)])
                assert len(files(copy)) == (len(kept) > 1)


def test_a_file_that_no_group_names_is_a_stray_although_others_of_the_call_were_stored(
    directory: Path, tmp_path: Path
) -> None:
    """A kill between the file and the state leaves the whole call behind, and one file."""
    with start(directory) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.complete_groups(leased(client, 2))
        stray, _ = service.buffer.payloads.write([(0, [b"x"]), (1, [b"y"])])
    with start(directory) as service, BufferClient(service.address) as client:
        assert rewards(client) == {0: [0.0] * 2, 1: [1.0] * 2}
    assert [path.name for path in files(directory, "lost+found")] == [Path(stray.partition("@")[0]).name]


def test_a_database_that_is_older_than_a_call_is_an_error(directory: Path, tmp_path: Path) -> None:
    older = tmp_path / "older"
    with start(directory) as service, BufferClient(service.address) as client:
        client.open_run("run")
        groups = leased(client, 1)
        with closing(sqlite3.connect(directory / "state.sqlite")) as reading, closing(sqlite3.connect(older)) as copy:
            reading.backup(copy)
        client.complete_groups([*groups, *leased(client, 2)])
    before = files(directory)
    shutil.move(older, directory / "state.sqlite")
    with pytest.raises(InvalidFile, match="is older than 1 file .* such as 000000/0000000002-"):
        start(directory)
    assert len(before) == 1 and files(directory) == before


def test_payloads_of_an_earlier_version_have_files_of_their_own(directory: Path) -> None:
    with start(directory) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts(["a", "b"])
        complete(client, 2)
    with closing(sqlite3.connect(directory / "state.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 4")
    before = files(directory)
    with start(directory) as service, BufferClient(service.address) as client:
        client.get_run()
        client.complete_groups(leased(client, 2))
        assert len(before) == 2 and len(files(directory)) == 3
        client.seal_step(0, 4)
        assert [sample.reward for sample in client.read_step(0, range(8))] == [1.0] * 4 + [2.0] * 2 + [3.0] * 2
        client.drop_groups([0])
        assert len(files(directory)) == 2
        client.seal_step(0, 3)
        client.acknowledge_step(0)
        client.commit_steps(0)
        assert files(directory) == []


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def command(*words: object, expect: int = 0) -> str:
        assert main(list(map(str, words))) == expect
        return capsys.readouterr().out

    return command


def test_a_damaged_group_is_named_and_costs_none_of_those_beside_it(directory: Path, command) -> None:
    with start(directory) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.complete_groups(leased(client, 3))
        size = next(client.list_groups()).payload_bytes
    (file,) = files(directory)
    data = bytearray(file.read_bytes())
    data[size + size // 2] ^= 4
    file.write_bytes(data)
    (file.parent / "0000000001-0123abcd").write_bytes(b"of a crash")
    found = command("check", directory, expect=1)
    assert "group 1 (completed): payload " in found and "0123abcd: left by a crash" in found
    assert found.endswith(": 2 problems\n")
    assert "1 file moved to " in command("repair", directory)
    with start(directory) as service, BufferClient(service.address) as client:
        client.get_run()
        assert rewards(client) == {0: [0.0] * 2, 2: [2.0] * 2}
        client.drop_groups([0, 1])
        assert files(directory) == [file]
        client.drop_groups([2])
        assert files(directory) == []


def test_a_backup_copies_a_file_once_and_is_a_whole_buffer(
    directory: Path, tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, copied = tmp_path / "copy", []
    copy2 = shutil.copy2

    def record(source: Path, target: Path) -> None:
        copied.append(source.name)
        copy2(source, target)

    with start(directory) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.complete_groups(leased(client, 3))
        client.add_prompts(["a"])
        complete(client, 1)
        client.drop_groups([1])
        monkeypatch.setattr(shutil, "copy2", record)
        assert "4 groups, samples of 3" in command("backup", directory, copy)
        assert sorted(copied) == [path.name for path in files(directory)] and len(copied) == 2
    shutil.rmtree(directory)
    assert command("check", copy).endswith(": no problems\n")
    with start(copy) as service, BufferClient(service.address) as client:
        client.get_run()
        assert rewards(client) == {0: [0.0] * 2, 2: [2.0] * 2, 3: [1.0] * 2}
        client.drop_groups([0, 2, 3])
        assert files(copy) == []
