"""Queries of the calls that every group takes read as many rows as they need, and not all groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from buffer_samples import complete, finish

from slime.buffer.groups.steps import Steps
from slime.buffer.service import serve
from slime.buffer.settings import BufferSettings
from slime.buffer.store.base import CompletedGroup, Group, State
from slime.buffer.store.sqlite import SqliteStore
from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.errors import InvalidField
from slime.types.rpc import RpcSettings
from slime.v1 import buffer_pb2

NUM_GPUS = 0


def test_a_group_goes_from_lease_to_commit_without_a_scan_of_all_groups() -> None:
    with (
        serve(BufferSettings(n_samples_per_prompt=1), RpcSettings()) as service,
        BufferClient(service.address) as client,
    ):
        client.open_run("run")
        client.add_prompts([f"prompt {number}" for number in range(64)])
        store = service.buffer.store
        assert isinstance(store, SqliteStore)
        statements: list[str] = []
        store._connection.set_trace_callback(statements.append)
        complete(client, 3)
        client.seal_step(0, 3)
        assert len(list(client.read_step(0, range(3)))) == 3
        client.acknowledge_step(0)
        client.commit_steps(0)
        store._connection.set_trace_callback(None)
        queries = {query for query in statements if query.startswith(("SELECT", "UPDATE", "DELETE"))}
        assert any("expires_at <=" in query for query in queries)
        scans = []
        for query in sorted(queries):
            with store.lock:
                plan = [row[-1] for row in store._connection.execute(f"EXPLAIN QUERY PLAN {query}")]
            scans += [(query, step) for step in plan if step.startswith("SCAN groups")]
        assert not scans


@pytest.mark.stores
def test_a_reader_of_few_samples_loads_the_groups_that_these_are_in(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serving(n_samples_per_prompt=2)
    with BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts([f"prompt {number}" for number in range(6)])
        (lease,) = client.lease_groups(1)
        one, two = finish(lease.group.samples)
        three = Sample.from_dict(two.to_dict())
        two.rollout_id = three.rollout_id = 8
        client.complete_group(lease.token, [one, two, three])
        complete(client, 5)
        client.seal_step(0, 6)
        loaded: list[int] = []
        load = service.buffer.store.groups

        def groups(**which: Any) -> Any:
            found = load(**which)
            loaded.extend(group.group_index for group in found)
            return found

        monkeypatch.setattr(service.buffer.store, "groups", groups)
        read = [(sample.group_index, sample.index) for sample in client.read_step(0, [12, 4, 2, 11, 3])]
        assert read == [(5, 11), (1, 3), (0, 1), (5, 10), (1, 2)]
        assert sorted(loaded) == [0, 1, 5]


def test_a_reader_of_the_first_samples_counts_those_of_the_first_groups_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serve(BufferSettings(n_samples_per_prompt=2), RpcSettings()) as service,
        BufferClient(service.address) as client,
    ):
        client.open_run("run")
        client.add_prompts([f"prompt {number}" for number in range(6)])
        complete(client, 6)
        client.seal_step(0, 6)
        counted: list[int] = []
        count = service.buffer.store.sample_counts
        monkeypatch.setattr(service.buffer.store, "sample_counts", lambda of: [counted.extend(of), count(of)][1])
        assert [sample.index for sample in client.read_step(0, [2, 0])] == [2, 0]
        assert counted == [0, 1, 2]
        for position in (12, -1):
            with pytest.raises(InvalidField, match="0 to 11"):
                list(client.read_step(0, [1, position]))


@pytest.mark.stores
def test_a_sealed_group_has_its_payload_size_and_summaries_without_a_group_being_made(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serving(n_samples_per_prompt=2)
    with BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts([f"prompt {number}" for number in range(3)])
        complete(client, 3)
        store = service.buffer.store
        groups = store.completed_groups()
        assert [CompletedGroup(g.group_index, g.payload, sum(g.sizes), None) for g in store.groups()] == [
            group._replace(summaries=None) for group in groups
        ]
        decoded = [buffer_pb2.SealStepResponse.FromString(group.summaries).samples for group in groups]
        assert [[sample.index for sample in samples] for samples in decoded] == [[0, 1], [2, 3], [4, 5]]
        assert store.completed_groups() == store.completed_groups(indexes=[2, 0, 1]) == groups
        assert store.completed_groups(limit=2) == groups[:2]
        monkeypatch.setattr(store, "groups", None)
        sealed = client.seal_step(0, 2)
        assert [summary.group_index for summary in sealed] == [0, 0, 1, 1]
        client.acknowledge_step(0)
        client.commit_steps(0)
        assert [group.group_index for group in store.completed_groups()] == [2]


def test_sealing_many_groups_takes_as_many_statements_as_sealing_one() -> None:
    counts = []
    with (
        serve(BufferSettings(n_samples_per_prompt=1), RpcSettings()) as service,
        BufferClient(service.address) as client,
    ):
        client.open_run("run")
        client.add_prompts([f"prompt {number}" for number in range(65)])
        complete(client, 65)
        store = service.buffer.store
        assert isinstance(store, SqliteStore)
        for step, groups in enumerate((1, 64)):
            statements: list[str] = []
            store._connection.set_trace_callback(statements.append)
            sealed = client.seal_step(step, groups)
            client.acknowledge_step(step)
            store._connection.set_trace_callback(None)
            counts.append(len(statements))
            assert len(sealed) == groups
        assert len(list(client.list_groups(["acknowledged"]))) == 65
    assert counts[1] <= counts[0] + 1


def test_sealing_a_step_reads_no_group_that_was_rejected_for_an_earlier_one(tmp_path: Path) -> None:
    """Counted in instructions of SQLite's virtual machine, of which each row that is read takes a few."""
    counts = []
    for rejected in (0, 1000):
        store = SqliteStore(tmp_path / f"{rejected}.sqlite")
        steps = Steps(store, None, release_committed=True)  # type: ignore[arg-type]
        with store.transaction():
            store.insert_groups([group(index, State.REJECTED, step=0) for index in range(rejected)])
            store.insert_groups([group(rejected, State.REJECTED), group(rejected + 1, State.COMPLETED)])
            store.put("acknowledged_step", 0)
        ticks: list[None] = []
        store._connection.set_progress_handler(partial(ticks.append, None), 1)
        with store.transaction():
            sealed = steps.seal(1, 1, lambda groups: True)
        store._connection.set_progress_handler(None, 1)
        assert sealed is not None and buffer_pb2.SealStepResponse.FromString(sealed).rejected == {"zero_std": 1}
        counts.append(len(ticks))
        store.close()
    assert counts[1] < counts[0] + 100


