"""Queries of the calls that every group takes read as many rows as they need, and not all groups."""

from __future__ import annotations

from buffer_samples import complete

from slime.buffer.service import serve
from slime.buffer.settings import BufferSettings
from slime.buffer.store.sqlite import SqliteStore
from slime.types.clients import BufferClient
from slime.types.rpc import RpcSettings

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
