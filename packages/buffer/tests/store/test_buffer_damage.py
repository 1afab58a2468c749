"""Damaged files: a damaged payload costs its group, not the run; a lost database costs no payload."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from buffer_samples import complete, finish

from slime.buffer.service import serve
from slime.buffer.settings import BufferSettings
from slime.buffer.store.sql import ADDED, INDEXES, SCHEMA
from slime.types.clients import BufferClient
from slime.types.errors import DataLoss, InvalidFile, OutOfSpace


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def settings(directory: Path, write_jsonl, storage) -> dict:
    return storage() | dict(prompt_data=write_jsonl([{"input": f"q{i}"} for i in range(9)]), buffer_dir=str(directory))


def payloads(directory: Path, place: str = "payloads") -> list[Path]:
    return sorted(path for path in (directory / place).rglob("*") if path.is_file())


def cut(path: Path) -> None:
    os.truncate(path, 10)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES = pytest.mark.parametrize("damage", [cut, flip, os.unlink])


@pytest.mark.stores
@DAMAGES
def test_a_returned_group_goes_back_to_its_prompt(settings, directory, damage):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        (lease,) = client.lease_groups(1)
        client.return_group(lease.token, finish(lease.group.samples))
        damage(payloads(directory)[0])
        leased = client.lease_groups(2)
        assert [(lease.group.group_index, lease.group.samples[0].response) for lease in leased] == [(0, ""), (1, "")]
        assert leased[0].group.samples[0].prompt == "q0"
        assert client.stats().damaged_payloads == 1
        client.complete_group(leased[0].token, finish(leased[0].group.samples))
        assert len(client.seal_step(0, 1)) == 1


@pytest.mark.stores
@DAMAGES
@pytest.mark.parametrize("sealed", [False, True])
def test_a_restart_sets_a_damaged_group_aside_and_the_run_goes_on(settings, directory, damage, sealed, caplog):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        complete(client, 3)
        if sealed:
            client.seal_step(0, 2)
            client.store_plan(0, {"old": 1})
    damage(payloads(directory)[0])
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        assert "group 0 is set aside" in caplog.text
        assert (client.stats().groups["quarantined"], client.stats().damaged_payloads) == (1, 1)
        client.open_run("run")
        assert not list(client.list_groups(states=["sealed"]))
        assert [s.group_index for s in client.seal_step(0, 2)] == [1, 2]
        assert len(list(client.read_step(0, [0, 1]))) == 2
        assert client.store_plan(0, {"new": 1}) == {"new": 1}
        (gone,) = client.list_groups(states=["quarantined"])
        assert gone.group_index == 0 and gone.reason.startswith("damaged: payload ")
        # Reading all groups returns the damaged one without its samples.
        assert [len(stored.group.samples) for stored in client.read_groups()] == [0, 1, 1]


@pytest.mark.stores
@DAMAGES
def test_damage_while_serving_costs_the_group(settings, directory, damage):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        complete(client, 4)
        damage(payloads(directory)[1])
        sealed = [s.group_index for s in client.seal_step(0, 2)]
        if damage is flip:
            # The damage is noticed when the step is read, not when it is sealed.
            assert sealed == [0, 1]
            for leave in (True, False):
                assert client.stats().groups["sealed"] == 2
                with pytest.raises(DataLoss, match="group 1: sample 0 is not what was stored"):
                    list(client.read_step(0, [0, 1], leave_damaged=leave))
            sealed = [s.group_index for s in client.seal_step(0, 2)]
        assert sealed == [0, 2]
        assert [s.response for s in client.read_step(0, [0, 1])] == ["345", "345"]
        assert client.stats().groups["quarantined"] == 1


@pytest.mark.stores
@DAMAGES
def test_a_replayed_step_is_checked_when_the_run_is_opened(settings, directory, damage):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        complete(client, 3)
        client.seal_step(0, 2)
        client.acknowledge_step(0)
        damage(payloads(directory)[0])
        client.open_run("run")
        assert [s.group_index for s in client.seal_step(0, 2)] == [1, 2]


VERSION_3 = """
CREATE TABLE groups (
    group_index INTEGER PRIMARY KEY, dataset TEXT NOT NULL, state TEXT NOT NULL, template BLOB NOT NULL,
    first_sample INTEGER NOT NULL, num_samples INTEGER NOT NULL,
    payload TEXT, sizes TEXT NOT NULL, checksums TEXT NOT NULL, payload_bytes INTEGER NOT NULL, summaries BLOB,
    worker TEXT, token TEXT, expires_at REAL, attempt INTEGER NOT NULL,
    ended_token TEXT, ended_by TEXT, step INTEGER, reject_reason TEXT, weight_version INTEGER
);
"""
TO_VERSION_3 = f"""
ALTER TABLE groups RENAME TO groups_4; {VERSION_3}
INSERT INTO groups SELECT
    group_index, dataset, state, template, first_sample, num_samples, payload, sizes, checksums, payload_bytes,
    summaries, worker, token, expires_at, attempt, ended_token, ended_by, step, reject_reason, weight_version
