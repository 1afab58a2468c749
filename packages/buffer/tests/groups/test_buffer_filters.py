from __future__ import annotations

import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from buffer_samples import finish

from slime.buffer import filters
from slime.buffer.buffer import Buffer
from slime.buffer.settings import BufferSettings
from slime.types.clients import BufferClient
from slime.types.errors import Busy, PluginError
from slime.types.rpc import RpcSettings


@pytest.fixture
def plugin(tmp_path):
    def write(body: str, parameters: str = "args, rollout_id, buffer, num_samples") -> str:
        path = tmp_path / "plugin.py"
        path.write_text(f"def choose({parameters}):\n" + textwrap.indent(textwrap.dedent(body), "    "))
        return f"{path}:choose"

    return write


def test_a_filter_chooses_among_waiting_groups(connected, plugin, write_jsonl):
    path = plugin("""
        assert rollout_id is None and args.n_samples_per_prompt == 2
        # Oldest attempts are dropped, the best comes first.
        buffer[:] = [group for group in buffer if group[0].reward != -1]
        chosen = sorted(buffer, key=lambda group: -(group[0].reward or 0))[:num_samples]
        for group in chosen:
            buffer.remove(group)
        return chosen
    """)
    prompts = write_jsonl([{"input": "q"}])
    client = connected(buffer_filter_path=path, n_samples_per_prompt=2, prompt_data=prompts)
    for lease, reward in zip(client.lease_groups(4), (0.1, -1.0, 0.9, 0.5), strict=True):
        client.return_group(lease.token, finish(lease.group.samples, reward))
    assert [lease.group.group_index for lease in client.lease_groups(2)] == [2, 3]
    assert client.stats().rejected == {"buffer_filter": 1}
    # The rest, then the dataset.
    assert [lease.group.group_index for lease in client.lease_groups(2)] == [0, 4]


def test_the_default_by_its_path(connected):
    client = connected(buffer_filter_path="slime.rollout.data_source.pop_first")
    client.add_prompts(["a", "b", "c"])
    assert [lease.group.group_index for lease in client.lease_groups(2)] == [0, 1]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "returned NoneType, expected a list"),
        ("return buffer[:num_samples]", "must remove"),
        ("taken = buffer[:]; buffer.clear(); return taken", "returned 2 groups, expected at most 1"),
        ("return [[]]", "not in the buffer"),
        ("buffer.append([]); return []", "put a group into the buffer"),
    ],
)
def test_a_filter_that_breaks_its_contract(connected, plugin, body, message):
    client = connected(buffer_filter_path=plugin(body))
    client.add_prompts(["a", "b"])
    with pytest.raises(PluginError, match=message):
        client.lease_groups(1)
    assert client.stats().groups["ready"] == 2


def test_a_filter_that_cannot_be_loaded(plugin, tmp_path):
    for path in ("no.such.module", str(tmp_path / "none.py") + ":f", plugin("return []", "args")):
        with pytest.raises(PluginError, match="--buffer-filter-path"):
            Buffer(BufferSettings(buffer_filter_path=path))


def test_other_calls_go_on_while_a_filter_chooses(serving, plugin):
    """The function itself calls the buffer, which takes away one of the groups that it chooses."""
    running = serving(
        buffer_filter_path=plugin("""
        from slime.types.clients import BufferClient
        from slime.types.rpc import RpcSettings
        with BufferClient(args.address, settings=RpcSettings(insecure=True, call_timeout_seconds=5)) as client:
            client.drop_groups([2], "by hand")
            client.add_prompts(["c"])
        buffer[:] = buffer[2:]
        chosen, buffer[:] = buffer[:2], []
        return chosen
    """)
    )
    running.buffer.leases.buffer_filter.args.address = running.address
    with BufferClient(running.address) as client:
        client.open_run("run")
        client.add_prompts(["a", "b", "x", "y", "z"])
        assert [lease.group.group_index for lease in client.lease_groups(2)] == [3]
        # Group 5 came too late to be seen.
        assert client.stats().rejected == {"buffer_filter": 3, "by hand": 1}
        assert client.stats().groups["ready"] == 1


def test_a_filter_that_does_not_return_keeps_others_waiting_for_a_bounded_time(serving, plugin, monkeypatch):
    monkeypatch.setattr(filters, "TURN_SECONDS", 0.1)
    running = serving(buffer_filter_path=plugin("args.begun.set(); args.go_on.wait(60); return []"))
    args = running.buffer.leases.buffer_filter.args
    args.begun, args.go_on = threading.Event(), threading.Event()
    quick = RpcSettings(insecure=True, retry_seconds=0.0)
    with (
        ThreadPoolExecutor(1) as pool,
        BufferClient(running.address) as client,
        BufferClient(running.address, settings=quick) as other,
    ):
        client.open_run("run")
        client.add_prompts(["a"])
        other.writer = client.writer
        first = pool.submit(client.lease_groups, 1)
        assert args.begun.wait(30)
        try:
            with pytest.raises(Busy, match="choose: the function has run for more than 0.1 s"):
                other.lease_groups(1)
            assert other.stats().groups["ready"] == 1
        finally:
            args.go_on.set()
        assert first.result(30) == []
