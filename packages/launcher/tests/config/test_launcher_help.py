"""Help texts against what the flags do: their form, and the defaults that they state."""

from __future__ import annotations

import dataclasses
import re

import pytest

from slime.converters import settings as converters
from slime.launcher import cli
from slime.launcher.config.catalogue import build_parser, declared
from slime.launcher.runner.runner import SlimeRunner
from slime.rollout.cli import GenerateSettings, ServeSettings
from slime.trainer.cli import PlaceSettings
from slime.types.rpc import RpcSettings
from slime.types.settings import flag_help

OTHERS = (
    GenerateSettings, PlaceSettings, RpcSettings, ServeSettings, SlimeRunner,
    *(cls for cls in vars(converters).values() if dataclasses.is_dataclass(cls) and isinstance(cls, type)),
)  # fmt: skip


def every_help() -> dict[str, str]:
    """Help by flag, but for the flags that Megatron's parser describes."""
    found = {flag.spelling: flag_help(flag.field) for flag in declared().values() if flag.packages != ("megatron",)}
    for cls in OTHERS:
        found |= {f"{cls.__name__}.{f.name}": flag_help(f) for f in dataclasses.fields(cls) if f.metadata}
    return found


def test_a_help_text_is_a_phrase_that_stands_alone() -> None:
    texts = every_help()
    assert len(texts) > 250
    wrong = {
        name: text
        for name, text in texts.items()
        if not text[:1].isupper()
        or re.search(r"[^.]\.$", text)
        or re.match(r"(Of|As|The same|What|Who|How|Those)\b", text)
    }
    assert not wrong


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["train_async"], "unknown command 'train_async'; did you mean train-async?"),
        (["doctr"], "unknown command 'doctr'; did you mean doctor?"),
        (["buffer", "serve"], "unknown command 'buffer'; use slime-buffer"),
        (["zzz"], f"unknown command 'zzz'; known ones are {', '.join(cli.COMMANDS)}"),
    ],
)
def test_a_misspelled_command_is_told_the_nearest(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"slime: error: {message}\n"


def test_the_help_of_the_loop_begins_with_its_length() -> None:
    text = build_parser(declared()).format_help().split("Launcher: the training loop")[1]
    assert text.index("--num-rollout N") < text.index("--use-wandb")


@pytest.mark.parametrize("command", ["train", "train-async"])
def test_the_short_help_names_the_way_to_train_with_less_memory(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "--lora-rank N" in capsys.readouterr().out


def test_a_default_is_stated_once() -> None:
    """The parser appends the default of a setting that has one."""
    for flag in declared().values():
        if flag.packages != ("megatron",) and flag.default not in (None, [], {}) and flag.default is not False:
            assert "(default" not in flag.field.metadata["help"], flag.name
    text = re.sub(r"\s+", " ", build_parser(declared()).format_help())
    assert "(default: None)" not in text and "Peak learning rate (default: 1e-06)" in text
