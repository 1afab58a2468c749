"""Training from Python, and from scripts: `SlimeRunner` and `execute_train` with real processes."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

import slime.utils.external_utils.command_utils as U
from slime.launcher import SlimeRunner
from slime.launcher.quickstart import reverse
from slime.launcher.runner.ray_job import RayHead, RunFailed

REWARD = ["--custom-rm-path", "slime.launcher.quickstart.reverse.reward", "--ray-num-cpus", "2"]
SCRIPT = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ['MARK'] + sys.argv[2])"


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.chdir(tmp_path)
    data, _ = reverse.write_data(tmp_path, seed=0)
    model = reverse.write_model(tmp_path / "model", seed=0)
    return dict(model_dir=model, data_path=data, num_gpus=0, rollout_batch_size=4, n_samples_per_prompt=4)


def test_the_local_path_trains_on_the_cpu(inputs: dict[str, object], tmp_path: Path) -> None:
    runner = SlimeRunner(exp_id="first", rollout_max_response_len=4, lr=1e-3, extra_flags=REWARD, **inputs)
    runner.train(num_rollout=2)
    run = tmp_path / "runs" / "first"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert (run / "model" / "config.json").is_file()


class Agent(BaseHTTPRequestHandler):
    """Asks the model of its session to write a number backwards, and rewards each digit that it wrote."""

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        own = payload["_rollout"]
        body = {"model": own["model_id"], "messages": [{"role": "user", "content": payload["number"]}], "max_tokens": 4}
        request = urllib.request.Request(
            own["base_url"] + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = json.loads(answer.read())["choices"][0]["message"]["content"] or ""
        right = sum(a == b for a, b in zip(text, payload["number"][::-1], strict=False))
        result = json.dumps({"status_code": 200, "rewards": right / 3 + len(set(text)) / 10}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(result)))
        self.end_headers()
        self.wfile.write(result)

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def agent_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Agent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/invocations"
        server.shutdown()


def test_an_agent_over_http_trains_on_the_cpu(inputs: dict[str, object], tmp_path: Path, agent_url: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(inputs["model_dir"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    tokenizer.save_pretrained(inputs["model_dir"])
    rows = [json.loads(line) for line in Path(str(inputs["data_path"])).read_text().splitlines()]
    data = tmp_path / "agents.jsonl"
    data.write_text("".join(json.dumps(row | {"metadata": {"number": row["prompt"][:3]}}) + "\n" for row in rows))
    runner = SlimeRunner(
        exp_id="agents", agent_runtime_arn=agent_url, gateway_port=0, rollout_max_response_len=4,
        extra_flags=["--ray-num-cpus", "2"], **(inputs | {"data_path": data}),
    )  # fmt: skip
    runner.train(num_rollout=1)
    row = json.loads((tmp_path / "runs" / "agents" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["rollout/agents/episodes"] == 16
    assert row["rollout/agents/failed"] == 0
    assert row["rollout/raw_reward"] > 0
    assert row["train/grad_norm"] > 0


def test_a_run_that_fails_is_an_error(inputs: dict[str, object], capfd: pytest.CaptureFixture[str]) -> None:
    runner = SlimeRunner(exp_id="second", extra_flags=["--eps-clip", "-1"], **inputs)
    with pytest.raises(RunFailed, match="the training ended with exit code 2"):
        runner.train()
    assert "--eps-clip" in capfd.readouterr().err


def test_a_key_for_a_job_is_in_no_argument_list_and_no_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, mark, key = tmp_path / "job.py", tmp_path / "mark", secrets.token_hex(16)
    script.write_text(SCRIPT.replace("MARK", "A_SERVICE_KEY"))
    seen: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    seen.add(" ".join(process.cmdline()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        variables = {"A_SERVICE_KEY": key, "PLAIN": "1"}
        U.execute_train(f"{mark} 'a b'", 0, None, str(script), extra_env_vars=variables)
    finally:
        done.set()
        thread.join()
    assert mark.read_text() == f"{key}a b"
    assert any("ray job submit" in words or "--runtime-env=" in words for words in seen)
    assert not [words for words in seen if key in words]
    assert key not in "".join(capfd.readouterr())


def test_an_external_ray_takes_the_job_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, mark = tmp_path / "job.py", tmp_path / "mark"
    script.write_text(SCRIPT)
    with RayHead(0) as head:
        for name, value in head.variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SLIME_SCRIPT_EXTERNAL_RAY", "1")
        monkeypatch.setenv("SLIME_SCRIPT_RAY_DASHBOARD_PORT", str(head.dashboard_port))
        U.execute_train(f"{mark} 'a b'", 0, None, str(script), extra_env_vars={"MARK": "seen "})
        assert mark.read_text() == "seen a b"
        assert head.running
        script.write_text("raise SystemExit(3)")
        with pytest.raises(RunFailed, match="the training job ended"):
            U.execute_train("", 0, None, str(script))
        family = psutil.Process().children(recursive=True)
    assert len(family) > 3
    assert psutil.wait_procs(family, timeout=60)[1] == []
