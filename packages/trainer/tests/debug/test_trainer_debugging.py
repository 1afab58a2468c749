"""Profiles, memory records and dumps of what is trained on."""

import gzip
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from trainer_tiny import Runner, make_samples, make_settings

from slime.trainer.debug.memory import MemoryRecord
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.debug import check_template
from slime.types.errors import InvalidSetting, NotAvailable

BACKENDS = ("fsdp", "megatron")


def read_trace(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event.get("name", "") for event in json.load(file)["traceEvents"]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_profile_is_a_chrome_trace_of_each_target(model: str, backend: str, tmp_path: Path):
    targets = ["train_actor", "train_log_probs"]
    settings = make_settings(
        model, train_backend=backend, use_pytorch_profiler=True, profile_target=targets, profile_dir=str(tmp_path),
        profile_step_start=1, num_steps_per_rollout=2,
    )  # fmt: skip
    runner = Runner(settings)
    for step in range(3):
        runner.run(step)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"{target}-rollout-1-rank-0.json.gz" for target in targets]
    assert all(any("aten::" in name for name in read_trace(tmp_path / name)) for name in files)


def test_a_profile_of_everything_marks_its_parts(model: str, tmp_path: Path):
    settings = make_settings(
        model, use_pytorch_profiler=True, profile_dir=str(tmp_path), profile_step_end=2,
        profile_target=["train_overall", "train_actor"],
    )  # fmt: skip
    runner = Runner(settings)
    for step in range(3):
        runner.run(step)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"train_overall-rollout-{step}-rank-0.json.gz" for step in range(2)]
    assert {"train_overall", "train_actor", "train_log_probs"} <= read_trace(tmp_path / files[0])


def test_traces_lie_below_the_output_directory(model: str, tmp_path: Path):
    from slime.trainer.debug.profiler import directory_below

    args = types.SimpleNamespace(output_dir=str(tmp_path))
    assert directory_below(args, None, "profiles") == tmp_path / "profiles"
    assert directory_below(args, "elsewhere", "profiles") == Path("elsewhere")
    assert directory_below(types.SimpleNamespace(), None, "profiles") == Path("profiles")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_trained_on_is_written_without_pickles(model: str, backend: str, tmp_path: Path):
    settings = make_settings(
        model, train_backend=backend, save_debug_train_data=str(tmp_path / "{rollout_id}" / "rank-{rank}.safetensors"),
        num_steps_per_rollout=2,
    )  # fmt: skip
    Runner(settings).run(5, make_samples(0))
    samples = make_samples(0)
    with safe_open(tmp_path / "5" / "rank-0.safetensors", "pt") as file:
        assert file.metadata() == {"format": "slime-train-data-1", "rollout_id": "5", "rank": "0"}
        data = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # All rewards of the last group are equal: nothing of it is trained on.
    assert sorted(data["positions"].tolist()) == list(range(8))
    assert sorted(set(data["updates"].tolist())) == [0, 1]
    first_token, first_response = 0, 0
    for i, position in enumerate(data["positions"].tolist()):
        sample, length = samples[position], int(data["response_lengths"][i])
        tokens = data["tokens"][first_token : first_token + int(data["total_lengths"][i])]
        assert tokens.tolist() == list(sample.tokens)
        chosen = slice(first_response, first_response + length)
        assert data["loss_masks"][chosen].tolist() == list(sample.loss_mask)
        torch.testing.assert_close(data["rollout_log_probs"][chosen], torch.tensor(sample.rollout_log_probs))
        assert data["advantages"][chosen].unique().numel() == 1
        first_token, first_response = first_token + len(tokens), chosen.stop
    assert {"log_probs", "returns", "weights"} <= data.keys() and "ref_log_probs" not in data
    assert [path.name for path in (tmp_path / "5").iterdir()] == ["rank-0.safetensors"]


@pytest.mark.parametrize(
    ("path", "ranks", "words"),
    [
        ("{rollout_id}", 2, "{rank} in it, got '{rollout_id}': there are 2 ranks"),
        ("", 1, "the path of a file, got ''"),
        (".", 1, "the path of a file, got '.'"),
        ("one", 8, "{rank} in it, got 'one': there are 8 ranks"),
        ("{x}", 1, "no fields but {rollout_id} and {rank}, got '{x}': KeyError: 'x'"),
    ],
)
def test_a_dump_that_would_write_over_itself_is_refused(path: str, ranks: int, words: str):
    with pytest.raises(InvalidSetting, match="--save-debug-train-data") as caught:
        check_template(path, ranks)
    assert words in str(caught.value)
    check_template("{rollout_id:05d}-{rank}", 8)
    check_template("{rank}", 8)
    check_template("one", 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"profile_step_start": 3, "profile_step_end": 3, "use_pytorch_profiler": True},
            "must end after it starts",
        ),
        ({"profile_step_end": 3}, "--profile-step-end 3 requires --use-pytorch-profiler"),
        ({"memory_snapshot_num_steps": 3}, "--memory-snapshot-num-steps 3 requires --record-memory-history"),
    ],
)
def test_settings_of_debugging_that_do_nothing_are_refused(values: dict[str, Any], words: str):
    with pytest.raises(InvalidSetting, match=words):
        make_settings("m", **values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_record_of_gpu_memory_needs_a_gpu():
    settings = make_settings("m", record_memory_history=True)
    with pytest.raises(InvalidSetting, match="--memory-recorder torch requires a GPU"):
        MemoryRecord(settings, types.SimpleNamespace(), 0)
    with pytest.raises(InvalidSetting, match="--distributed-backend nccl"):
        Ranks(0, 1, "", 1, "cpu", "nccl")
    assert Ranks(0, 1, "", 1, "cpu", "gloo").world_size == 1


class Tracker:
    """The part of memray that is used here."""

    def __init__(self, path: str, **_: Any) -> None:
        self.path = path

    def __enter__(self) -> None:
        Path(self.path).write_text("open")

    def __exit__(self, *_: Any) -> None:
        Path(self.path).write_text("closed")


def test_a_record_of_process_memory_ends_after_its_rollouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    module = types.ModuleType("memray")
    module.Tracker = Tracker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "memray", module)
    args = types.SimpleNamespace(output_dir=str(tmp_path))
    settings = make_settings("m", record_memory_history=True, memory_recorder="memray", memory_snapshot_num_steps=2)
    record, file = MemoryRecord(settings, args, 3), tmp_path / "memory" / "memory-rank-3.memray.bin"
    record.trained()
    assert file.read_text() == "open"
    record.trained()
    assert file.read_text() == "closed"
    record.close()
    # A resumed run leaves that one alone.
    MemoryRecord(settings, args, 3).close()
    assert sorted(path.name for path in file.parent.iterdir()) == ["memory-rank-3-2.memray.bin", file.name]


def test_a_recorder_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    settings = make_settings("m", record_memory_history=True, memory_recorder="memray")
    with pytest.raises(NotAvailable, match=r'pip install "slime-trainer\[memray\]"'):
        MemoryRecord(settings, types.SimpleNamespace(), 0)


def test_traces_and_records_of_earlier_starts_stay(tmp_path: Path):
    from slime.trainer.debug.profiler import unused

    assert unused(tmp_path, "trace", ".json.gz").name == "trace.json.gz"
    (tmp_path / "trace.json.gz").write_text("precious")
    (tmp_path / "trace-2.json.gz").symlink_to("nowhere")
    assert unused(tmp_path, "trace", ".json.gz").name == "trace-3.json.gz"
