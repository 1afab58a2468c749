"""In-process data sources: groups, as today's plug-ins use them, and the flat kind of older plug-ins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.data import RolloutDataSource, RolloutDataSourceWithBuffer, Sample
from slime.rollout.data_source import DataSource, pop_first
from slime.types.errors import InvalidField, InvalidSetting, MissingFile, PluginError, WrongState


@pytest.fixture
def args(write_jsonl, tmp_path):
    rows = [{"input": f"q{i}", "label": i, "metadata": {"n": i}} for i in range(3)]
    state = str(tmp_path / "checkpoint")
    return SimpleNamespace(
        prompt_data=write_jsonl(rows), label_key="label", n_samples_per_prompt=2, rollout_shuffle=True,
        save=state, load=state,
    )  # fmt: skip


def test_groups(args):
    source = RolloutDataSource(args)
    assert isinstance(source, DataSource) and len(source) == 3
    groups = source.get_samples(7)
    assert [[s.index for s in group] for group in groups] == [[2 * i, 2 * i + 1] for i in range(7)]
    assert [group[0].group_index for group in groups] == list(range(7))
    assert source.epoch_id == 2 and source.sample_offset == 1
    for epoch in (groups[:3], groups[3:6]):
        assert sorted(group[0].prompt for group in epoch) == ["q0", "q1", "q2"]
    first, second = groups[0]
    first.metadata["changed"] = True
    assert "changed" not in second.metadata and isinstance(first.label, int)
    with pytest.raises(WrongState, match="RolloutDataSourceWithBuffer"):
        source.add_samples(groups)


def test_save_and_load(args):
    source = RolloutDataSource(args)
    source.get_samples(4)
    source.update_metadata({"curriculum": 2})
    source.save(7)
    resumed = RolloutDataSource(args)
    resumed.load(7)
    assert resumed.get_metadata() == {"curriculum": 2}
    expected, found = source.get_samples(4), resumed.get_samples(4)
    assert [[(s.index, s.prompt) for s in g] for g in found] == [[(s.index, s.prompt) for s in g] for g in expected]
    with pytest.raises(MissingFile):
        resumed.load(8)
    resumed.load(None)
    del args.load, args.save
    RolloutDataSource(args).save(1)


def test_what_comes_back_goes_out_first(args):
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(2)
    source.add_samples(groups)
    assert source.get_buffer_length() == 2
    found = source.get_samples(3)
    assert found[:2] == groups and found[2][0].group_index == 2 and source.get_buffer_length() == 0
    with pytest.raises(InvalidField, match=r"samples\[0\].*2 samples"):
        source.add_samples([groups[0][:1]])
    with pytest.raises(InvalidField, match="a group"):
        source.add_samples(groups[0])


def test_a_filter_by_path(args, tmp_path):
    (tmp_path / "last.py").write_text("def last(args, rollout_id, buffer, num_samples):\n    return [buffer.pop()]\n")
    args.buffer_filter_path = str(tmp_path / "last.py") + ":last"
    source = RolloutDataSourceWithBuffer(args)
    groups = source.get_samples(2)
    source.add_samples(groups)
    assert source.get_samples(1) == groups[1:]
    args.buffer_filter_path = "no.such.thing"
    with pytest.raises(PluginError):
        RolloutDataSourceWithBuffer(args)


def test_pop_first():
    buffer = [["a"], ["b"], ["c"]]
    assert pop_first(None, None, buffer, 2) == [["a"], ["b"]] and buffer == [["c"]]
    assert pop_first(None, None, buffer, 2) == [["c"]] and buffer == []


class Prompts:
    def sample(self, count):
        return [f"p{i}" for i in range(count)]


class PromptsAlone(RolloutDataSource):
    """Selects groups as the example of the original documentation does."""

    def __init__(self, dataset, args):
        self.dataset, self.args = dataset, args

    def get_samples(self, num_samples):
        return [Sample(prompt=p) for p in self.dataset.sample(num_samples)]


class BestFirst(RolloutDataSourceWithBuffer):
    """Selects groups and removes none, as the example of the original documentation does."""

    def buffer_filter(self, args, buffer, num_samples):
        return sorted(buffer, key=lambda s: s.reward, reverse=True)[:num_samples]


def test_the_flat_shape():
    source = RolloutDataSource(Prompts(), SimpleNamespace())
    assert [s.prompt for s in source.get_samples(2)] == ["p0", "p1"]
    source.add_samples([Sample()])
    listed = RolloutDataSource(["a", "b"], SimpleNamespace())
    assert [(s.prompt, s.index) for s in listed.get_samples(3)] == [("a", 0), ("b", 1), ("a", 2)] and len(listed) == 2

    best = BestFirst(Prompts(), SimpleNamespace())
    best.add_samples([Sample(prompt=str(r), reward=r) for r in (1, 3, 2)])
    assert [s.prompt for s in best.get_samples(2)] == ["3", "2"]
    assert [s.prompt for s in best.get_samples(3)] == ["1", "p0", "p1"]


def test_samples_made_of_prompts_alone_keep_the_labels_of_their_rows(write_jsonl):
    rows = [{"input": "same", "label": 1}, {"input": "same", "label": 2, "metadata": {"level": 3}}]
    path = write_jsonl(rows)
    source = PromptsAlone.from_args(SimpleNamespace(prompt_data=path, label_key="label"))
    for _ in range(2):
        samples = source.get_samples(2)
        source.dataset.fill_labels(samples)
        assert [(s.label, s.metadata) for s in samples] == [(1, {}), (2, {"level": 3})]
    mine = [Sample(prompt=source.dataset.sample(1)[0], label="mine"), Sample(prompt="other")]
    source.dataset.fill_labels(mine)
    assert [sample.label for sample in mine] == ["mine", None]


def test_without_prompts():
    with pytest.raises(InvalidField, match="dataset: got no prompts, expected at least one prompt"):
        RolloutDataSource([], SimpleNamespace()).get_samples(1)
    with pytest.raises(InvalidSetting, match="--prompt-data"):
        RolloutDataSource(SimpleNamespace())
    source = RolloutDataSource(SimpleNamespace(rollout_global_dataset=False, n_samples_per_prompt=2))
    assert [[s.prompt for s in group] for group in source.get_samples(1)] == [["", ""]] and len(source) == 0


@pytest.mark.parametrize("both", [False, True])
def test_slime_rollout_is_shared_with_the_rollout_package(tmp_path: Path, both):
    """With this package alone it is a namespace; with slime-rollout its `__init__` finds our part."""
    extra = []
    if both:
        package = tmp_path / "slime" / "rollout"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text('__path__ = __import__("pkgutil").extend_path(__path__, __name__)\n')
        (package / "mine.py").write_text("here = True\n")
        extra = [str(tmp_path)]
    inherited = [path for path in sys.path if not (Path(path) / "slime" / "rollout" / "__init__.py").is_file()]
    script = "import slime.rollout.data_source" + ("; import slime.rollout.mine" if both else "")
    for order in ([*inherited, *extra], [*extra, *inherited]):
        run = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, order))},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
