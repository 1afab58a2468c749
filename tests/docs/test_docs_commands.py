"""Commands of every page: programs and files that they name exist, and so does every flag."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from pages import ROOT, Block, blocks, commands, pages

NUM_GPUS = 0

BASH = [block for page in pages() for block in blocks(page) if block.language in ("bash", "sh", "console", "shell")]
# Commands that take the flags of a training run, which docs/flags.md lists; that page is held to the parser by a test.
TRAINING = {"slime train", "slime train-async", "slime doctor", "quickstart", "train.py", "train_async.py"}
OF_ONE_COMMAND = {
    "slime doctor": {"--json"},
    "slime --version": {"--version"},
    "quickstart": {"--tiny"},
}
MODULES = {
    "slime-buffer": "slime.buffer.cli",
    "slime-rollout": "slime.rollout.cli",
    "slime-trainer": "slime.trainer.cli",
    "slime-convert": "slime.converters.cli",
    "slime": "slime.launcher.cli",
}
# Commands of `slime` with parsers of their own.
OWN_PARSERS = ("show", "runs", "compare", "init", "chat", "export", "resume", "eval", "tinker")
# Commands among these that take flags of training beside their own.
TRAINING_TOO = ("resume", "eval")
# Flags of commands with parsers of their own, which are not in docs/flags.md.
CONVERSIONS = ("convert_hf_to_torch_dist.py", "convert_torch_dist_to_hf.py", "convert_to_hf.py")
CONVERTED_BY = {
    "convert_hf_to_torch_dist.py": "hf-to-torch-dist",
    "convert_torch_dist_to_hf.py": "torch-dist-to-hf",
    "convert_to_hf.py": "to-hf",
}


@cache
def training_flags() -> frozenset[str]:
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    return frozenset(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9_-]*", page)) | {"--help", "--help-all"}


@cache
def flags_of(*command: str) -> frozenset[str]:
    """Returns what `COMMAND --help` prints, and `COMMAND --help-all` where there is such a flag."""
    program, *rest = command
    module = MODULES[program]
    flags: set[str] = set()
    for help_flag in ("--help", "--help-all"):
        done = subprocess.run(
            [sys.executable, "-m", module, *rest, help_flag],
            capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        flags.update(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", done.stdout))
        if "--help-all" not in flags:
            break
    return frozenset(flags)


def unknown_flags(words: list[str]) -> list[str]:
    """Flags of a command of ours that it does not have; none for other programs."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    # Words in front of our own program.
    for front in (["ray", "job", "submit"], ["torchrun"]):
        if words[: len(front)] == front:
            if "--" in words:
                words = words[words.index("--") + 1 :]
            elif any(word.endswith(".py") for word in words):
                words = words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]
    if words and re.fullmatch(r"(.*/)?python3?", words[0]):
        words = words[1:]
    if not words:
        return []
    program, name = words[0], words[0].rpartition("/")[2]
    given = [word.partition("=")[0] for word in words[1:] if re.match(r"--[a-z]", word)]
    if program == "slime":
        if words[1:2] and words[1] in OWN_PARSERS:
            known = flags_of("slime", words[1]) | (training_flags() if words[1] in TRAINING_TOO else frozenset())
            return [flag for flag in given if flag not in known]
        command = " ".join(words[:2])
        known = training_flags() | OF_ONE_COMMAND.get(command, set())
        if command not in TRAINING and words[1:2] not in (["--help"], ["--version"], ["COMMAND"]):
            return [command]
        return [flag for flag in given if flag not in known and not flag.startswith("--sglang-")]
    if name in TRAINING:
        known = training_flags() | OF_ONE_COMMAND.get(name, set())
        return [flag for flag in given if flag not in known and not flag.startswith("--sglang-")]
    if name in CONVERTED_BY:
        known = flags_of("slime-convert", CONVERTED_BY[name]) | training_flags()
        return [flag for flag in given if flag not in known]
    if program in MODULES:
        rest = words[1:3] if words[1:2] == ["groups"] else words[1:2]
        known = flags_of(program, *[word for word in rest if not word.startswith("-")])
        if program == "slime-convert":
            known |= training_flags()
        return [flag for flag in given if flag not in known and not flag.startswith("--sglang-")]
    if program.endswith(".py") and (ROOT / program).exists():
        known = training_flags() | set(
            re.findall(r"--[a-z0-9][a-z0-9-]*", (ROOT / program).read_text(encoding="utf-8"))
        )
        return [flag for flag in given if flag not in known]
    return []


@pytest.mark.parametrize("block", BASH, ids=lambda block: block.name)
def test_every_flag_is_one_that_the_command_has(block: Block) -> None:
    assert {" ".join(words): unknown for words in commands(block) if (unknown := unknown_flags(words))} == {}


@pytest.mark.parametrize("block", BASH, ids=lambda block: block.name)
def test_files_of_the_repository_that_a_command_names_exist(block: Block) -> None:
    named = re.findall(
        r"(?<![\w./-])(?:\./)?((?:scripts|benchmarks|tests|packages|examples|tools|docs|\.ci|\.github)/[\w./-]+)",
        block.text,
    )
    # A page of a directory prints its commands as they are typed in the root, or in that directory.
    missing = [name for name in named if not (ROOT / name).exists() and not (block.page.parent / name).exists()]
    assert [name for name in missing if "NAME" not in name] == []


@pytest.mark.parametrize("block", BASH, ids=lambda block: block.name)
def test_bash_can_parse_it(block: Block) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    # `...` stands for more flags, [x] for what may be left out.
    done = subprocess.run([bash, "-n"], input=block.text, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_extras_that_pip_is_told_exist() -> None:
    for block in BASH:
        for package, extras in re.findall(r"slime-(\w+)\[([\w,-]+)\]", block.text):
            project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8"))
            assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"]), block.name


def test_a_flag_that_is_not_there_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nA=1 slime train --lr 1 \\\n  --lrr 2 && ./scripts/quickstart --tinny | tee log  # --no\n"
        "ray job submit --address=x -- python3 scripts/train.py --sglang-anything 1 --loadd x\n```\n"
    )
    (block,) = blocks(page)
    assert [unknown_flags(words) for words in commands(block)] == [["--lrr"], ["--tinny"], [], ["--loadd"]]