FROM groups_4 LEFT JOIN group_templates USING (group_index) LEFT JOIN group_summaries USING (group_index);
DROP TABLE groups_4; {INDEXES}
DROP TABLE group_templates; DROP TABLE group_summaries; PRAGMA user_version = 3;
"""
TO_VERSION_1 = """
ALTER TABLE groups DROP COLUMN checksums; ALTER TABLE prompt_batches DROP COLUMN digest;
ALTER TABLE groups DROP COLUMN weight_version; PRAGMA user_version = 1;
"""


def columns(database: sqlite3.Connection) -> dict[str, list[tuple]]:
    """Returns the columns of each table and index. `prompt_batches` has got one of its columns later."""
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_schema")]
    found = {name: database.execute(f"SELECT * FROM pragma_table_xinfo('{name}')").fetchall() for name in names}
    found |= {
        f"index {name}": database.execute(f"SELECT * FROM pragma_index_xinfo('{name}')").fetchall() for name in names
    }
    database.close()
    return found


TO_VERSION_4 = "PRAGMA user_version = 4;"


@pytest.mark.parametrize("older", [TO_VERSION_4, TO_VERSION_3, TO_VERSION_3 + TO_VERSION_1], ids=["4", "3", "1"])
def test_a_database_of_an_older_version_is_brought_to_this_version(settings, directory, older):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        complete(client, 2)
        (lease,) = client.lease_groups(1)
        client.add_prompts(["mine"], key="k")
    connection = sqlite3.connect(directory / "state.sqlite")
    connection.executescript(older)
    connection.close()
    for _ in range(2):
        with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
            client.get_run()
            assert len(list(client.read_step(0, range(len(client.seal_step(0, 2)))))) == 2
            # Version 1 has no digests of prompts.
            same = "whatever" if TO_VERSION_1 in older else "mine"
            assert client.add_prompts([same], key="k").duplicate
            assert [group.group_index for group in client.list_groups(["ready"])] == [3]
        with closing(sqlite3.connect(directory / "state.sqlite")) as connection:
            # An earlier version would take groups that share a file for lost ones.
            assert connection.execute("PRAGMA user_version").fetchone() == (5,)
    fresh = sqlite3.connect(":memory:")
    fresh.executescript(SCHEMA + ";".join(ADDED))
    assert columns(sqlite3.connect(directory / "state.sqlite")) == columns(fresh)
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.get_run()
        client.complete_group(lease.token, finish(lease.group.samples))
        assert [sample.prompt for sample in lease.group.samples] == ["q2"]


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("table", ["group_templates", "group_summaries"])
def test_groups_that_lost_their_prompts_or_summaries_are_an_error(settings, directory, table, version):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        complete(client, 2)
    with sqlite3.connect(directory / "state.sqlite") as connection:
        connection.execute(f"DELETE FROM {table} WHERE group_index = 1")
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(InvalidFile, match="is damaged: groups lack their prompts or summaries: restore a backup"):
        serve(BufferSettings(**settings))


def test_a_disk_that_is_too_full_for_a_newer_version_is_named_and_nothing_is_lost(settings, directory, monkeypatch):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts(["x" * 100_000], key="k")
        complete(client, 2)
    with sqlite3.connect(directory / "state.sqlite") as connection:
        connection.executescript(TO_VERSION_3 + "VACUUM;")
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.close()
    connect = sqlite3.connect

    def small(*arguments: object, **options: object) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.execute(f"PRAGMA max_page_count = {pages + 3}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", small)
    with pytest.raises(OutOfSpace, match="state.sqlite: database or disk is full"):
        serve(BufferSettings(**settings))
    monkeypatch.undo()
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.get_run()
        assert len(list(client.read_step(0, range(len(client.seal_step(0, 2)))))) == 2


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("lose", [remove, empty])
def test_a_lost_database_is_an_error_and_no_payload_is_touched(settings, directory, lose):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        complete(client, 3)
    before = payloads(directory)
    lose(directory / "state.sqlite")
    for _ in range(2):
        with pytest.raises(InvalidFile, match="restore the database"):
            serve(BufferSettings(**settings))
    assert payloads(directory) == before


@pytest.mark.parametrize("checkpointed", [0, 1, 2])
def test_a_database_that_was_copied_without_its_wal_is_an_error(settings, directory, tmp_path, checkpointed):
    copy = tmp_path / "copy"
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        if checkpointed:
            complete(client, checkpointed)
            service.buffer.store._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        complete(client, 3)
        shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    before = payloads(copy)
    with pytest.raises(InvalidFile, match="-wal file"):
        serve(BufferSettings(**settings | {"buffer_dir": str(copy)}))
    assert payloads(copy) == before and len(before) == 3 + checkpointed


def test_a_damaged_database_is_an_error_at_the_start(settings, directory):
    settings["prompt_data"] = None
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts([f"p{i}" for i in range(2000)])
    path = directory / "state.sqlite"
    data = bytearray(path.read_bytes())
    for start in range(4096, len(data) - 4096, 8 * 4096):
        data[start : start + 4096] = bytes(range(256)) * 16
    path.write_bytes(data)
    with pytest.raises(InvalidFile, match="state.sqlite"):
        serve(BufferSettings(**settings))


def test_a_database_that_breaks_while_serving_is_named(settings, directory):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts([f"p{i}" for i in range(2000)])
        connection = service.buffer.store._connection
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA cache_size = 0")
        path = directory / "state.sqlite"
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (path.stat().st_size - 4096))
        for call in (client.stats, lambda: client.lease_groups(1), lambda: client.seal_step(0, 1)):
            with pytest.raises(DataLoss, match=r"state\.sqlite: database disk image is malformed"):
                call()


@pytest.mark.stores
def test_strays_of_a_crash_are_kept_aside(settings, directory):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        complete(client, 1)
    shard = directory / "payloads" / "000000"
    (shard / "0000000000-0123abcd").write_bytes(b"of a crash")
    (shard / "0000000000-0123abce.part").write_bytes(b"x")
    (shard / "notes.txt").write_bytes(b"of the user")
    (directory / "payloads" / "more").write_bytes(b"of the user")
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        (stored,) = client.read_groups(states=["completed"])
        assert stored.group.samples[0].response == "345"
    assert len(payloads(directory)) == 1
    assert [path.name for path in payloads(directory, "lost+found")] == ["0000000000-0123abcd", "notes.txt", "more"]
