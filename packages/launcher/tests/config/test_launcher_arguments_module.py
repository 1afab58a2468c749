"""`slime.utils.arguments.parse_args`, as scripts written for slime call it."""

from __future__ import annotations

import argparse
import sys

import pytest

from slime.launcher.config import run_config
from slime.types.errors import UnknownFlag
from slime.utils import arguments

NUM_GPUS = 0


def add_own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--search-engine", default="none")
    return parser


@pytest.fixture(autouse=True)
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = run_config.parse
    monkeypatch.setattr(run_config, "parse", lambda words: parse(words, check=False, environment={}))


def run(monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    words = ["--hf-checkpoint", "m", "--prompt-data", "p", "--num-rollout", "3", *more]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])


def test_args_are_every_setting_of_a_run_and_the_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--search-engine", "local", "--lr", "3e-6")
    args = arguments.parse_args(add_own)
    assert (args.search_engine, args.lr, args.num_rollout, args.n_samples_per_prompt) == ("local", 3e-6, 3, 1)


def test_a_flag_of_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--search-engine", "local")
    with pytest.raises(UnknownFlag, match="--search-engine"):
        arguments.parse_args()
