"""Recorded rollouts: what is written is read, of both kinds of file; what is neither is refused, and never run."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.recordings.__main__ import main
from slime.rollout.recordings.paths import check_template, path_of
from slime.rollout.recordings.rollouts import (
    group_samples,
    head_and_tail,
    read_rollout,
    record_evaluation,
    record_rollout,
    write_rollout,
)
from slime.types import Sample, SampleGroup
from slime.types.errors import InvalidField, InvalidFile, InvalidSetting, MissingFile


def sample(index: int = 0, group: int | None = 0, **more: object) -> Sample:
    values = dict(
        group_index=group, index=index, prompt="1+1=", tokens=[1, 2, 3], response="2", response_length=1, reward=0.5,
        rollout_log_probs=[-0.25], status=Sample.Status.TRUNCATED, metadata={"from": ["a", 1]},
    )  # fmt: skip
    return Sample(**(values | more))


def groups() -> list[SampleGroup]:
    return [SampleGroup(7, samples=[sample(14, 7), sample(15, 7)]), SampleGroup(3, samples=[sample(6, 3)])]


def test_a_recorded_rollout_reads_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "made" / "4.rollout"
    write_rollout(path, 4, groups())
    recorded = read_rollout(path)
    assert recorded.rollout_id == 4 and recorded.groups == groups()
    assert [file.name for file in path.parent.iterdir()] == ["4.rollout"], "nothing is left beside it"


def test_every_beginning_of_a_recorded_rollout_is_refused_as_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "0"
    write_rollout(path, 0, groups())
    content = path.read_bytes()
    for size in range(16, len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(InvalidFile, match=r"--load: .*0: the file is cut off"):
            read_rollout(path, flag="--load")


@pytest.mark.parametrize("kind", ["ours", "torch", "torch of old"])
def test_a_file_with_wrong_bytes_is_refused_or_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "0"
    if kind == "ours":
        write_rollout(path, 0, groups())
    else:
        plain = {"tokens": [1, 2, 3], "response": "2", "response_length": 1, "reward": 0.5, "status": "completed"}
        torch.save({"rollout_id": 0, "samples": [plain]}, path, _use_new_zipfile_serialization=kind == "torch")
    content, draw = path.read_bytes(), random.Random(0)
    for _ in range(300):
        wrong = bytearray(content)
        for _ in range(3):
            wrong[draw.randrange(len(wrong))] = draw.randrange(256)
        path.write_bytes(wrong)
        with contextlib.suppress(InvalidFile), warnings.catch_warnings(action="ignore"):
            read_rollout(path)
    path.write_bytes(content + b"x")
    if kind == "ours":
        with pytest.raises(InvalidFile, match="more than the 2 groups"):
            read_rollout(path)


def test_a_length_that_is_not_true_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "0"
    path.write_bytes(b"slime rollout 1\n" + (1 << 62).to_bytes(8, "little") + b"{}")
    with pytest.raises(InvalidFile, match="cut off"):
        read_rollout(path)


def test_a_sample_that_cannot_travel_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "0"
    write_rollout(path, 0, groups())
    with pytest.raises(InvalidField, match="metadata"):
        write_rollout(path, 1, [SampleGroup(0, samples=[sample(metadata={"x": object()})])])
    assert read_rollout(path).rollout_id == 0
    assert [file.name for file in tmp_path.iterdir()] == ["0"]


def test_samples_that_torch_saved_are_grouped(tmp_path: Path) -> None:
    fields = {"group_index": 5, "prompt": "a", "response": "b", "response_length": 2, "status": "completed"}
    fields |= {"tokens": [1, 2, 3], "reward": 1.0, "weight_versions": ["3"], "spec_info": None, "later": {"a": 1}}
    saved = [
        fields | {"index": 10, "rollout_routed_experts": np.ones((2, 1, 2), np.int32)},
        fields | {"index": 11, "rollout_log_probs": torch.tensor([-1.0, -2.0]), "reward": np.float32(0.5)},
        fields | {"index": 12, "group_index": 6},
    ]
    torch.save({"rollout_id": 2, "samples": saved}, tmp_path / "2.pt")
    recorded = read_rollout(tmp_path / "2.pt")
    assert recorded.rollout_id == 2
    assert [[s.index for s in group.samples] for group in recorded.groups] == [[10, 11], [12]]
    first, second = recorded.groups[0].samples
    assert first.rollout_routed_experts.shape == (2, 1, 2) and first.status is Sample.Status.COMPLETED
    assert second.rollout_log_probs == [-1.0, -2.0] and second.reward == 0.5
    assert first.later == {"a": 1} and first.weight_versions == ["3"]  # type: ignore[attr-defined]


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value, 2))])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_that_runs_something_is_refused_with_its_name(tmp_path: Path, save: object) -> None:
    made = tmp_path / "made"
    save({"samples": [Hostile(made)]}, tmp_path / "0.pt")  # type: ignore[operator]
    with pytest.raises(InvalidFile, match="it would make a posix.mkdir|neither a recorded rollout"):
        read_rollout(tmp_path / "0.pt")
    assert not made.exists()


@pytest.mark.parametrize(
    "content, message",
    [
        ({"rollout": 1}, "holds the keys rollout"),
        ([1], "holds list"),
        ({"samples": [1]}, "a sample is a int"),
        ({"samples": [{"status": "lost"}]}, "status: got lost"),
        ({"samples": [{"tokens": "abc"}]}, "tokens"),
    ],
)
def test_what_torch_saved_of_something_else_is_refused(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "0.pt")
    with pytest.raises(InvalidFile, match=message):
        read_rollout(tmp_path / "0.pt")


def test_a_file_that_is_not_there_or_holds_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"--load: no such file .*/1.rollout"):
        read_rollout(tmp_path / "1.rollout", flag="--load")
    (tmp_path / "2").touch()
    with pytest.raises(InvalidFile, match="/2: neither a recorded rollout"):
        read_rollout(tmp_path / "2")


def test_samples_without_a_group_are_cut_into_groups() -> None:
    samples = [sample(index, None) for index in range(5)]
    assert [[s.index for s in group.samples] for group in group_samples(samples, 2)] == [[0, 1], [2, 3], [4]]


@given(st.integers(1, 50), st.floats(0.001, 1))
def test_a_share_of_the_groups_is_their_head_and_their_tail(count: int, fraction: float) -> None:
    kept = [group.group_index for group in head_and_tail([SampleGroup(number) for number in range(count)], fraction)]
    assert 1 <= len(kept) and abs(len(kept) - count * fraction) <= 1
    head = (len(kept) + 1) // 2
    assert kept == [*range(head), *range(count - len(kept) + head, count)]


def test_a_service_records_rollouts_and_evaluations_apart(tmp_path: Path) -> None:
    template = str(tmp_path / "{rollout_id}.rollout")
    filler = [sample(0, -1)]
    record_rollout(template, 3, [[sample(8, 4), sample(9, 4)], filler, [sample(2, None)]])
    record_evaluation(template, 3, {"a": {"samples": [sample(0, 0), sample(1, 0)]}, "b": {"rewards": [1.0]}})
    record_rollout(None, 3, [[sample()]])
    assert [len(group.samples) for group in read_rollout(tmp_path / "3.rollout").groups] == [2, 1]
    (group,) = read_rollout(tmp_path / "eval_3.rollout").groups
    assert group.dataset == "a" and len(group.samples) == 2


@pytest.mark.parametrize(
    "template, message",
    [
        ("{step}", "KeyError"),
        ("{rollout_id:d}", "ValueError"),
        ("{}", "IndexError"),
        ("", "the path of a file, got ''"),
        ("/", "the path of a file, got '/'"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(template: str, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message) as raised:
        check_template("--save-debug-rollout-data", template)
    assert raised.value.field == "--save-debug-rollout-data"


def test_a_template_is_filled_in() -> None:
    check_template("--f", "d/{rollout_id}")
    check_template("--f", "one-file")
    assert (
        path_of("d/{rollout_id:>3}", 7) == Path("d/  7")
        and path_of("{rollout_id}", 7, evaluation=True).name == "eval_7"
    )


def test_a_path_without_a_field_keeps_the_last_iteration_and_beside_it_the_last_evaluation(tmp_path: Path) -> None:
    template = str(tmp_path / "made" / "data.pt")
    for rollout_id in (3, 4):
        record_rollout(template, rollout_id, [[sample(rollout_id)]])
        record_evaluation(template, rollout_id, {"aime": {"samples": [sample(100 + rollout_id)]}})
    recorded = read_rollout(path_of(template, 0))
    assert recorded.rollout_id == 4 and recorded.groups[0].samples[0].index == 4
    evaluated = read_rollout(path_of(template, 0, evaluation=True))
    assert evaluated.rollout_id == 4 and evaluated.groups[0].samples[0].index == 104
    assert sorted(file.name for file in (tmp_path / "made").iterdir()) == ["data.pt", "eval_data.pt"]


def test_a_process_that_is_killed_while_it_records_leaves_the_recording_before(tmp_path: Path) -> None:
    template = str(tmp_path / "data.pt")
    record_rollout(template, 0, [[sample(0)]])
    killed = (
        "import os, sys\n"
        "from slime.rollout.recordings import rollouts\n"
        "from slime.types import Sample\n"
        "write = rollouts._write_part\n"
        "def write_and_die(file, part):\n"
        "    write(file, part)\n"
        "    file.flush()\n"
        "    b'groups' in part or os._exit(9)\n"
        "rollouts._write_part = write_and_die\n"
        "rollouts.record_rollout(sys.argv[1], 1, [[Sample(index=1)], [Sample(index=2)]])\n"
    )
    assert subprocess.run([sys.executable, "-c", killed, template], timeout=60).returncode == 9
    assert read_rollout(tmp_path / "data.pt").rollout_id == 0


def test_a_recording_is_printed_a_sample_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rollout(tmp_path / "0", 0, groups())
    assert main([str(tmp_path / "0")]) == 0
    assert capsys.readouterr().out.count('"tokens": [1, 2, 3]') == 3
    assert main([str(tmp_path / "1")]) == 2 and main([]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    long = SampleGroup(0, samples=[Sample(prompt="p" * 1000, group_index=0) for _ in range(500)])
    write_rollout(tmp_path / "0", 0, [long])
    printing = subprocess.Popen(
        [sys.executable, "-m", "slime.rollout.recordings", str(tmp_path / "0")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert printing.stdout is not None and printing.stderr is not None
    printing.stdout.readline()
    printing.stdout.close()
    assert printing.stderr.read() == b"" and printing.wait(60) == 0
