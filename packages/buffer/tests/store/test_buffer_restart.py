"""Survival of a restart from disk, a crash after a checkpoint, a full disk, a second server."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from buffer_samples import complete, finish

from slime.buffer.buffer import Buffer
from slime.buffer.groups.handed_in import HandedIn
from slime.buffer.groups.prompts import encode_prompt
from slime.buffer.service import serve
from slime.buffer.settings import BufferSettings
from slime.buffer.store import blobs
from slime.buffer.waits import Caller
from slime.types.clients import BufferClient
from slime.types.codec import sample_from_proto, sample_to_proto
from slime.types.errors import InvalidFile, InvalidSetting, LeaseLost, OutOfSpace, WrongState


@pytest.fixture
def settings(tmp_path: Path, write_jsonl, storage):
    prompts = write_jsonl([{"input": f"q{i}"} for i in range(5)])
    return storage() | dict(prompt_data=prompts, rollout_shuffle=True, buffer_dir=str(tmp_path / "state"))


@pytest.mark.stores
@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_restart_keeps_everything(settings, durability):
    settings["buffer_durability"] = durability
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        complete(client, 3)
        client.seal_step(0, 2)
        client.store_plan(0, {"p": 1})
        leased, returned = client.lease_groups(2)
        partial = returned.group.samples
        partial[0].response = "so far"
        client.return_group(returned.token, partial)
        client.add_prompts(["mine"], key="k")
        client.add_prompts(["held out"], dataset="eval")
        before = client.stats()
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        assert client.stats() == before
        writer = client.get_run()
        assert writer.incarnation == 1
        assert client.seal_step(0, 2) and client.get_plan(0) == {"p": 1}
        assert client.renew_leases([leased.token]) == []
        assert client.complete_group(leased.token, finish(leased.group.samples)) is False
        assert client.add_prompts(["mine"], key="k").duplicate
        assert client.read_evaluation_set("eval")[0].samples[0].prompt == "held out"
        assert [lease.group.samples[0].response for lease in client.lease_groups(2)] == ["so far", ""]
        indexes = complete(client, 4)
        # Group indexes and the epoch continue.
        assert indexes == [6, 7, 8, 9] and client.stats().epoch == 1


@pytest.mark.stores
def test_a_crash_replays_what_the_checkpoint_does_not_hold(settings):
    settings["release_committed"] = False
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        complete(client, 8)
        sealed = []
        for step in range(4):
            sealed.append(client.seal_step(step, 2))
            client.store_plan(step, {"step": step})
            if step < 3:
                client.acknowledge_step(step)
        client.commit_steps(0)
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        # The checkpoint holds step 1, though its commit never came.
        assert client.open_run("run", last_committed_step=1).next_step == 2
        states = {state: step for _, state, _, step in client.read_groups(states=["committed", "sealed"])}
        assert set(states) == {"committed", "sealed"}
        for step in (2, 3):
            assert client.seal_step(step, 2) == sealed[step]
            assert client.store_plan(step, {"other": 1}) == {"step": step}
            client.acknowledge_step(step)
        client.commit_steps(3)
        assert client.stats().groups["committed"] == 8
        # An older checkpoint: its samples are still there.
        assert client.open_run("run", last_committed_step=0).next_step == 1
        assert client.seal_step(1, 2) == sealed[1]
        assert len(list(client.read_step(1, [0, 1]))) == 2


@pytest.mark.stores
def test_a_new_buffer_joins_a_resumed_run(settings):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        assert client.open_run("run", last_committed_step=99).next_step == 100
        complete(client, 1)
        with pytest.raises(WrongState, match="step 99 was never sealed"):
            client.seal_step(99, 1)
        client.seal_step(100, 1)


@pytest.mark.stores
def test_a_run_that_goes_back_generates_released_samples_again(settings, caplog):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        complete(client, 5)
        sealed = []
        for step in range(4):
            sealed.append(client.seal_step(step, 1))
            if step < 3:
                client.store_plan(step, {"step": step})
                client.acknowledge_step(step)
        before = client.stats().payload_bytes
        client.commit_steps(1)
        assert 0 < client.stats().payload_bytes < before
        assert [len(each.group.samples) for each in client.read_groups()] == [0, 0, 1, 1, 1]
        assert len(list(Path(settings["buffer_dir"]).glob("payloads/*/*"))) == 3
        with pytest.raises(WrongState, match="step 1 is committed and its samples were released"):
            client.rewind_steps(0)
        # From the newest checkpoint everything else is replayed.
        client.open_run("run", last_committed_step=1)
        assert client.seal_step(2, 1) == sealed[2] and client.get_plan(2) == {"step": 2}
        # From an older one: the prompt of step 1 comes again, and what was made after it is used in its order.
        assert client.open_run("run", last_committed_step=0).next_step == 1
        assert "step 1 and what follows is generated again" in caplog.text
        states = [(each.group.group_index, each.state) for each in client.read_groups()]
        assert states == [(0, "committed"), (1, "ready"), *((index, "completed") for index in (2, 3, 4))]
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.get_run()
        assert complete(client, 1) == [1]
        for step in (1, 2, 3):
            assert [summary.group_index for summary in client.seal_step(step, 1)] == [step]
            assert len(list(client.read_step(step, [0]))) == 1
            client.acknowledge_step(step)
        client.commit_steps(3)
        assert client.stats().groups["committed"] == 4


def test_one_server_a_directory(settings):
    with serve(BufferSettings(**settings)):
        with pytest.raises(InvalidSetting, match="another slime-buffer uses it"):
            serve(BufferSettings(**settings))
    serve(BufferSettings(**settings)).stop()


@pytest.mark.stores
def test_other_prompts_in_an_old_directory(settings, write_jsonl):
    serve(BufferSettings(**settings)).stop()
    other = settings | {"prompt_data": write_jsonl([{"input": "z"}], "other.jsonl")}
    for changed in (other, settings | {"rollout_seed": 1}):
        with pytest.raises(InvalidSetting, match="must be 5 prompts.*, from which --buffer-dir was filled"):
            serve(BufferSettings(**changed))


def test_a_newer_schema_is_refused(settings):
    serve(BufferSettings(**settings)).stop()
    connection = sqlite3.connect(Path(settings["buffer_dir"]) / "state.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(InvalidFile, match="schema version 99"):
        serve(BufferSettings(**settings))


def test_a_file_that_is_no_database(settings):
    directory = Path(settings["buffer_dir"])
    directory.mkdir()
    (directory / "state.sqlite").write_text("no database " * 100)
    with pytest.raises(InvalidFile, match="not a database"):
        serve(BufferSettings(**settings))


def test_a_directory_where_the_database_belongs(settings):
    (Path(settings["buffer_dir"]) / "state.sqlite").mkdir(parents=True)
    with pytest.raises(InvalidFile, match="state.sqlite is a directory"):
        serve(BufferSettings(**settings))


def test_a_temporary_directory_goes_with_the_service():
    service = serve(BufferSettings())
    directory = service.buffer.store.path.parent
    assert directory.is_dir()
    service.stop()
    assert not directory.exists()


@pytest.mark.stores
def test_a_full_disk_records_nothing(settings, monkeypatch):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        (lease,) = client.lease_groups(1)
        samples = finish(lease.group.samples)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(blobs.os, "rename", full)
            for call in (client.complete_group, client.return_group):
                with pytest.raises(OutOfSpace, match="group 0: no space for"):
                    call(lease.token, samples)
        assert not list(Path(settings["buffer_dir"]).glob("payloads/*/*"))
        stats = client.stats()
        assert (stats.groups["leased"], stats.payload_bytes) == (1, 0)
        assert client.complete_group(lease.token, samples) is False


def test_a_full_database_records_nothing(settings):
    buffer = Buffer(BufferSettings(**settings))
    try:
        connection = buffer.store._connection
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        from slime.buffer.sources.base import Prompt

        with pytest.raises(OutOfSpace, match="full"):
            buffer.add_prompts([encode_prompt(Prompt("x" * 100_000))], key="k", dataset="")
        connection.execute("PRAGMA max_page_count = 1000000")
        assert buffer.add_prompts([encode_prompt(Prompt("x" * 100_000))], key="k", dataset="") == (1, 0, False)
    finally:
        buffer.close()


def test_a_limit_on_file_size(settings):
    script = """
        import resource, sys
        from slime.buffer.service import serve
        from slime.buffer.settings import BufferSettings
        from slime.types.clients import BufferClient
        from slime.types.errors import OutOfSpace
        with serve(BufferSettings(buffer_dir=sys.argv[1])) as service, BufferClient(service.address) as client:
            client.open_run("run")
            client.add_prompts(["p"])
            (lease,) = client.lease_groups(1)
            (sample,) = lease.group.samples
            sample.response, sample.tokens, sample.response_length = "x" * 3_000_000, [1, 2], 1
            sample.reward, sample.status = 1.0, sample.Status.COMPLETED
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
            try:
                client.complete_group(lease.token, [sample])
            except OutOfSpace as error:
                print("refused:", error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            print(client.stats().groups["leased"], client.complete_group(lease.token, [sample]))
    """
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), settings["buffer_dir"]],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert "refused: group 0: no space for" in run.stdout and run.stdout.endswith("1 False\n"), run.stderr


@pytest.mark.stores
def test_many_workers_share_no_group(settings):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        done: list[int] = []

        def work() -> None:
            for _ in range(6):
                done.extend(complete(client, 2))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(done) == list(range(48))
        assert len(client.seal_step(0, 48)) == 48


@pytest.mark.stores
def test_a_lease_that_ends_while_its_group_is_written(settings):
    """The payload is written outside the transaction; the lease may be lost meanwhile."""
    now = [0.0]
    buffer = Buffer(BufferSettings(**settings), clock=lambda: now[0])
    try:
        writer, _ = buffer.open_run("run", -1)
        (leased,) = buffer.lease(writer, 1, ttl=5, wait=0, worker="w", caller=Caller())
        write = buffer.payloads.write

        def slow(*arguments):
            name = write(*arguments)
            now[0] = 6.0
            buffer.expire()
            return name

        buffer.payloads.write = slow  # type: ignore[method-assign]
        with pytest.raises(LeaseLost):
            samples = finish(map(sample_from_proto, leased.samples))
            buffer.complete(writer, [HandedIn(leased.group.token or "", list(map(sample_to_proto, samples)))])
        assert buffer.store.payload_names() == set()
        assert not list(Path(settings["buffer_dir"]).glob("payloads/*/*"))
    finally:
        buffer.close()
