"""`--preset`: a recipe's settings where nothing else gives one, shown in the dry run and in run.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from slime.launcher import cli
from slime.launcher.config import run_config
from slime.launcher.config.presets import PRESETS
from slime.launcher.config.record import settings_text
from slime.launcher.quickstart import reverse
from slime.types.errors import InvalidSetting

NUM_GPUS = 0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    inputs = tmp_path_factory.mktemp("inputs")
    data, _ = reverse.write_data(inputs, 0)
    model = reverse.write_model(inputs / "model", 0)
    return [
        "--hf-checkpoint", str(model), "--prompt-data", str(data), "--input-key", "prompt", "--label-key", "label",
        "--num-rollout", "1", "--rm-type", "math", "--output-dir", str(inputs / "out"),
    ]  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_makes_a_run_that_is_accepted(base: list[str], preset: str) -> None:
    config = run_config.parse([*base, "--preset", preset])
    assert {name: config.flat[name] for name in PRESETS[preset]} == PRESETS[preset]


def test_flags_files_and_variables_win_over_a_preset(base: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("preset: dapo\neps_clip_high: 0.5\n")
    variables = {"SLIME_WEIGHT_DECAY": "0.25"}
    config = run_config.parse(
        ["--config", str(path), *base, "--n-samples-per-prompt", "4"], check=False, environment=variables
    )
    trainer = config.trainer
    assert (trainer.eps_clip_high, trainer.weight_decay, trainer.n_samples_per_prompt) == (0.5, 0.25, 4)
    assert trainer.calculate_per_token_loss


def test_run_yaml_holds_the_resolved_preset_and_repeats_the_run(base: list[str], tmp_path: Path) -> None:
    config = run_config.parse([*base, "--preset", "dapo", "--eps-clip", "0.1"])
    text = settings_text(config)
    settings = yaml.safe_load(text)
    assert settings.items() >= (PRESETS["dapo"] | {"preset": "dapo", "eps_clip": 0.1}).items()
    (tmp_path / "run.yaml").write_text(text)
    again = run_config.parse([str(tmp_path / "run.yaml"), "--output-dir", str(tmp_path / "again")])
    assert again.trainer == config.trainer


def test_a_dry_run_shows_the_resolved_preset(base: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "grpo-math", "--n-samples-per-prompt", "4", "--dry-run"]
    assert cli.main(["train", *base, *words]) == 0
    output = capsys.readouterr().out
    assert "Preset      grpo-math" in output and "  --use-kl-loss\n  --kl-loss-coef 0.001\n" in output
    assert "  --n-samples-per-prompt 4   (the preset has 8)\n" in output


def test_an_unknown_preset_is_told_the_known_ones(base: list[str]) -> None:
    with pytest.raises(InvalidSetting, match=r"--preset must be one of grpo-math, dapo, reinforce\+\+, got 'dpao'"):
        run_config.parse([*base, "--preset", "dpao"], check=False)
