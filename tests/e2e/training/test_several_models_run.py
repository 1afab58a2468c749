"""A run with a judge beside the policy: what docs/several-models.md prints, while the judge's engine is killed once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from slime.launcher.quickstart import reverse
from slime.types.clients import RolloutClient
from slime.types.clients.rollout import Engine
from slime.types.rpc import RpcSettings
from tiny_runs import DEADLINE, command_line, descendants, finish, metrics, wait_for

PAGE = Path(__file__).resolve().parents[3] / "docs" / "several-models.md"
RESTARTS = "rollout/engine_restarts"


def printed(first_line: str) -> str:
    """Returns the block of the page that begins with this line."""
    return next(text for text in re.findall(r"```\w+\n(.*?)```", PAGE.read_text(), re.S) if text.startswith(first_line))


def started(directory: Path) -> subprocess.Popen[str]:
    train, _ = reverse.write_data(directory, 0)
    for seed, name in enumerate(("policy", "judge")):
        reverse.write_model(directory / "models" / name, seed)
    (directory / "models.yaml").write_text(printed("# models.yaml"))
    (directory / "judge.py").write_text(printed("# --custom-rm-path judge.py:reward"))
    words = [
        "--sglang-config", "models.yaml", "--custom-rm-path", "judge.py:reward", "--hf-checkpoint", "models/policy",
        "--prompt-data", str(train), "--input-key", "prompt", "--num-rollout", "4", "--rollout-batch-size", "8",
        "--n-samples-per-prompt", "4", "--rollout-max-response-len", "5", "--lr", "1e-2", "--output-dir", "out",
    ]  # fmt: skip
    # Paths of the test's own may be relative.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-m", "slime.launcher.cli", "train", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=directory, env=environment,
    )  # fmt: skip


def process_of(engine: Engine, processes: Sequence[psutil.Process]) -> psutil.Process:
    port = urlsplit(engine.url).port
    engines = [p for p in processes if "slime.rollout.engines.embedded" in command_line(p)]
    (found,) = [p for p in engines if port in {c.laddr.port for c in p.net_connections("tcp")}]
    return found


def test_a_policy_is_trained_on_the_rewards_of_a_judge(tmp_path: Path) -> None:
    process = started(tmp_path)
    access = tmp_path / "out" / "access"
    wait_for(lambda: (access / "addresses.json").exists() or process.poll() is not None, DEADLINE, "the services")
    assert process.poll() is None, finish(process)
    address = json.loads((access / "addresses.json").read_text())["rollout"]
    token = access / "read.token"
    with RolloutClient(address, settings=RpcSettings(token_file=str(token))) as client:
        wait_for(lambda: client.status().weight_version >= 1, DEADLINE, "an update of the policy")
        policy, judge = client.status().engines
        assert (policy.model, judge.model) == ("policy", "judge")
        # The judge has the weights of its directory.
        assert policy.weight_version >= 1 and judge.weight_version == 0 and not judge.awaits_weights
        line = [sys.executable, "-m", "slime.rollout", "engines", "list", "--address", address]
        listed = subprocess.run([*line, "--token-file", str(token)], capture_output=True, text=True, timeout=60)
        assert re.search(r"^embedded-1 +judge +http", listed.stdout, re.M), listed.stdout + listed.stderr
        process_of(judge, descendants(process)).kill()
    output = finish(process)
    assert process.returncode == 0, output

    rows = metrics(tmp_path / "out")
    assert len(rows) == 4 and sum(row.get(RESTARTS, 0) for row in rows) == 1, rows
    # Log-probs of the judge, and none of the reward function's own.
    assert all(-50 < row["rollout/raw_reward"] < 0 for row in rows), rows
    assert "model judge is served by embedded-1" in (tmp_path / "out" / "logs" / "rollout.log").read_text()
