"""A run that is resumed and refused is still the run that it was, and can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.launcher import cli
from slime.launcher.cli.init import write_project
from slime.launcher.config import run_config
from slime.launcher.config.record import write_record
from slime.launcher.loops import synchronous
from slime.types.errors import InvalidSetting

NUM_GPUS = 0


@pytest.mark.parametrize("begins", [False, True])
def test_the_settings_of_a_run_are_those_of_the_last_start_that_began(
    begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop(config: Any, report: Any) -> None:
        if begins:
            report.started(1, 4)
        raise InvalidSetting("--lr: not with these weights", field="--lr")

    write_project(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setattr(synchronous, "train", loop)
    run, step = Path("runs/first"), Path("runs/first/checkpoints/step_000003")
    step.mkdir(parents=True)
    words = ["config.yaml", "--output-dir", str(run)]
    write_record(run, run_config.parse(words, check=False), ["slime", "train", *words])
    (step / "trainer.json").write_text("{}")
    before = (run / "run.yaml").read_text()
    assert cli.main(["train", *words, "--load", str(run / "checkpoints"), "--lr", "0.5"]) == 2
    assert "not with these weights" in capsys.readouterr().err
    after = (run / "run.yaml").read_text()
    assert ("lr: 0.5" in after) == begins
    assert (after == before) == (not begins)
