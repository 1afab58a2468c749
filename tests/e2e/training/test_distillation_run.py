"""On-policy distillation: whole runs with a teacher in the trainer, and with one behind an engine."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slime.launcher.quickstart import reverse
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from tiny_runs import metrics, run_command, write_inputs

FLAGS = ("--use-opd", "--num-rollout", "3", "--deterministic", "--use-rollout-logprobs")


def write_teacher(directory: Path) -> Path:
    """Another model of the same vocabulary, with clear preferences."""
    reverse.write_model(directory, 1)
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = 10 * weights["lm_head.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def test_a_teacher_in_the_trainer_and_one_behind_an_engine_make_the_same_run(tmp_path: Path) -> None:
    inputs, teacher = write_inputs(tmp_path / "inputs"), write_teacher(tmp_path / "teacher")
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    constant = tmp_path / "constant.py"
    constant.write_text("async def reward(args, sample, **kwargs):\n    return 0.0\n")
    run_command(
        "train", inputs, inside, *FLAGS, "--custom-rm-path", f"{constant}:reward",
        "--opd-type", "trainer", "--opd-teacher-load", str(teacher),
    )  # fmt: skip
    with start_embedded(EmbeddedOptions(model_path=str(teacher), threads=1)) as process:
        url = f"{process.wait_ready(120).url}/generate"
        run_command(
            "train", inputs, outside, *FLAGS, "--opd-type", "sglang", "--rm-url", url,
            "--custom-rm-path", "slime.rollout.on_policy_distillation.reward_func",
            "--custom-reward-post-process-path", "slime.rollout.on_policy_distillation.post_process_rewards",
        )  # fmt: skip
    seen = [[row["train/opd_reverse_kl"] for row in metrics(output)] for output in (inside, outside)]
    assert len(seen[0]) == 3 and torch.allclose(*map(torch.tensor, seen), rtol=1e-2, atol=1e-3), seen
    assert all(abs(value) > 0 for value in seen[0]), seen
