"""The tiny quickstart with Megatron's backend on two CPU processes, whole and resumed at another layout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from slow_cases import slow
from tiny_runs import (
    DEADLINE,
    descendants,
    finish,
    metrics,
    quickstart,
    run,
    timeless,
    wait_for,
    wait_for_the_end_of,
)

MEGATRON = ("--train-backend", "megatron")
TENSOR = (*MEGATRON, "--tensor-model-parallel-size", "2")
PIPELINE = (*MEGATRON, "--pipeline-model-parallel-size", "2")
ROLLOUTS = 10


def without_evaluations(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith("eval/")} for row in rows]


def training(rows: list[dict]) -> list[dict]:
    """Results that a kill in the middle of a rollout leaves unchanged: complete groups are not made again."""
    return [{key: value for key, value in row.items() if key.startswith("train/")} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("whole")
    for name, flags in {"tensor": (*TENSOR, "--save-interval", "2", "--async-save"), "pipeline": PIPELINE}.items():
        run(directory / name, "--num-rollout", str(ROLLOUTS), *flags)
    return {"tensor": directory / "tensor", "pipeline": directory / "pipeline"}


def test_two_layouts_train_alike(whole: dict[str, Path]) -> None:
    for a, b in zip(metrics(whole["tensor"]), metrics(whole["pipeline"]), strict=True):
        assert a["rollout/raw_reward"] == pytest.approx(b["rollout/raw_reward"], abs=0.02)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=0.05)
        assert a["rollout/weight_version_min"] == a["step"]
    assert (whole["tensor"] / "model" / "model.safetensors").exists()


@slow
@pytest.mark.parametrize(("name", "flags", "other"), [("tensor", TENSOR, PIPELINE), ("pipeline", PIPELINE, TENSOR)])
def test_a_killed_run_resumes_at_its_layout_and_at_another(
    whole: dict[str, Path], tmp_path: Path, name: str, flags: tuple[str, ...], other: tuple[str, ...]
) -> None:
    keep = ("--save-interval", "1", "--save-keep", "2", "--run-name", "parts")
    buffer = tmp_path / "buffer"
    process = quickstart(tmp_path / "parts", "--num-rollout", "40", *flags, *keep, "--buffer-dir", str(buffer))
    checkpoints = tmp_path / "parts" / "checkpoints"
    wait_for((checkpoints / "iter_0000001").exists, DEADLINE, "the second checkpoint")
    children = descendants(process)
    process.kill()
    finish(process)
    wait_for_the_end_of(children)
    first = max(int(path.name.removeprefix("iter_")) for path in checkpoints.glob("iter_*")) + 1
    assert 2 <= first < ROLLOUTS and len(list(checkpoints.glob("iter_*"))) <= 3
    shutil.copytree(buffer, tmp_path / "copy")
    resume = ("--num-rollout", str(ROLLOUTS), "--run-name", "parts", "--load", str(checkpoints))

    run(tmp_path / "same", *flags, *resume, "--buffer-dir", str(buffer))
    expected = training(metrics(whole[name]))[first:]
    assert training(metrics(tmp_path / "same")) == expected

    run(tmp_path / "other", *other, *resume, "--buffer-dir", str(tmp_path / "copy"))
    for a, b in zip(training(metrics(tmp_path / "other")), expected, strict=True):
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=0.05)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(whole: dict[str, Path], tmp_path: Path) -> None:
    load = ("--load", str(whole["tensor"] / "checkpoints" / "iter_0000007"))
    run(tmp_path, "--num-rollout", str(ROLLOUTS), *TENSOR, *load)
    rest = without_evaluations(timeless(metrics(tmp_path)))
    assert rest == without_evaluations(timeless(metrics(whole["tensor"])))[8:]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*MEGATRON, "--tensor-model-parallel-sise", "2"), "--tensor-model-parallel-size"),
        ((*MEGATRON, "--num-layers", "7"), "num_hidden_layers"),
        ((*TENSOR, "--actor-num-gpus-per-node", "3"), "must be a multiple of --tensor-model-parallel-size 2"),
        (("--train-backend", "fsdp", "--tensor-model-parallel-size", "2"), "--train-backend megatron"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    process = quickstart(tmp_path, *flags)
    output = finish(process)
    assert process.returncode == 2, output
    assert message in " ".join(output.split())
    assert not (tmp_path / "logs").exists()
    assert os.listdir(tmp_path) in ([], ["inputs"])
