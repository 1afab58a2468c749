from __future__ import annotations

import textwrap

import pytest
from buffer_samples import finish

from slime.buffer.buffer import Buffer
from slime.buffer.settings import BufferSettings
from slime.types.errors import PluginError


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
