"""The examples that train a tiny model on this machine, shortened."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uv

import slime.rollout.recordings
from slime.launcher.run_directory.kept_samples import kept_files, read_rows

Rows = Callable[[Path], list[dict[str, Any]]]


def samples_of(output_dir: Path) -> list[dict[str, Any]]:
    files = [file for file in kept_files(output_dir) if not file.evaluation]
    return [row for file in files for row in read_rows(file.path)]


def test_own_reward_trains_on_multiples(run_example: Callable[..., str], steps_of: Rows, tmp_path: Path) -> None:
    output = run_example("own_reward", "out", "--num-rollout", "12")
    rewards = [row["rollout/raw_reward"] for row in steps_of(tmp_path / "out")]
    assert len(rewards) == 12 and max(rewards[-3:]) > rewards[0], output
    for sample in samples_of(tmp_path / "out"):
        answer = sample["response"]
        right = answer.isdigit() and int(answer) >= 10 and int(answer) % int(sample["prompt"][:-1]) == 0
        assert sample["reward"] == right, sample


def test_the_tool_answers_within_the_sample_and_is_not_trained_on(
    run_example: Callable[..., str], steps_of: Rows, tmp_path: Path
) -> None:
    run_example("multi_turn_tools", "out", "--num-rollout", "5", "--save-debug-rollout-data", "rollout-{rollout_id}")
    assert len(steps_of(tmp_path / "out")) == 5
    command = [sys.executable, "-m", slime.rollout.recordings.__name__, str(tmp_path / "rollout-4")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True).stdout
    samples = [json.loads(line) for line in printed.splitlines()]
    called = [sample for sample in samples if re.search(r"[abcd]\?=", sample["response"])]
    assert len(samples) == 256 and called
    for sample in called:
        assert len(sample["loss_mask"]) == sample["response_length"] and sample["loss_mask"].count(0) == 2, sample
        value = re.search(r"([abcd])\?=(.)", sample["response"])
        assert value and sample["metadata"]["table"][value[1]] == value[2]


def test_a_game_is_played_in_turns(run_example: Callable[..., str], steps_of: Rows, tmp_path: Path) -> None:
    run_example("text_game", "out", "--num-rollout", "3", "--rollout-batch-size", "4")
    assert len(steps_of(tmp_path / "out")) == 3
    samples = samples_of(tmp_path / "out")
    turns = [sample for sample in samples if re.match(r"\d[<>]\d", sample["response"])]
    assert turns
    for sample in samples:
        assert sample["reward"] in (0.0, 1.0, -0.5) and len(re.findall(r"\d", sample["response"])) <= 4, sample


@pytest.mark.parametrize(
    ("name", "module", "needed"),
    [("verifiers_game", "verifiers", "MultiTurnEnv"), ("openenv_game", "openenv.core.env_server", "Environment")],
)
def test_a_game_of_another_library_is_played_in_turns(
    run_example: Callable[..., str], steps_of: Rows, tmp_path: Path, name: str, module: str, needed: str
) -> None:
    if not hasattr(pytest.importorskip(module, reason=f"{module} is not installed"), needed):
        pytest.skip(f"this release of {module} has no {needed}")
    run_example(name, "out", "--num-rollout", "3", "--rollout-batch-size", "4")
    assert len(steps_of(tmp_path / "out")) == 3
    samples = samples_of(tmp_path / "out")
    assert [sample for sample in samples if re.match(r"\d[<>]\d", sample["response"])]
    for sample in samples:
        assert sample["reward"] in (0.0, 1.0, -0.5) and len(re.findall(r"\d", sample["response"])) <= 4, sample


@pytest.fixture(scope="module")
def openai(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the client of OpenAI, which slime does not need."""
    directory = tmp_path_factory.mktemp("openai")
    install = [uv.find_uv_bin(), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(directory)]
    subprocess.run([*install, "openai"], check=True, timeout=180)
    return directory


def test_an_agent_with_openais_client_is_trained(
    run_example: Callable[..., str], steps_of: Rows, tmp_path: Path, openai: Path
) -> None:
    run_example("openai_agent", "out", "--num-rollout", "2", PYTHONPATH=str(openai))
    for row in steps_of(tmp_path / "out"):
        assert row["rollout/agents/episodes"] == 168 and row["rollout/agents/failed"] == 0, row
        assert row["train/grad_norm"] > 0


def test_two_models_are_evaluated_and_compared(run_example: Callable[..., str], tmp_path: Path) -> None:
    output = run_example("evaluation_only", "out", STEPS="2")
    table = dict(line.split(maxsplit=1) for line in output.splitlines() if line.startswith("eval/"))
    assert {"eval/greedy", "eval/sampled"} <= set(table)
    assert all(len(scores.split()) == 2 for scores in table.values())
    assert not list(tmp_path.glob("out/evaluations/**/model.safetensors"))
