"""A run on two Ray nodes of one host, each with a GPU of its own that a trainer rank and an SGLang engine share.

    SLIME_TEST_MODEL=DIR pytest tests/gpu/runs/test_two_nodes.py

DIR: a Hugging Face directory of a small model that chats. SLIME_TEST_ATTENTION: see `--sglang-attention-backend`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_needs import ATTENTION, MODEL, needs
from ray_cluster import RayCluster
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.recordings.rollouts import read_rollout
from tiny_runs import gone, metrics, wait_for

NUM_GPUS = 2

HEAD, SECOND = "127.0.0.1", "127.0.0.2"
pytestmark = needs(NUM_GPUS, "sglang", model=True)


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with RayCluster(dict(zip((HEAD, SECOND), visible_gpus(), strict=False))) as cluster:
        cluster.ensure(SECOND)
        yield cluster


def flags(prompts: Path, run: Path) -> list[str]:
    values: dict[str, Any] = {
        "hf-checkpoint": MODEL, "output-dir": run, "prompt-data": prompts, "input-key": "prompt",
        "label-key": "label", "rm-type": "integer", "num-rollout": 3, "rollout-batch-size": 16,
        "n-samples-per-prompt": 8, "rollout-max-response-len": 16, "lr": 1e-5, "max-tokens-per-gpu": 16384,
        "train-backend": "fsdp", "actor-num-nodes": 2, "actor-num-gpus-per-node": 1,
        "save-debug-rollout-data": run / "rollouts" / "{rollout_id}",
        "sglang-attention-backend": ATTENTION, "sglang-mem-fraction-static": 0.4,
    }  # fmt: skip
    switches = ["--apply-chat-template", "--use-dynamic-batch-size", "--colocate", "--check-weight-update-equal"]
    return [word for name, value in values.items() for word in (f"--{name}", str(value))] + switches


def logs(run: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted((run / "logs").glob("*.log")))


def test_each_node_has_ranks_and_engines_on_its_gpu(cluster: RayCluster, tmp_path: Path) -> None:
    from slime.launcher.quickstart import arithmetic

    run = tmp_path / "run"
    prompts = arithmetic.write(tmp_path, 0)[0]
    command = [sys.executable, "-m", "slime.launcher.cli", "train", "--ray-address", cluster.address]
    done = subprocess.run(
        [*command, *flags(prompts, run)], env=cluster.environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + logs(run)
    wait_for(lambda: gone(cluster.workers()), 30, "every process of the run has ended")
    steps = metrics(run)
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        print({name: round(value, 4) for name, value in step.items() if name.startswith("perf/")})
        # Two implementations in bfloat16, the trainer's weights having come back from host memory.
        assert 0 < step["train/train_rollout_logprob_abs_diff"] < 0.1
        assert step["train/grad_norm"] > 0
        samples = [s for group in read_rollout(run / "rollouts" / str(step["step"])).groups for s in group.samples]
        assert len(samples) == 128 and all(set(s.weight_versions) == {str(step["step"])} for s in samples)
    for node in range(2):
        assert f"[sglang-{node}]" in (run / "logs" / f"engines-{node}.log").read_text()
