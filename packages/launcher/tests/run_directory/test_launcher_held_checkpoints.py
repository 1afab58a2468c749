"""Checkpoints that a command reads while the run goes on: --save-keep does not delete them, until nobody reads them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.launcher import cli
from slime.launcher.cli.init import write_project
from slime.launcher.config import run_config
from slime.launcher.config.record import write_record
from slime.launcher.run_directory.checkpoints import held, prune
from slime.types.directories import whole_directory
from slime.types.errors import Busy

HOLD = """
import sys
from pathlib import Path
from slime.launcher.run_directory.checkpoints import held
with held(lambda: Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


def save(directory: Path, step: int) -> Path:
    path = directory / f"step_{step:06d}"
    with whole_directory(path, "test") as partial:
        for name in ("config.json", "tokenizer.json", "trainer.json", "model.safetensors"):
            (partial / name).write_text("{}")
    return path


def keep_newest(directory: Path) -> list[str]:
    return [path.name for path in prune(directory, keep=1, retain_interval=None)]


def test_a_checkpoint_is_kept_while_another_process_reads_it_even_if_that_process_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read = save(tmp_path, 1)
    reader = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(read)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout is not None and reader.stdout.readline() == "holds\n"
        save(tmp_path, 3), save(tmp_path, 5)
        assert keep_newest(tmp_path) == ["step_000003"] and read.is_dir()
        assert keep_newest(tmp_path) == []
        assert caplog.text.count(f"{read} is kept as long as another process reads it") == 1
    finally:
        reader.kill()
        reader.communicate(timeout=30)
    save(tmp_path, 7)
    assert keep_newest(tmp_path) == ["step_000001", "step_000005"]


def test_a_checkpoint_that_is_deleted_just_now_is_replaced_by_the_next(tmp_path: Path) -> None:
    choices = [save(tmp_path, 1), save(tmp_path, 3)]

    def choose() -> Path:
        path = choices.pop(0)
        if choices:
            keep_newest(tmp_path)
        return path

    with held(choose) as found:
        save(tmp_path, 5)
        assert found.name == "step_000003" and keep_newest(tmp_path) == []
    assert keep_newest(tmp_path) == ["step_000003"]
    with pytest.raises(Busy, match="faster than they can be opened; use a larger --save-keep"), held(lambda: found):
        pytest.fail("there is nothing to hold")


def test_a_trained_model_is_no_checkpoint_and_an_error_of_the_block_stays_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="mine"), held(lambda: tmp_path):
        raise FileNotFoundError("mine")


def evaluates(run: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    def run_train(words: list[str], inherited: object) -> int:
        meanwhile()
        return int(not Path(words[words.index("--hf-checkpoint") + 1]).is_dir())

    monkeypatch.setattr("slime.launcher.cli.train.run_train", run_train)
    monkeypatch.setattr("slime.launcher.cli.evaluate.collect", lambda output, config: [])
    assert cli.main(["eval", str(run)]) == 0


def exports(run: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    def convert(source: Path, output: Path, fallback_hf_dir: object) -> Path:
        meanwhile()
        assert source.is_dir()
        return output

    monkeypatch.setattr("slime.converters.convert.to_hf.convert", convert)
    assert cli.main(["export", str(run)]) == 0


def chats(run: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], None]) -> None:
    def engine(directory: str, kind: str) -> object:
        meanwhile()
        assert Path(directory).is_dir()
        raise BrokenPipeError

    monkeypatch.setattr("slime.launcher.cli.chat._read_message", lambda: "hi")
    monkeypatch.setattr("slime.launcher.cli.chat.engine", engine)
    assert cli.main(["chat", str(run)]) == 0


@pytest.mark.parametrize("command", [evaluates, exports, chats])
def test_commands_hold_the_checkpoint_that_they_read(
    command: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_project(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    words = ["--config", "config.yaml", "--output-dir", "runs/first", "--save-interval", "1", "--save-keep", "1"]
    run = tmp_path / "mine" / "runs" / "first"
    run.mkdir(parents=True)
    write_record(run, run_config.parse(words), ["slime", "train", *words])
    save(run / "checkpoints", 1)
    kept: list[str] = []

    def meanwhile() -> None:
        save(run / "checkpoints", 2)
        kept.extend(keep_newest(run / "checkpoints"))

    command(run, monkeypatch, meanwhile)
    assert kept == [] and keep_newest(run / "checkpoints") == ["step_000001"]
