"""A checkpoint of LoRA is no model: what takes one for a model says so, before a run and after it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

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
    write_adapter(step, 1.0)
    return step


def write_adapter(directory: Path, value: float) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16}))
    save_file({"base_model.model.a.lora_A.weight": torch.full((4, 8), value)}, directory / "adapter_model.safetensors")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "slime-files.json"}


@pytest.mark.parametrize("command", [["export", "runs/first"], ["export", "runs/first", "--step", "3"]])
def test_a_checkpoint_of_lora_is_not_exported_as_a_model(
    adapter: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--output", "out"]) == 2
    words = capsys.readouterr().err
    assert "step_000003 as a model is not supported yet: it holds a LoRA adapter" in words
    assert "`slime export --format adapter`" in words and not Path("out").exists()


def test_the_adapter_of_a_run_is_exported_alone(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "runs/first", "--format", "adapter"]) == 0
    assert contents(Path("exports/first-adapter")) == {
        name: data for name, data in contents(adapter).items() if name.startswith("adapter_")
    }
    shutil.copytree("model", "runs/first/model")
    trained = write_adapter(Path("runs/first/model/adapter"), 2.0)
    for words, source in (
        (["runs/first"], trained), (["runs/first", "--step", "3"], adapter), (["runs/first/model"], trained),
        ([str(trained)], trained),
    ):  # fmt: skip
        shutil.rmtree("out", ignore_errors=True)
        command = ["export", *words, "--format", "adapter", "--output", "out"]
        assert cli.main(command) == cli.main(command) == 0
        assert (Path("out") / "adapter_model.safetensors").read_bytes() == (
            source / "adapter_model.safetensors"
        ).read_bytes()
    assert cli.main(["export", "runs/first", "--output", "merged"]) == 0
    for output in ("out", "merged"):
        assert cli.main(["export", "runs/first", "--step", "3", "--format", "adapter", "--output", output]) == 2
        assert f"--output must be a new or empty directory, got '{output}'" in capsys.readouterr().err
    shutil.rmtree(trained)
    for source in ("model", "runs/first"):
        assert cli.main(["export", source, "--format", "adapter"]) == 2
        words = "--format adapter requires a model that was trained with --lora-rank: "
        assert words in (found := capsys.readouterr().err) and "model has no LoRA adapter" in found
    assert cli.main(["export", "nowhere", "--format", "adapter"]) == 2
    assert "RUN|MODEL nowhere: no such directory" in capsys.readouterr().err


def cut_weights(directory: Path) -> None:
    weights = (directory / "adapter_model.safetensors").read_bytes()
    (directory / "adapter_model.safetensors").write_bytes(weights[:50])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "adapter_config.json must be a JSON object, got '{nope'": lambda d: (d / "adapter_config.json").write_text("{nope"),
    "adapter_config.json must be a JSON object, got []": lambda d: (d / "adapter_config.json").write_text("[]"),
    "adapter_model.safetensors: not a safetensors file, or cut": cut_weights,
    "no such file own/adapter_model.safetensors": lambda d: (d / "adapter_model.safetensors").unlink(),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_damaged_adapter_is_neither_exported_nor_loaded(
    adapter: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[words](write_adapter(Path("own"), 1.0))
    assert cli.main(["export", "own", "--format", "adapter", "--output", "out"]) == 2
    assert words in (found := capsys.readouterr().err) and "RUN|MODEL own: " in found and not Path("out").exists()
    flags = ["--load", "own", "--lora-rank", "4", "--lora-alpha", "16"]
    assert cli.main(["train", "config.yaml", *flags, "--dry-run"]) == 2
    assert words in (found := capsys.readouterr().err) and "--load: " in found


@pytest.mark.parametrize(
    "config, words",
    [
        ({"lora_alpha": 16}, "adapter_config.json: r must be a whole number of at least 1, got None"),
        ({"r": 4, "lora_alpha": "much"}, "adapter_config.json: lora_alpha must be a number, got 'much'"),
    ],
)
def test_a_value_of_an_adapter_that_cannot_be_is_named(
    adapter: Path, config: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert cli.main(["train", "config.yaml", "--load", str(adapter), "--lora-rank", "4", "--dry-run"]) == 2
    assert words in capsys.readouterr().err


def test_an_adapter_is_not_exported_into_itself(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = write_adapter(Path("own"), 1.0)
    assert cli.main(["export", "own", "--format", "adapter", "--output", "own/x"]) == 2
    assert "--output must be outside of own, got 'own/x'" in capsys.readouterr().err and not (own / "x").exists()


def test_an_exported_model_has_its_adapter_below(adapter: Path) -> None:
    shutil.copytree("model", "runs/first/model")
    assert cli.main(["export", "runs/first"]) == 0 and not Path("exports/first/adapter").exists()
    shutil.rmtree("exports")
    trained = write_adapter(Path("runs/first/model/adapter"), 2.0)
    assert cli.main(["export", "runs/first"]) == 0
    assert contents(Path("exports/first/adapter")) == contents(trained)
    assert (Path("exports/first") / "model.safetensors").is_file()
    # Another adapter is another export.
    write_adapter(trained, 3.0)
    assert cli.main(["export", "runs/first"]) == 2


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
