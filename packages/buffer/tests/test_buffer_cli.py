from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from slime.buffer.cli import main
from slime.buffer.settings import BufferSettings
from slime.types.clients import BufferClient
from slime.types.errors import InvalidSetting
from slime.types.rpc.roles import Role
from slime.types.settings import parse


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal(write_jsonl, tmp_path, number):
    command = [sys.executable, "-m", "slime.buffer.cli", "serve", "--prompt-data", write_jsonl([{"input": "q"}])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:2] == ["listening", "on"]
        assert list(tmp_path.glob("slime-buffer-*"))
        with BufferClient(words[2]) as client:
            assert client.stats().prompts_in_dataset == 1
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
    assert not list(tmp_path.glob("slime-buffer-*"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "error: a command is required: one of serve"),
        (["run"], "error: unknown command 'run'; known ones are serve"),
        (["group", "list"], "error: unknown command 'group'; did you mean groups?"),
        (["token", "workr"], "error: unknown role 'workr'"),
        (["serve", "--promt-data", "x"], "unknown option --promt-data; did you mean --prompt-data?"),
        (["serve", "--n-samples-per-prompt", "0"], "--n-samples-per-prompt must be at least 1, got 0"),
        (["serve", "--prompt-data", "none.jsonl"], "no such file none.jsonl"),
        (["serve", "--prompt-data", "a.jsonl@[0:x]"], "--prompt-data must be PATH@[a:b] with integers a and b"),
        (["serve", "--buffer-dir", __file__], "--buffer-dir must be a directory, got"),
        (["serve", "--eval-prompt-data", "a", "b", "c"], "must be pairs of NAME PATH"),
        (["serve", "--buffer-durability", "perfect"], "process, power"),
        (["serve", "--host", "0.0.0.0"], "--host 0.0.0.0"),
    ],
)
def test_wrong_settings_exit_with_2(capsys, argv, message):
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("slime-buffer: error: ") and message in shown


def test_the_help_of_token_describes_every_role_and_the_file(capsys):
    assert main(["token", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [role for role in Role if f"  {role}" not in shown] == []
    assert "--token-file FILE  File (mode 0600)" in shown


def test_a_port_in_use_exits_with_1(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert "in use" in capsys.readouterr().err


def test_help(capsys):
    assert main(["--help"]) == 0
    assert "slime-buffer serve" in capsys.readouterr().out


def test_evaluation_sets_in_every_form():
    def sets(*argv):
        (settings,) = parse(argv, BufferSettings, prog="p", description="")
        return settings.evaluation_sets()

    flag = "--eval-prompt-data"
    assert sets(flag, "a", "x.jsonl", "b", "y.jsonl") == {"a": "x.jsonl", "b": "y.jsonl"}
    assert sets(flag, "a", "x.jsonl", flag, "b", "y.jsonl") == {"a": "x.jsonl", "b": "y.jsonl"}
    assert sets(flag, "data/gsm8k-test.jsonl@[0:9]") == {"gsm8k-test": "data/gsm8k-test.jsonl@[0:9]"}
    assert sets() == {}
    assert BufferSettings(eval_prompt_data=["a", "x"]).evaluation_sets() == {"a": "x"}  # type: ignore[list-item]
    for wrong in (["a", "x", "a", "y"], ["train", "x"], ["train.jsonl"]):
        with pytest.raises(InvalidSetting):
            sets(flag, *wrong)


@pytest.mark.parametrize(("name", "reason"), [("train", "reserved"), ("a", "given twice"), (" ", "empty")])
def test_a_name_that_no_evaluation_set_can_have(name: str, reason: str) -> None:
    settings = BufferSettings(eval_prompt_data=[["a", "x", name, "y"]])
    with pytest.raises(InvalidSetting, match=f"got '{name}': the name is {reason}"):
        settings.evaluation_sets()
