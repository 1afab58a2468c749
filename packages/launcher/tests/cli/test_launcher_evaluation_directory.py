"""The directory of `slime eval`: it replaces nothing of the user's or of a run, and leaves nothing when refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.launcher import cli
from slime.launcher.cli.init import write_project
from slime.launcher.config import run_config
from slime.launcher.config.record import write_record

NUM_GPUS = 0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recorded run of a project, which is the working directory."""
    write_project(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    words = ["--config", "config.yaml", "--output-dir", "runs/first"]
    run = tmp_path / "mine" / "runs" / "first"
    run.mkdir(parents=True)
    write_record(run, run_config.parse(words), ["slime", "train", *words])
    (tmp_path / "mine" / "model").rename(run / "model")
    (tmp_path / "mine" / "model").symlink_to(run / "model")
    return run


@pytest.mark.parametrize("output", ["runs/first", "data", ".", "reward.py"])
def test_an_evaluation_writes_into_no_directory_of_others(
    run: Path, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()}
    assert cli.main(["eval", "runs/first", "--output-dir", output]) == 2
    assert "--output-dir must be a new or an empty directory, or one of an earlier" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in Path.cwd().rglob("*") if path.is_file()}


def test_a_refused_evaluation_leaves_nothing_and_can_be_repeated(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path.cwd().rglob("*"))
    for words in (["--n-samples-per-eval-prompt", "0"], ["--input-key", "5", "--nonsense"]):
        assert cli.main(["eval", "runs/first", *words]) == 2
    assert sorted(Path.cwd().rglob("*")) == before
    # The rows are read when the evaluation starts, after its settings were written.
    for _ in range(2):
        assert cli.main(["eval", "runs/first", "--eval-input-key", "nope", "--output-dir", "scored"]) == 2
        assert "no column 'nope'" in capsys.readouterr().err
