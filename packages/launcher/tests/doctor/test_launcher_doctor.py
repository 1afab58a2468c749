"""The doctor's command: its lines, its exit code, and that no check takes it down."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launcher_machines import GIB, make_well, write_model, write_rows

from slime.launcher import cli
from slime.launcher.doctor import command, finding
from slime.launcher.doctor.finding import Finding, Subject, ok, run_checks
from slime.launcher.runner.flags import AGENT_ROLLOUT

LINE = re.compile(r"(ok|warn|FAIL) +\S.*?(  -> \S.*)?")


def examine(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(["doctor", *words])
    return code, capsys.readouterr().out


def test_a_machine_that_is_well_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_well(monkeypatch)
    code, text = examine(capsys=capsys)
    lines = text.splitlines()
    assert code == 0 and len(lines) > 10
    assert all(LINE.fullmatch(line) and line.startswith("ok") for line in lines), text


def test_a_whole_command_line_is_checked_with_all_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_well(monkeypatch)
    words = [
        "--hf-checkpoint", str(write_model(tmp_path / "model")), "--prompt-data", str(write_rows(tmp_path / "p.jsonl")),
        "--label-key", "label", "--num-rollout", "3", "--save-interval", "1", "--output-dir", str(tmp_path / "out"),
        "--custom-rm-path", "slime.launcher.quickstart.reverse.reward", "--n-samples-per-prompt=4",
    ]  # fmt: skip
    before = sorted(tmp_path.rglob("*"))
    code, text = examine(*words, capsys=capsys)
    assert code == 0, text
    for part in (
        "a Qwen3 (qwen3)",
        "tokenizer of 11 tokens",
        "3 rows read",
        "reverse.reward loads and takes its arguments",
        "below --output-dir",
    ):
        assert part in text
    assert "the flags fit together" in text and "FAIL" not in text
    code, text = examine(*words, "--rollout-max-response-len", "65", capsys=capsys)
    doubts = [line.split()[:3] for line in text.splitlines() if not line.startswith("ok")]
    assert code == 0 and doubts == [["warn", "--rollout-max-response-len", "65"]], text
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_of_checkpoints_that_are_still_to_come_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_well(monkeypatch)
    model = str(write_model(tmp_path / "model"))
    words = [
        "--hf-checkpoint", model, "--prompt-data", str(write_rows(tmp_path / "p.jsonl")), "--label-key", "label",
        "--num-rollout", "3", "--rm-type", "math", "--n-samples-per-prompt=4", "--train-backend", "megatron",
        "--load", str(tmp_path / "later"),
    ]  # fmt: skip
    code, text = examine(*words, capsys=capsys)
    assert code == 1 and f"--load {tmp_path}/later holds no checkpoint" in text, text
    for more in (["--ref-load", model], ["--save", str(tmp_path / "later"), "--save-interval", "1"]):
        code, text = examine(*words, *more, capsys=capsys)
        assert code == 0 and "--load " not in text and "--ref-load has no effect" not in text, text


def test_an_agent_of_the_user_and_its_parsers_are_known_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_well(monkeypatch)
    (tmp_path / "agents.py").write_text("async def agent(base_url, sample):\n    return 0.0\n")
    words = [
        "--hf-checkpoint", str(write_model(tmp_path / "model")), "--prompt-data", str(write_rows(tmp_path / "p.jsonl")),
        "--num-rollout", "3", "--n-samples-per-prompt=4", "--sglang-reasoning-parser", "glm45",
    ]  # fmt: skip
    agent = ["--custom-agent-path", f"{tmp_path}/agents.py:agent"]
    code, text = examine(*words, *agent, "--sglang-tool-call-parser", "glm45", capsys=capsys)
    assert code == 0 and "agents.py:agent loads and takes its arguments" in text, text
    rewarded = ["--custom-rm-path", "slime.launcher.quickstart.reverse.reward"]
    for user in (agent, rewarded):
        code, text = examine(*words, *user, "--sglang-tool-call-parser", "of_nobody", capsys=capsys)
        assert code == 1 and "--sglang-tool-call-parser of_nobody is not supported" in text and "kimi_k2" in text
        code, text = examine(*words, *user, "--sglang-tool-call-parser", "glm45", capsys=capsys)
        assert code == 0, text


@pytest.mark.parametrize(
    "answers, words",
    [
        ({"python_version": lambda: "3.10.2"}, "Python 3.10.2"),
        ({"shared_memory": lambda: 32 << 20}, "/dev/shm has 0.03 GiB free.*--shm-size"),
        ({"open_files_limit": lambda: (256, 4096)}, "open files: at most 256  -> ulimit -n 4096"),
        ({"free_ports": lambda count: 3}, "gives out 3 of "),
        ({"disk_free": lambda directory: (Path("/"), GIB // 2)}, "--output-dir runs: 512.0 MiB free, 1.00 GiB needed"),
        ({"writable": lambda directory: False}, "is not writable"),
        ({"visible_devices": lambda: "0,1"}, "CUDA_VISIBLE_DEVICES=0,1, and no GPU is visible"),
    ],
)
def test_what_is_wrong_with_the_machine_fails(
    answers: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_well(monkeypatch, **answers)
    code, text = examine(capsys=capsys)
    failed = [line for line in text.splitlines() if line.startswith("FAIL")]
    assert code == 1 and len(failed) == 1 and re.search(words, failed[0]), text
    assert "  -> " in failed[0]


def test_what_may_be_wrong_is_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_well(
        monkeypatch, open_files_limit=lambda: (2048, 2048), memory_available=lambda: 2 * GIB,
        shared_memory=lambda: 512 << 20, local_ray_address=lambda: "127.0.0.1:9", answers=lambda host, port: False,
    )  # fmt: skip
    code, text = examine(capsys=capsys)
    warned = [line for line in text.splitlines() if line.startswith("warn")]
    assert code == 0 and len(warned) == 4 and "FAIL" not in text, text
    assert "ray stop" in text


def test_json_says_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_well(monkeypatch, free_ports=lambda count: 0)
    _, text = examine(capsys=capsys)
    code, output = examine("--json", capsys=capsys)
    said = json.loads(output)
    assert code == 1 and said["ok"] is False
    assert [Finding(f["status"], f["what"], f["todo"]).line() for f in said["findings"]] == text.splitlines()
    assert {f["check"] for f in said["findings"]} >= {"versions", "limits", "gpus", "ports", "ray", "disk"}


@pytest.mark.parametrize(
    "words, status, message",
    [
        (["--hf-chekpoint", "x"], "FAIL", "did you mean --hf-checkpoint"),
        (["--lr", "fast"], "FAIL", "--lr"),
        (["--num-rollout", "2"], "warn", "--hf-checkpoint is required"),
    ],
)
def test_flags_that_make_no_run_do_not_end_the_examination(
    words: list[str], status: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_well(monkeypatch)
    code, text = examine(*words, capsys=capsys)
    assert code == (status == "FAIL")
    first, *rest = text.splitlines()
    assert first.startswith(status) and message in first and len(rest) > 10


def test_some_flags_are_checked_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_well(monkeypatch)
    code, text = examine("--hf-checkpoint", str(write_model(tmp_path / "m")), capsys=capsys)
    assert code == 0 and "a Qwen3 (qwen3)" in text and "these flags do not make a complete run" in text


def test_a_whole_command_may_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_well(monkeypatch)
    words = ["--prompt-data", str(write_rows(tmp_path / "rows.jsonl"))]
    assert examine("--json", "slime", "train", *words, capsys=capsys) == examine("--json", *words, capsys=capsys)


def test_checks_that_hang_or_break_are_failures_of_their_own() -> None:
    never = threading.Event()

    def hangs(subject: Subject) -> Iterator[Finding]:
        yield ok("a part of it")
        never.wait(30)

    def breaks(subject: Subject) -> Iterator[Finding]:
        raise RuntimeError("on its own")
        yield

    def leaves(subject: Subject) -> Iterator[Finding]:
        raise SystemExit(3)
        yield

    checks = {"hangs": hangs, "breaks": breaks, "leaves": leaves, "fine": lambda subject: iter([ok("fine")])}
    try:
        found = list(run_checks(checks, Subject(), 0.2))
    finally:
        never.set()
    assert [(f.check, f.status) for f in found] == [
        ("hangs", "ok"), ("hangs", "FAIL"), ("breaks", "FAIL"), ("leaves", "FAIL"), ("fine", "ok"),
    ]  # fmt: skip
    assert "no answer within 0.2 s" in found[1].what and "RuntimeError: on its own" in found[2].what
    assert finding.exit_code(found) == 1


def test_help_and_wrong_flags_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["doctor", "--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0 and "examples:" in text and "--json" in text and "exit code" in text
    for words in (["--timeout", "soon"], ["--timeout", "0"], ["--timeout"]):
        assert cli.main(["doctor", *words]) == 2
        assert capsys.readouterr().err.startswith("slime: error: --timeout ")
    for word, meant in (("--timout", "--timeout"), ("--timout=5", "--timeout"), ("--jsn", "--json")):
        assert cli.main(["doctor", word]) == 2
        assert f"unknown option {word.split('=')[0]}; did you mean {meant}?" in capsys.readouterr().err


def test_every_check_has_a_name_and_looks_at_this_very_machine(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "slime.launcher.cli", "doctor", "--json"],
        capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    said = json.loads(done.stdout)
    assert said["ok"] is (done.returncode == 0) and {f["check"] for f in said["findings"]} <= set(command.CHECKS)
    assert not any("the check itself failed" in f["todo"] for f in said["findings"])
    assert not list(tmp_path.iterdir())


def test_an_agent_command_line_that_is_right_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_well(monkeypatch)
    monkeypatch.delenv("ACR_AGENT_RUNTIME_ARN", raising=False)
    (tmp_path / "toolkit.yaml").write_text("agent_runtime_arn: http://127.0.0.1:8080/invocations\n")
    words = [
        "--hf-checkpoint", str(write_model(tmp_path / "model")), "--prompt-data", str(write_rows(tmp_path / "p.jsonl")),
        "--num-rollout", "3", "--n-samples-per-prompt", "4", "--rollout-function-path", AGENT_ROLLOUT,
        "--custom-config-path", str(tmp_path / "toolkit.yaml"),
    ]  # fmt: skip
    code, text = examine(*words, capsys=capsys)
    assert code == 0, text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_status_has_a_colour_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    failed = Finding("FAIL", "--lr [x]: broken " + "long " * 50, "mend it")
    pipe, terminal = io.StringIO(), Terminal()
    for output in (pipe, terminal):
        command.show_finding(failed, output)
    assert pipe.getvalue() == failed.line() + "\n"
    assert terminal.getvalue() == failed.line().replace("FAIL", "\x1b[1;31mFAIL\x1b[0m", 1) + "\n"
