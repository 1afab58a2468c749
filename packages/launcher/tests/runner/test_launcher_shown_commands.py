"""Commands that are printed, and errors that name them, show no secret."""

from __future__ import annotations

import pickle
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slime.utils.external_utils.command_utils as U
from slime.launcher.platform.secret_variables import shown_command
from slime.launcher.runner.ray_job import RunFailed

SECRETS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=8).map(lambda text: f"S3cr{text}")
KEEPS_NOTHING = ("{flag} {value}", "{flag}={value}", "HF_TOKEN={value} train", "env 'A=1' WANDB_API_KEY={value} x")


@given(SECRETS, st.sampled_from(KEEPS_NOTHING), st.sampled_from(["--wandb-key", "--sglang-api-key", "--hf-token"]))
def test_no_secret_is_shown_however_it_is_quoted(secret: str, line: str, flag: str) -> None:
    shown = shown_command(f"train {line.format(flag=flag, value=shlex.quote(secret))} --lr 1e-6")
    assert "S3cr" not in shown
    assert shown.startswith("train ") and shown.endswith("--lr 1e-6")


def test_other_flags_are_shown() -> None:
    line = "train --input-key prompt --label-key 'a b' --token-file f --max-tokens-per-gpu 9216 --eos-token-id 2"
    assert shown_command(line) == line
    assert shown_command("""--train-env-vars '{"A": "1", "HF_TOKEN": "x y", "B": "2"}'""") == (
        """--train-env-vars '{"A": "1", "HF_TOKEN": "***", "B": "2"}'"""
    )


def test_a_key_on_the_command_line_of_a_training_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIME_SCRIPT_ENABLE_RAY_SUBMIT", "0")
    ran: list[str] = []
    monkeypatch.setattr(U, "run_attached", lambda words, *more: ran.append(words[2]))
    U.execute_train("--use-wandb --wandb-key 0123456789abcdef --lr 1", 0)
    printed = capfd.readouterr().out
    assert "EXEC: " in printed and printed.endswith("--use-wandb --wandb-key *** --lr 1\n")
    assert ran[0].endswith("--wandb-key 0123456789abcdef --lr 1")


def test_a_command_that_fails_is_named_without_its_key(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailed, match=r"`false --wandb-key=\*\*\*` ended with exit code 1") as caught:
        U.exec_command("false --wandb-key=0123456789abcdef")
    error = caught.value
    assert "0123" not in f"{error!r} {error} {error.cmd} {pickle.loads(pickle.dumps(error))!r} {capfd.readouterr()}"
