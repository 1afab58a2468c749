"""Files of a run that are pipes: no command waits for a writer that never comes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcher_run_files import make_run

from slime.launcher.cli import main
from slime.launcher.cli.init import write_project
from slime.launcher.config import run_config
from slime.launcher.config.record import write_record
from slime.launcher.metrics.files import MetricsLog
from slime.launcher.run_directory.checkpoints import held
from slime.launcher.run_directory.kept_samples import DIRECTORY
from slime.types.directories import whole_directory
from slime.types.errors import InvalidSetting


@pytest.fixture
def pipe() -> Iterator[Callable[[Path], Path]]:
    """Puts a pipe in place of a file; at the end, whoever still waits for it gets its end."""
    made: list[Path] = []

    def make(path: Path) -> Path:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        made.append(path)
        return path

    yield make
    for path in made:
        # Both ends, so that neither a reader nor a writer is left waiting.
        os.close(os.open(path, os.O_RDWR))


def ends(function: Callable[[], object]) -> object:
    """Returns what `function` returns or raises, in a thread that the test does not wait for without end."""
    results: list[object] = []

    def call() -> None:
        try:
            results.append(function())
        except (Exception, SystemExit) as error:
            results.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert results, "waits for the pipe"
    return results[0]


@pytest.mark.parametrize(
    "name", ["state.json", "run.yaml", "command.txt", "metrics.jsonl", f"{DIRECTORY}/000003.parquet"]
)
def test_commands_show_a_run_without_the_file_that_is_a_pipe(
    name: str, tmp_path: Path, pipe: Callable[[Path], Path]
) -> None:
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    pipe(run / name)
    assert ends(lambda: main(["runs", str(tmp_path), "--json"])) == 0
    assert ends(lambda: main(["compare", str(run), str(other)])) == 0
    assert ends(lambda: main(["show", str(run), "--text"])) == 0
    assert ends(lambda: main(["show", str(run), "--html", str(tmp_path / "page.html")])) == 0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recorded run with a checkpoint."""
    write_project(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    run = tmp_path / "mine" / "runs" / "first"
    words = ["--config", "config.yaml", "--output-dir", str(run), "--save-interval", "1"]
    run.mkdir(parents=True)
    write_record(run, run_config.parse(words), ["slime", "train", *words])
    with whole_directory(run / "checkpoints" / "step_000000", "test") as partial:
        (partial / "trainer.json").write_text('{"step": 0}')
    return run


@pytest.mark.parametrize("name", ["state.json", "run.yaml", "command.txt", "checkpoints/step_000000/trainer.json"])
def test_a_run_with_a_pipe_is_resumed_or_refused(
    name: str, run: Path, pipe: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(run / name)
    monkeypatch.setattr("slime.launcher.cli.train.run_train", lambda words, **_: 0)
    assert ends(lambda: main(["resume", str(run)])) == (0 if name in ("state.json", "command.txt") else 2)


def test_what_a_run_appends_to_is_refused_as_a_pipe(run: Path, tmp_path: Path, pipe: Callable[[Path], Path]) -> None:
    config = run_config.parse(["--config", "config.yaml", "--output-dir", str(run)])
    command, metrics = pipe(run / "command.txt"), pipe(run / "metrics.jsonl")
    for path, write in ((command, lambda: write_record(run, config, [])), (metrics, lambda: MetricsLog(metrics, 0))):
        error = ends(write)
        assert isinstance(error, InvalidSetting) and f"--output-dir: {path} is not a regular file" in str(error)


def test_a_model_whose_files_are_pipes_is_refused(run: Path, tmp_path: Path, pipe: Callable[[Path], Path]) -> None:
    words = ["--config", "config.yaml", "--output-dir", "runs/second"]
    pipe(Path("model") / "slime-files.json")
    assert ends(lambda: run_config.parse(words).trainer.hf_checkpoint)
    pipe(Path("model") / "trainer.json")

    def hold() -> Path:
        with held(lambda: Path("model")) as found:
            return found

    assert ends(hold) == Path("model")
    pipe(Path("model") / "config.json")
    assert "has no config.json" in str(ends(lambda: run_config.parse(words)))
