"""Whole runs on one GPU that trainer and SGLang share: by `slime train`, by `SlimeRunner`; and `slime doctor` there.

    SLIME_TEST_MODEL=DIR pytest tests/gpu/runs/test_colocated_runs.py

DIR: a Hugging Face directory of a small model that chats. SLIME_TEST_ATTENTION: see `--sglang-attention-backend`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_needs import ATTENTION, MODEL, needs

NUM_GPUS = 1

pytestmark = needs(NUM_GPUS, "sglang", model=True)

SGLANG = ["--sglang-attention-backend", ATTENTION, "--sglang-mem-fraction-static", "0.4"]
CASES = {
    "fsdp": ["--train-backend", "fsdp", "--use-kl-loss"],
    "megatron": [
        "--train-backend", "megatron", "--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d",
        "--use-precision-aware-optimizer",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from slime.launcher.quickstart import arithmetic

    return arithmetic.write(tmp_path_factory.mktemp("prompts"), 0)


def flags(prompts: tuple[Path, Path], run: Path) -> list[str]:
    values: dict[str, Any] = {
        "hf-checkpoint": MODEL, "output-dir": run, "prompt-data": prompts[0], "input-key": "prompt",
        "label-key": "label", "rm-type": "integer", "num-rollout": 3, "rollout-batch-size": 16,
        "n-samples-per-prompt": 8, "rollout-max-response-len": 16, "lr": 1e-5, "max-tokens-per-gpu": 16384,
    }  # fmt: skip
    switches = ["--apply-chat-template", "--use-dynamic-batch-size", "--colocate"]
    return [word for name, value in values.items() for word in (f"--{name}", str(value))] + switches + SGLANG


def slime(*words: str, timeout: float = 500.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slime.launcher.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def steps_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "perf/step_time" in row]


def logs(run: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted((run / "logs").glob("*.log")))


@pytest.mark.parametrize("case", CASES)
def test_memory_is_handed_back_and_forth_and_engines_hold_what_was_trained(
    prompts: tuple[Path, Path], tmp_path: Path, case: str
) -> None:
    run = tmp_path / "run"
    done = slime("train", *flags(prompts, run), *CASES[case], "--check-weight-update-equal")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + logs(run)
    steps = steps_of(run)
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        print(case, {name: round(value, 4) for name, value in step.items() if name.startswith("perf/")})
        # Two implementations in bfloat16, the trainer's weights having come back from host memory.
        assert 0 < step["train/train_rollout_logprob_abs_diff"] < 0.1
        assert step["train/grad_norm"] > 0


# Ray takes jobs only with the packages of `ray[default]`.
@needs(NUM_GPUS, "aiohttp_cors", "opencensus", "virtualenv")
def test_slime_runner_trains_as_a_job_of_its_own_ray(
    prompts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.converters.cli import main
    from slime.launcher import SlimeRunner
    from slime.launcher.runner.ray_job import LOOPBACK, listens
    from slime.launcher.runner.runner import DASHBOARD_PORT

    monkeypatch.chdir(tmp_path)
    script = tmp_path / "scripts" / "models" / "small.sh"
    script.parent.mkdir(parents=True)
    assert main(["model-args", "--hf-checkpoint", MODEL, "--output", str(script)]) == 0
    runner = SlimeRunner(
        exp_id="first", model_dir=MODEL, data_path=str(prompts[0]), model_type="small", slime_dir=str(tmp_path),
        num_gpus=1, tp_size=1, rollout_gpus_per_engine=1, rollout_batch_size=16, rollout_max_response_len=16,
        sglang_mem_fraction_static=0.4,
        extra_flags=["--apply-chat-template", "--rm-type", "integer", "--sglang-attention-backend", ATTENTION],
    )  # fmt: skip
    runner.train(num_rollout=2)
    runs = list(tmp_path.rglob("metrics.jsonl"))
    assert len(runs) == 1 and [step["step"] for step in steps_of(runs[0].parent)] == [0, 1]
    assert not listens(LOOPBACK, DASHBOARD_PORT)


def test_the_doctor_and_a_dry_run_know_the_gpu(prompts: tuple[Path, Path], tmp_path: Path) -> None:
    done = slime("doctor", *flags(prompts, tmp_path / "run"), timeout=120)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GPU 0: " in done.stdout
    planned = slime("train", "--dry-run", *flags(prompts, tmp_path / "run"), timeout=120)
    print(planned.stdout)
    assert planned.returncode == 0, planned.stderr
    assert "bfloat16" in planned.stdout and "sglang-0" in planned.stdout