def test_a_page_of_groups_takes_no_longer_where_many_wait(tmp_path: Path) -> None:
    """Counted as in the test before; a start reads all groups that may have samples in such pages."""
    counts = []
    for waiting in (200, 5000):
        store = SqliteStore(tmp_path / f"{waiting}.sqlite")
        with store.transaction():
            store.insert_groups([group(index, State.READY, template=b"prompt") for index in range(waiting)])
        ticks: list[None] = []
        store._connection.set_progress_handler(partial(ticks.append, None), 100)
        found = store.groups(states=[State.READY, State.LEASED, State.COMPLETED], after=10, limit=64)
        store._connection.set_progress_handler(None, 1)
        assert [each.group_index for each in found] == [*range(11, 75)]
        assert {each.template for each in found} == {b"prompt"}
        counts.append(len(ticks))
        store.close()
    assert counts[1] < 2 * counts[0]


def test_a_group_that_changes_its_state_does_not_write_its_prompt_again(tmp_path: Path) -> None:
    groups, prompt, samples = 32, 20_000, b"s" * 5_000
    store = SqliteStore(tmp_path / "state.sqlite")
    steps = Steps(store, None, release_committed=True)  # type: ignore[arg-type]
    store._connection.execute("PRAGMA wal_autocheckpoint = 0")
    with store.transaction():
        store.insert_groups([group(index, State.READY, template=b"p" * prompt) for index in range(groups)])
        store.update_groups(range(groups), state=State.COMPLETED, summaries=samples)
    log = tmp_path / "state.sqlite-wal"
    before = log.stat().st_size
    assert before > groups * (prompt + len(samples))
    with store.transaction():
        steps.seal(0, groups, lambda groups: True)
    with store.transaction():
        steps.acknowledge(0)
    assert log.stat().st_size - before < groups * prompt / 10
    with store.transaction():
        assert steps.commit(0) == []
    assert [(g.template, g.state) for g in store.groups()] == [(b"p" * prompt, State.COMMITTED)] * groups
    assert {g.summaries for g in store.completed_groups(indexes=range(groups))} == {None}
    store.close()


def group(index: int, state: State, step: int | None = None, template: bytes = b"") -> Group:
    reason = "zero_std" if state is State.REJECTED else None
    return Group(index, "train", state, template, index, 1, step=step, reject_reason=reason)
