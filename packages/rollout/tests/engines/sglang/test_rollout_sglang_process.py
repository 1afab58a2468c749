"""SGLang engines as processes: where they listen, what they are told, how they start, fail and end."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import sglang_recording

from slime.rollout import launch
from slime.rollout.engines import gpus, registry
from slime.rollout.engines.process import EngineProcess, stop_all
from slime.rollout.engines.sglang import kind
from slime.rollout.engines.sglang import launch as sglang_launch
from slime.rollout.engines.sglang.__main__ import reserve_port
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import ConfigError, DeadlineExceeded, EngineError, InvalidSetting

RECORDING = (sys.executable, sglang_recording.__file__)
SCRIPT = (sys.executable, "-c")


def options(**values: Any) -> SGLangOptions:
    return SGLangOptions(**{"model_path": "m", "gpus": ["3", "5"], "server": RECORDING} | values)


def script(code: str) -> SGLangOptions:
    return options(server=(*SCRIPT, code))


def told(process: EngineProcess) -> dict[str, Any]:
    with urllib.request.urlopen(process.url + "/calls", timeout=60) as answer:
        return json.load(answer)


def group(process: EngineProcess) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if p.is_running() and _group_of(p.pid) == process.pid]


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_an_engine_starts_on_its_gpus_and_ends_with_its_whole_group() -> None:
    with start_sglang(options(args={"log_level": "INFO"}), env={"SOME": "thing"}) as process:
        assert process.wait_ready(240) is process and process.kind == "sglang"
        environ = told(process)["environ"]
        assert (environ["CUDA_VISIBLE_DEVICES"], environ["SOME"]) == ("3,5", "thing")
        with urllib.request.urlopen(process.url + "/server_info", timeout=60) as answer:
            info = json.load(answer)
        assert (info["model_path"], info["tp_size"], info["weight_version"]) == ("m", "2", "0")
        assert (info["log_level"], info["host"]) == ("info", "127.0.0.1")
        members = group(process)
        assert len(members) == 2
    gone, alive = psutil.wait_procs(members, timeout=60)
    assert not alive


def test_the_key_of_a_server_is_in_no_argument_list_and_its_file_goes(tmp_path: Path) -> None:
    code = f"""
import http.server, json, os, pathlib, sys
file = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
seen = [str(file), file.read_text(), file.stat().st_mode & 0o777, os.environ.get("SLIME_ENGINE_API_KEY")]
pathlib.Path({str(tmp_path / "seen")!r}).write_text(json.dumps(seen))
key = file.read_text().split('"')[1]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == "Bearer " + key else 401); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
    with start_sglang(script(code), api_key="abc-_1") as process:
        assert process.wait_ready(240).api_key == "abc-_1"
        file, content, mode, variable = json.loads((tmp_path / "seen").read_text())
        assert content == 'api-key: "abc-_1"\n' and mode == 0o600 and variable is None
        members = group(process)
        assert len(members) == 2 and not any("abc-_1" in word for each in members for word in each.cmdline())
        assert not os.path.exists(file)


def test_a_server_without_a_key_is_not_for_others() -> None:
    with pytest.raises(InvalidSetting, match="--rollout-engine-host 0.0.0.0 requires an API key"):
        start_sglang(options(args={"host": "0.0.0.0"}))


