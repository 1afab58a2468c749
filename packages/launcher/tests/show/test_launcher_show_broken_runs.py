"""Runs whose files are broken, hostile or very long: the viewer shows the rest of them, and of the other runs."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launcher_run_files import add_steps, group, make_run, metrics_row

from slime.launcher.cli import main
from slime.launcher.run_directory import state as run_state
from slime.launcher.run_directory.earlier_run import MODEL
from slime.launcher.run_directory.kept_samples import DIRECTORY, write_file
from slime.launcher.run_directory.state import RunState, read_state
from slime.launcher.show.answers import POINTS, Answers
from slime.launcher.show.command import serve
from slime.launcher.show.html_page import embed
from slime.launcher.show.regrade import regrade
from slime.launcher.show.run_files import RunFiles, find_runs
from slime.launcher.show.server import PageServer
from slime.launcher.show.token_texts import TokenTexts
from slime.types.errors import InvalidField


def whole_page(run: Path) -> dict[str, Any]:
    """Every answer of the page, as a browser could read it."""
    found = embed(Answers([RunFiles(run)]))
    json.dumps(found, allow_nan=False)
    return found


def test_a_page_follows_a_run_with_more_steps_than_points(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    add_steps(run, range(2, POINTS * 3 // 2))
    answers = Answers([RunFiles(run)])
    first = answers.answer("curves", {"run": "0"})
    after = first["steps"][-1]
    assert after % 1
    add_steps(run, [POINTS * 3 // 2])
    more = answers.answer("curves", {"run": "0", "after": str(after), "edition": str(first["edition"])})
    assert more["whole"] and more["rows"] == first["rows"] + 1


LAUGHS = "a: &a [ha, ha, ha, ha, ha, ha, ha, ha, ha]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + below] * 9)}]\n" for below, name in itertools.pairwise("abcdefghijkl")
)


@pytest.mark.parametrize("commented", [False, True])
def test_settings_that_stand_for_more_than_there_is_memory_are_left_out(
    tmp_path: Path, commented: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    laughs = "".join(f"# {line}\n" for line in LAUGHS.splitlines()) if commented else LAUGHS
    one, two = make_run(tmp_path / "one", settings=laughs), make_run(tmp_path / "two")
    assert main(["compare", str(one), str(two)]) == 0
    assert main(["runs", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out) < 10_000
    assert len(json.dumps(whole_page(one))) < 1e6


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp"


def test_nothing_that_a_terminal_would_obey_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["prompt"] = row["label"] = HOSTILE
            row["response"] = f"{HOSTILE}{row['index']}"

    settings = f"{json.dumps('lr' + HOSTILE)}: {json.dumps(HOSTILE)}\n"
    run = make_run(tmp_path / "run", settings=settings, fault=write)
    other = make_run(tmp_path / f"other{HOSTILE.replace('/', '')}")
    with pytest.raises(ValueError), run_state.recorded(run, "train"):
        (run / "logs").mkdir()
        (run / "logs" / "rollout.log").write_text(f"ERROR {HOSTILE}\n{HOSTILE}\n")
        raise ValueError(HOSTILE)
    for words in (["show", str(run), str(other), "--text", "--step", "3"], ["runs", str(tmp_path)],
                  ["compare", str(run), str(other)], ["show", str(tmp_path / HOSTILE), "--text"]):  # fmt: skip
        main(words)
    printed = "".join(capsys.readouterr())
    assert "\\x1b[2J\\x9b31m\\u202egnp" in printed
    assert not set(printed) & set("\x1b\x07\x9b\u202e")


def test_a_run_whose_path_is_not_utf_8_is_shown(tmp_path: Path) -> None:
    parent = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    one, two = make_run(parent / "one"), make_run(Path(os.fsdecode(os.fsencode(parent) + b"/tw\xf6")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LC_")}
    environment |= {"LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8:strict"}
    commands = (
        ["runs", parent], ["runs", parent, "--json"], ["compare", one, two], ["compare", one, two, "--json"],
        ["show", two, "--text"], ["show", two, "--html", parent / "page.html"], ["show", parent],
    )  # fmt: skip
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-m", "slime.launcher.cli", *map(os.fsencode, words)],
            capture_output=True, timeout=120, env=environment,
        )  # fmt: skip
        assert b"Traceback" not in done.stderr, done.stderr.decode("utf-8", "replace")
        assert done.returncode == (2 if words == ["show", parent] else 0)
        (done.stdout + done.stderr).decode()
    assert whole_page(two)


@pytest.mark.parametrize("name", ["start", "count", "row", "run", "step"])
@pytest.mark.parametrize("value", ["-3", "1.5", "nan", ""])
def test_a_request_for_a_place_that_there_cannot_be_is_refused(tmp_path: Path, name: str, value: str) -> None:
    answers = Answers([RunFiles(make_run(tmp_path / "run"))])
    with pytest.raises(InvalidField, match=name):
        answers.answer("sample" if name == "row" else "samples", {"run": "0", "step": "1", name: value})


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 7, "rollout/raw_reward": NaN}', '{"step": 7, "rollout/raw_reward": 1e999}',
        '{"step": 7, "eval/gsm": NaN, "perf/eval_time": 1}', f'{{"step": 7, "train/loss": {"1" * 400}}}',
        f'{{"step": {"1" * 400}}}', '{"step": true}', '{"step": -1}', '{"step": "x"}', "[1]", "[" * 100_000, "\x00\x00",
    ],
)  # fmt: skip
def test_a_line_of_metrics_that_cannot_be_used_does_not_hide_the_others(tmp_path: Path, line: str) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n" + json.dumps(metrics_row(8, 0.5)) + "\n")
    found = whole_page(run)
    assert found["curves?run=0"]["steps"][-1] == 8 and found["runs?"][0]["reward"] is not None
    assert found["runs?"][0]["scores"] == {"gsm": [(0, 0.25), (6, 0.75)]}


@pytest.mark.parametrize(
    "text",
    [
        '{"state": "done", "started": "abc"}', '{"state": "done", "started": NaN}', '{"state": ["x"]}', "[1]",
        '{"state": "[/foo]"}', '{"state": "done", "num_steps": "many"}', '{"state": "done", "error": {}}',
        "", "[" * 9999,
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_read_is_unknown(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    (run / "state.json").write_text(text)
    assert read_state(run).state == "unknown"
    assert main(["runs", str(tmp_path)]) == 0 and "unknown" in capsys.readouterr().out
    assert whole_page(run)["runs?"][0]["state"] == "unknown"


def test_a_run_without_a_state_is_done_once_it_has_written_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")

    def states() -> list[str]:
        assert main(["runs", str(tmp_path), "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        return [row["state"], whole_page(run)["runs?"][0]["state"]]

    assert states() == ["unknown", "unknown"]
    (run / MODEL).mkdir()
    assert states() == ["done", "done"]
    page = (Path(__file__).parents[4] / "docs" / "runs.md").read_text(encoding="utf-8")
    assert "a run is `done` if it has a `model/`" in " ".join(page.split())


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"date: 2024-13-45\n", b"[" * 5000])
def test_settings_that_cannot_be_read_do_not_hide_the_run(tmp_path: Path, content: bytes) -> None:
    run = make_run(tmp_path / "run")
    (run / "run.yaml").write_bytes(content)
    assert whole_page(run)["runs?"][0]["step"] == 5


@pytest.mark.parametrize("fault", ["garbage", "empty", "column", "directory"])
def test_a_file_of_samples_that_cannot_be_read_is_a_finding(
    tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    run = make_run(tmp_path / "run")
    for name in ("000002", "eval-000006"):
        path = run / DIRECTORY / f"{name}.parquet"
        path.unlink()
        if fault == "directory":
            path.mkdir()
        elif fault == "column":
            pq.write_table(pa.table({"step": [2]}), path)
        else:
            path.write_bytes(b"PAR1 and no more" if fault == "garbage" else b"")
    found = whole_page(run)
    texts = [finding["text"] for finding in found["checks?run=0"]["findings"]]
    assert len(texts) == 2 and texts[0].startswith("cannot read samples/000002.parquet: ")
    assert found["steps?run=0"]["train"] == [[0, 1], [3, 5]]
    assert main(["show", str(run), "--text", "--step", "2"]) == 2
    error = capsys.readouterr().err
    assert "cannot read samples/000002.parquet" in error and error.count("\n") == 1


def test_lengths_and_spans_out_of_range_take_no_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rows = group(1)
    rows[0]["response_length"] = 2**31 - 1
    rows[0]["spans"] = [{"start": -(2**31), "end": 2**31 - 1, "weight_version": "1"}]
    rows[0]["tokens"] = [-1, 5]
    write_file(run / DIRECTORY / "000001.parquet", rows)
    sample = Answers([RunFiles(run)])
    sample._page_findings = lambda *_: []  # type: ignore[method-assign]
    found = sample.sample({"run": "0", "step": "1", "row": "0"})
    assert found["prompt_length"] == 0 and found["weight_versions"] == ["1", "1"]


def test_rows_that_were_asked_for_do_not_grow(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    files = RunFiles(run)
    rows, evaluations = files.steps(), files.evaluations()
    add_steps(run, [6])
    files.steps()
    assert len(rows) == 6 and len(evaluations) == 2


def test_names_and_settings_with_brackets_are_printed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = make_run(tmp_path / "a[bold]"), make_run(tmp_path / "b[c]", settings="prompt_data: 'x[/y]'\n")
    assert main(["runs", str(tmp_path)]) == 0
    assert main(["compare", str(one), str(two)]) == 0
    out = capsys.readouterr().out
    for text in ("a[bold]", "b[c]", "x[/y]"):
        assert text in out


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every directory")
def test_a_tokenizer_that_cannot_be_read_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text('{"version": "9.0", "model": {}}')
    texts = TokenTexts([tmp_path / "gone", tmp_path])
    assert texts.of([1]) is None and texts.of([2]) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} cannot be read: Unknown tokenizer version '9.0' at line 1 column 16"
    ]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
def test_metrics_that_are_not_a_file_do_not_hide_the_run_or_other_runs(
    tmp_path: Path, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "other")
    metrics = make_run(tmp_path / "run") / "metrics.jsonl"
    metrics.unlink()
    make(metrics)
    assert RunFiles(tmp_path / "run").steps() == []
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == {"run", "other"}


def test_a_directory_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    try:
        assert find_runs(tmp_path) == [run]
    finally:
        closed.chmod(0o700)


def test_a_log_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "logs").mkdir()
    os.mkfifo(run / "logs" / "a.log")
    (run / "logs" / "b.log").write_text("ERROR x\n")
    assert [log["log"] for log in RunFiles(run).failures()] == ["b.log"]


def test_a_reward_function_that_cannot_grade_is_a_finding() -> None:
    found = regrade(group(0), {"custom_rm_path": "no_such_module.reward"})
    assert len(found) == 4 and "cannot be graded again: " in found[0].text


@pytest.fixture
def server(tmp_path: Path) -> Any:
    server = serve(Answers([RunFiles(make_run(tmp_path / "run"))]))
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("target", ["//[", "http://[", "/\xe9?\xff"])
def test_an_address_that_is_none_is_answered(server: PageServer, target: str) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode("latin-1"))
        assert connection.recv(100).startswith(b"HTTP/1.1 404 ")


def test_the_address_in_the_command_of_a_browser_leads_to_the_page_once(server: PageServer) -> None:
    once = server.url_once()
    assert server.word not in once
    with urllib.request.urlopen(once, timeout=30) as response:
        assert response.url == server.url and b"<html" in response.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(once, timeout=30)


def test_an_origin_that_is_no_address_is_refused(server: PageServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        text = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nOrigin: http://[\r\n\r\n"
        connection.sendall(text.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 403 ")


def test_a_browser_that_leaves_prints_nothing_on_the_terminal(
    server: PageServer, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    entered, left, failed = threading.Event(), threading.Event(), threading.Event()

    def answer(name: str, query: dict[str, str]) -> str:
        entered.set()
        left.wait(30)
        return "x" * (8 << 20)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            failed.set()

    server.answer = answer
    handler, log = Handler(), logging.getLogger("slime.launcher.platform.http_server")
    log.addHandler(handler)
    try:
        with caplog.at_level(logging.DEBUG, logger=log.name):
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                text = f"GET /{server.word}/data/runs HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n"
                connection.sendall(text.encode())
                assert entered.wait(30)
            left.set()
            assert failed.wait(30)
    finally:
        log.removeHandler(handler)
    assert capsys.readouterr().err == ""


def test_the_last_phase_is_written_though_the_one_before_was_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "INTERVAL", 0.2)
    state = RunState(tmp_path, "train")
    state.phase("generate")
    state.phase("train")
    until = time.monotonic() + 30
    while read_state(tmp_path).phase != "train":
        assert time.monotonic() < until
        time.sleep(0.01)
    state.phase("save")
    state.end("done")
    for timer in [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]:
        timer.join(30)
    assert read_state(tmp_path).state == "done"
