"""The `slime` command: its help, its versions, completion, and a file of settings as its first word."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from slime.launcher import cli
from slime.launcher.cli import line_parser
from slime.launcher.config import run_config
from slime.launcher.config.catalogue import declared
from slime.launcher.config.help import FIRST, FIRST_ASYNC, print_coloured

NUM_GPUS = 0


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        assert cli.main(words) == 0
    except SystemExit as end:
        assert not end.code
    return capsys.readouterr().out


def test_version_names_the_six_packages(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--version").splitlines()
    packages = ("types", "buffer", "rollout", "converters", "trainer", "launcher")
    assert [line.split()[0] for line in lines] == [*(f"slime-{name}" for name in packages), "Python"]
    try:
        expected = version("slime-types")
    except PackageNotFoundError:  # as in a sandbox of Pants
        expected = "not"
    assert lines[0].split()[1] == expected


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help")
    assert all(re.search(rf"^  {name} ", text, re.MULTILINE) for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("command", "groups", "count", "about"),
    [
        ("train", FIRST, 21, "Engines and trainer take turns"),
        ("train-async", FIRST_ASYNC, 26, "generate the next rollout while the trainer works"),
    ],
)
def test_help_of_training_has_some_flags_by_task_and_help_all_every_flag(
    command: str,
    groups: Mapping[str, Sequence[str]],
    count: int,
    about: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short, whole = printed(capsys, command, "--help"), printed(capsys, command, "--help-all")
    names = [name for group in groups.values() for name in group]
    assert len(names) == count
    flags = declared()
    for text in (short, whole):
        assert about in " ".join(text.split()) and text.startswith(f"usage: slime {command} --hf-checkpoint")
    for text in (short, whole):
        assert all(re.search(rf"^  {flags[name].spelling}\b", text, re.MULTILINE) for name in names)
    assert [text for text in groups if f"\n{text}:\n" not in short] == []
    assert len(re.findall(r"^  --", short, re.MULTILINE)) == len(names) + 3
    assert "--eps-clip-high" not in short and "--eps-clip-high" in whole and "--help-all" in short


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_describes_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, command, "--help").startswith(f"usage: slime {command} ")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_help_has_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "usage: slime [x]\n\nGroup:\n  --flag N, --other N  A text about --flag [x]\n"
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    pipe, terminal = io.StringIO(), Terminal()
    print_coloured(text, pipe)
    print_coloured(text, terminal)
    assert pipe.getvalue() == text
    plain = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert plain == text and "\x1b[36m--flag" in terminal.getvalue() and "\x1b[1mGroup:" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    quiet = Terminal()
    print_coloured(text, quiet)
    assert "\x1b[36m" not in quiet.getvalue()


def test_completion_knows_the_commands_and_the_flags_of_the_typed_one() -> None:
    def flags(parser: argparse.ArgumentParser) -> set[str]:
        return {name for action in parser._actions for name in action.option_strings}

    (commands,) = [a for a in line_parser("train")._actions if isinstance(a, argparse._SubParsersAction)]
    assert list(commands.choices) == list(cli.COMMANDS)
    assert "--rollout-batch-size" in flags(commands.choices["train"])
    assert "--rollout-batch-size" not in flags(commands.choices["doctor"])


def test_the_first_word_of_training_may_be_a_file_of_settings(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("hf_checkpoint: m\nprompt_data: p.jsonl\nnum_rollout: 3\nlr: 0.5\n")
    config = run_config.parse([str(path), "--num-rollout", "7"], check=False)
    assert (config.launcher.num_rollout, config.trainer.lr) == (7, 0.5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine"], "unexpected argument 'mine': a first word without dashes names a file of settings, CONFIG.yaml"),
        (["a.yaml", "--config", "b.yaml"], "a.yaml and --config cannot be used together"),
        (["a.yaml", "b.yaml"], "unexpected argument 'b.yaml'"),
        (["none.yaml"], "--config: no such file none.yaml"),
    ],
)
def test_a_wrong_file_of_settings_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *words]) == 2
    assert capsys.readouterr().err.startswith(f"slime: error: {message}")


@pytest.mark.parametrize(
    "words",
    [
        ["slime.launcher.cli"],
        ["slime.converters.cli"],
        ["slime.buffer.cli"],
        ["slime.buffer.cli", "groups"],
        ["slime.rollout.cli"],
        ["slime.trainer.cli"],
    ],
    ids=" ".join,
)
def test_every_program_lists_its_commands_in_one_way(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    module, *command = words
    assert importlib.import_module(module).main([*command, "--help"]) == 0
    usage, _, rest = capsys.readouterr().out.partition("\n\ncommands:\n")
    commands, _, note = rest.partition("\n\n")
    assert usage.startswith("usage: slime") and re.match(r"`slime.* COMMAND --help` describes a command", note)
    for line in commands.splitlines():
        assert re.fullmatch(r"  [a-z-]+  +[A-Z][^\n]*[^.\n]", line), line


def test_no_help_says_a_default_twice_and_a_missing_model_is_told_by_its_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in cli.COMMANDS:
        with contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert not re.search(r"(\(default: [^()]*\)) \1", text), command
    assert cli.main(["tinker", "--hf-checkpoint", "nowhere"]) == 2
    assert "slime: error: --hf-checkpoint nowhere: no such directory" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["file", "loop"])
def test_a_tinker_service_names_the_directory_that_it_cannot_write(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slime.launcher.cli.chat.model_directory", lambda model, flag: str(tmp_path))
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")
    output = tmp_path / "output"
    output.write_text("mine") if kind == "file" else output.symlink_to(output)
    assert cli.main(["tinker", "--hf-checkpoint", "m", "--port", "0", "--output-dir", str(output)]) == 2
    assert f"slime: error: --output-dir: cannot write {output}: File exists" in capsys.readouterr().err