def test_a_server_that_ignores_sigterm_is_killed_with_its_children() -> None:
    code = """
import http.server, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
    process = start_sglang(script(code)).wait_ready(240)
    members = group(process)
    assert len(members) == 3
    stop_all([process], grace_seconds=0.2)
    gone, alive = psutil.wait_procs(members, timeout=60)
    assert not alive


def test_a_server_that_refuses_its_model_is_named_with_its_last_words() -> None:
    with start_sglang(options(model_path="refuse"), name="sglang-4") as process:
        with pytest.raises(EngineError, match=r"(?s)sglang-4.*exit code 1.*this model is not supported"):
            process.wait_ready(240)


def test_a_server_that_is_not_ready_in_time_is_ended() -> None:
    code = "import signal; print('loading the model', flush=True); signal.pause()"
    process = start_sglang(script(code), name="sglang-5")
    with pytest.raises(DeadlineExceeded, match=r"(?s)sglang-5 was not ready after 1 s.*"):
        process.wait_ready(1)
    assert process.poll() is not None and not group(process)


def test_a_server_that_dies_later_is_named_with_its_signal() -> None:
    with start_sglang(options(), name="sglang-6").wait_ready(240) as process:
        server = psutil.Process(process.pid).children()[0]
        server.send_signal(signal.SIGKILL)
        process._process.wait(120)
        with pytest.raises(EngineError, match="sglang-6.*exit code 137"):
            process.raise_if_dead()


PARENT = """
import sys
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
process = start_sglang(SGLangOptions(model_path="m", gpus=["0"], server=sys.argv[1:])).wait_ready(240)
print(process.pid, flush=True)
sys.stdin.read()
"""


def test_an_engine_ends_with_its_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *RECORDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    guard = psutil.Process(int(parent.stdout.readline()))
    processes = [guard, *guard.children()]
    parent.kill()
    parent.communicate(timeout=120)
    gone, alive = psutil.wait_procs(processes, timeout=60)
    assert len(gone) == 2 and not alive


def test_a_reserved_port_is_given_to_nobody_else_and_can_be_listened_on() -> None:
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as plain, pytest.raises(OSError):
            plain.bind(("127.0.0.1", port))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()


@pytest.mark.parametrize(
    ("environ", "installed", "expected"),
    [
        ({}, 2, ["0", "1"]),
        ({}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, 4, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, 4, ["0"]),  # as CUDA does
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-1"}, 4, ["GPU-8932f937", "MIG-1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, 4, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 4, []),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 0, []),
    ],
)
def test_visible_gpus(environ: dict[str, str], installed: int, expected: list[str]) -> None:
    assert gpus.visible_gpus(environ, installed) == expected


@pytest.mark.parametrize(
    ("values", "visible", "installed", "expected"),
    [
        ({}, ["0"], True, "sglang"),
        ({}, [], True, "embedded"),
        ({}, ["0"], False, "embedded"),
        ({"rollout_engine_device": "cpu"}, ["0"], True, "embedded"),
        ({"rollout_engine": "embedded"}, ["0"], True, "embedded"),
        ({"rollout_engine": "sglang"}, ["0"], True, "sglang"),
        ({"rollout_engine": "sglang"}, [], True, "none is visible"),
        ({"rollout_engine": "sglang"}, ["0"], False, "not installed"),
        ({"rollout_num_gpus": 2}, [], False, "--rollout-num-gpus 2 requires a machine with GPUs"),
    ],
)
def test_the_choice_of_an_engine(
    values: dict[str, Any], visible: list[str], installed: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "is_installed", lambda: installed)
    settings = RolloutSettings(hf_checkpoint="x", **values)
    if expected in ("sglang", "embedded"):
        assert registry.choose_engine(settings, visible).name == expected
        return
    with pytest.raises(ConfigError, match=expected):
        registry.choose_engine(settings, visible)


def test_flags_of_sglang_without_a_gpu_are_left_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    settings = RolloutSettings(hf_checkpoint="x", sglang_args={"mem_fraction_static": 0.5})
    with caplog.at_level(logging.WARNING):
        assert registry.choose_engine(settings, []).name == "embedded"
    assert "requires a GPU: none is visible" in caplog.text


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs and the recording for SGLang."""
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["0", "1", "2", "3"])
    monkeypatch.setattr(kind, "is_installed", lambda: True)
    started = sglang_launch.SGLangOptions
    monkeypatch.setattr(sglang_launch, "SGLangOptions", lambda **values: started(**values, server=RECORDING))


def test_engines_share_the_gpus(on_gpus: None) -> None:
    engines = launch.start_engines(
        RolloutSettings(hf_checkpoint="m", rollout_num_gpus=4, rollout_num_gpus_per_engine=2, colocate=True)
    )
    try:
        assert [engine.name for engine in engines] == ["sglang-0", "sglang-1"]
        answers = [told(engine) for engine in engines]  # type: ignore[arg-type]
        assert [a["environ"]["CUDA_VISIBLE_DEVICES"] for a in answers] == ["0,1", "2,3"]
    finally:
        stop_all(engines)


def test_one_engine_that_fails_takes_the_others_down(on_gpus: None) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineError, match="not supported"):
        launch.start_engines(RolloutSettings(hf_checkpoint="refuse", rollout_num_gpus=2))
    # One of an earlier test may end meanwhile.
    assert set(psutil.Process().children(recursive=True)) <= before
