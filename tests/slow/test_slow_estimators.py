"""Estimators, variants of the loss, replayed routing and a teacher, which train the tiny model to reverse digits with
every seed.

Each run takes some two minutes on an idle machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.launcher.quickstart import reverse
from slow_cases import slow
from tiny_runs import finish, metrics, quickstart

pytestmark = slow


# The quickstart's recipe is grpo without division by the deviation.
VARIANTS = {
    "rloo": ("--advantage-estimator", "rloo"),
    "top-p": ("--rollout-top-p", "0.95"),
    "ppo": ("--advantage-estimator", "ppo", "--critic-lr", "2e-3", "--lambd", "0.95"),
    "gspo": ("--advantage-estimator", "gspo"),
    "cispo": ("--advantage-estimator", "cispo"),
    "reinforce++": ("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages"),
    "reinforce++ baseline": ("--advantage-estimator", "reinforce_plus_plus_baseline", "--normalize-advantages"),
    "dr-grpo": ("--loss-divisor", "5"),
    "deviation of the batch": ("--grpo-std-scope", "batch"),
    "tis": ("--use-tis",),
    "sequence tis": ("--use-tis", "--tis-mode", "sequence_truncate"),
    "icepop": ("--use-tis", "--tis-mode", "token_mask", "--tis-clip-low", "0.5"),
    "mis": ("--use-tis", "--tis-mode", "sequence_mask", "--tis-clip-low", "0.5"),
    "lora": ("--lora-rank", "32", "--lora-target-modules", "all-linear", "lm_head", "--lr", "3e-3"),
    # The right answer has five tokens.
    "overlong": ("--overlong-mask", "--overlong-buffer-len", "2", "--rollout-max-response-len", "8"),
}


# Both kinds of replay: with the experts of the old policy's pass, and with those that the engine chose.
REPLAYS = ("--use-routing-replay", "--use-rollout-routing-replay")
SEEDS = [1, 2, 3]


def learns(output_dir: Path, seed: int, *flags: str) -> None:
    process = quickstart(output_dir, "--seed", str(seed), "--rollout-seed", str(seed), *flags)
    output = finish(process, seconds=900)
    assert process.returncode == 0, output
    rewards = [row["rollout/raw_reward"] for row in metrics(output_dir)]
    assert sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-3:]) / 3 > 0.9, output


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_learns_with_every_seed(tmp_path: Path, variant: str, seed: int) -> None:
    learns(tmp_path, seed, *VARIANTS[variant])


def write_experts(directory: Path, seed: int) -> Path:
    """The tiny model with four experts in each layer, of which a token takes two."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    dense = json.loads((reverse.write_model(directory, seed) / "config.json").read_text())
    torch.manual_seed(seed)
    same = {name: value for name, value in dense.items() if name not in ("architectures", "model_type", "pad_token_id")}
    # With a pad token its row is 0, where a norm's gradient is huge, and transformers trains no such row.
    config = Qwen3MoeConfig(
        **same, pad_token_id=None, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("replay", REPLAYS)
def test_experts_learn_with_replayed_routing(tmp_path: Path, replay: str, backend: str, seed: int) -> None:
    experts = write_experts(tmp_path / "experts", seed)
    learns(tmp_path / "run", seed, "--hf-checkpoint", str(experts), "--train-backend", backend, replay)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("teacher")
    learns(directory, 0)
    return directory / "model"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_teacher_teaches_a_model_that_gets_no_rewards(tmp_path: Path, teacher: Path, seed: int) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def none(args, samples):\n    return [s.reward for s in samples], [0.0] * len(samples)\n")
    learns(
        tmp_path / "run", seed, "--use-opd", "--opd-type", "trainer", "--opd-teacher-load", str(teacher),
        "--custom-reward-post-process-path", f"{rewards}:none",
    )  # fmt: skip
