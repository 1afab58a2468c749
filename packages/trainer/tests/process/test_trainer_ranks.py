"""Two ranks of gloo give the numbers of one, and fail together."""

import json
from pathlib import Path

import pytest
import torch
import trainer_ranks
from safetensors.torch import load_file
from trainer_processes import run_ranks
from trainer_ranks import CASES, drive
from trainer_tiny import Runner, make_settings

from slime.trainer.checkpoints import checkpoint


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, model: str, reference_model: str) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(trainer_ranks.__file__, 2, directory, model, reference_model, check=True)
    return directory


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("no_compiler")
def test_two_ranks_equal_one(two_ranks: Path, model: str, reference_model: str, case: str):
    # Ranks have other rows, whose gradients are rounded to bfloat16 before they are added up.
    coarse = case.startswith("bf16")
    runner = Runner(make_settings(model, **({"ref_load": reference_model} | CASES[case])))
    expected = drive(case, runner)
    metrics = json.loads((two_ranks / f"{case}.json").read_text())
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        if name.startswith(("train/", "rollout/")) and name != "train/micro_batches":
            relative, absolute = (3e-2, 5e-3) if coarse else (1e-3, 1e-5)
            assert metrics[name] == pytest.approx(value, rel=relative, abs=absolute), name
    weights = load_file(two_ranks / f"{case}.safetensors")
    for name, weight in runner.weights().items():
        # Adam turns the last bits of a gradient near 0 into a whole step.
        far = ((weights[name] - weight).abs() > (5e-5 if coarse else 1e-5)).float().mean()
        assert far < (0.2 if coarse else 0.01), name


def test_turns_of_samples_that_two_ranks_read_are_computed_once(two_ranks: Path, model: str):
    metrics = json.loads((two_ranks / "turns.json").read_text())
    expected = drive("turns", Runner(make_settings(model, **CASES["turns"])))
    assert metrics["all/row_tokens"] == expected["perf/row_tokens"] > metrics["perf/row_tokens"]


def test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_all(two_ranks: Path):
    metrics = json.loads((two_ranks / "skipping.json").read_text())
    assert (metrics["train/nonfinite_updates"], metrics["train/step"]) == (1, 1)


@pytest.mark.parametrize("case", ["grpo", "bf16", "lora", "bf16-lora"])
def test_one_rank_resumes_what_two_saved(two_ranks: Path, model: str, case: str):
    straight = Runner(make_settings(model, **CASES[case]))
    straight.run(0)
    path = str(two_ranks / f"checkpoint-{case}")
    resumed = Runner(make_settings(model, **CASES[case]), weights=path)
    assert checkpoint.read_state(path).updates == 2
    resumed.backend.load_optimizer_state(checkpoint.read_optimizer(path), 2)
    expected, got = straight.run(1), resumed.run(1)
    assert got["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=3e-2 if "bf16" in case else 1e-3)
    assert got["train/step"] == 4
    for name, weight in straight.weights().items():
        assert ((resumed.weights()[name] - weight).abs() > 1e-3).float().mean() < 0.02, name


def test_an_error_on_one_rank_is_an_error_on_all(two_ranks: Path):
    first, second = (json.loads((two_ranks / f"errors-{rank}.json").read_text()) for rank in range(2))
    assert second[0].startswith("InvalidField[tokens[0]]: tokens[0]: got 10")
    assert first[0].startswith("InvalidField[tokens[0]]: rank 1: InvalidField: tokens[0]")
    assert "below-a-file: Not a directory" in first[1]
    assert second[1].startswith("InvalidSetting: rank 0:")
    # Both are in step again.
    assert first[2] == second[2]


def test_lost_samples_on_one_rank_are_that_error_on_all(two_ranks: Path):
    first, second = (json.loads((two_ranks / f"errors-{rank}.json").read_text()) for rank in range(2))
    assert second[3] == "DataLoss: its samples are damaged"
    assert first[3] == "DataLoss: rank 1: DataLoss: its samples are damaged"


def test_gradients_of_two_ranks_are_those_of_one(two_ranks: Path, model: str):
    in_a_group = torch.distributed.is_initialized()
    norm = json.loads((two_ranks / "errors-0.json").read_text())[2]
    assert float(norm) == pytest.approx(Runner(make_settings(model)).run(0)["train/grad_norm"], rel=1e-5)
    assert torch.distributed.is_initialized() is in_a_group
