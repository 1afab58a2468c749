"""A checkpoint of LoRA is no model: what takes one for a model says so, before a run and after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.launcher import cli
from slime.launcher.cli.init import write_project
from slime.launcher.config import run_config
from slime.launcher.config.record import write_record

NUM_GPUS = 0


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint of a recorded run of a project, which is the working directory."""
    write_project(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    words = ["--config", "config.yaml", "--output-dir", "runs/first"]
    step = Path("runs/first/checkpoints/step_000003")
    step.mkdir(parents=True)
    write_record(Path("runs/first"), run_config.parse(words), ["slime", "train", *words])
    (step / "trainer.json").write_text("{}")
    (step / "config.json").write_text((Path("model") / "config.json").read_text())
    (step / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16}))
    return step


@pytest.mark.parametrize("command", [["export", "runs/first"], ["export", "runs/first", "--step", "3"]])
def test_a_checkpoint_of_lora_is_not_exported_as_a_model(
    adapter: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--output", "out"]) == 2
    assert "step_000003 as a model is not supported yet: it holds a LoRA adapter" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "requires --lora-rank 4 --lora-alpha 16: it holds a LoRA adapter"),
        (["--lora-rank", "8"], "--lora-rank 8 and --load"),
        (["--lora-rank", "4"], "--lora-alpha 32 and --load"),
    ],
)
def test_a_plan_refuses_to_go_on_from_another_adapter(
    adapter: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "config.yaml", "--load", str(adapter), *flags, "--dry-run"]) == 2
    assert words in capsys.readouterr().err


def test_a_plan_refuses_a_model_as_an_adapter_and_an_adapter_as_a_model(
    adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "config.yaml", "--load", "model", "--lora-rank", "4", "--dry-run"]) == 2
    assert "--lora-rank 4 and --load model cannot be used together" in capsys.readouterr().err
    assert cli.main(["train", "config.yaml", "--lora-rank", "100000", "--dry-run"]) == 2
    assert "--lora-rank must be at most 64, got 100000: the model is as wide" in capsys.readouterr().err
    assert cli.main(["train", "config.yaml", "--hf-checkpoint", str(adapter), "--dry-run"]) == 2
    assert "requires the directory of a model: it holds a LoRA adapter: give that as --load" in capsys.readouterr().err
