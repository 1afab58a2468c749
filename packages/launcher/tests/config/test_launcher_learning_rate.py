"""The length of a run in its learning rates, and the defaults that scripts of the original do not expect."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.launcher.config import run_config
from slime.launcher.config.derived import decay_over_run, other_defaults
from slime.trainer.settings.checks import require_schedule
from slime.types.errors import InvalidSetting

BATCH = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--global-batch-size", "16")


def parse(*more: str) -> run_config.RunConfig:
    words = ["--hf-checkpoint", "m", "--prompt-data", "p", *BATCH, *more]
    return run_config.parse(words, check=False, environment={})


def test_the_learning_rate_falls_over_the_updates_of_the_run() -> None:
    config = parse("--num-rollout", "5", "--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.2")
    assert config.trainer.lr_decay_iters == config.flat["lr_decay_iters"] == 10
    assert config.trainer.warmup_updates == 2


def test_a_number_of_updates_that_was_given_is_kept() -> None:
    config = parse("--num-rollout", "5", "--lr-decay-style", "linear", "--lr-decay-iters", "7")
    assert config.trainer.lr_decay_iters == 7


def test_a_constant_learning_rate_needs_no_length() -> None:
    assert parse("--num-rollout", "5").trainer.lr_decay_iters is None


def test_a_run_that_trains_nothing_needs_no_length() -> None:
    config = parse("--num-rollout", "0", "--eval-prompt-data", "held", "f", "--lr-decay-style", "linear")
    require_schedule(config.trainer)
    words = ("--num-rollout", "1", "--debug-rollout-only", "--lr-decay-style", "linear", "--lr-warmup-iters", "10")
    config = parse(*words)
    assert config.trainer.on("cpu").lr_decay_iters is None


def test_a_number_of_epochs_is_counted_when_the_run_starts() -> None:
    config = parse("--num-epoch", "3", "--lr-decay-style", "linear")
    assert config.trainer.lr_decay_iters is None
    decay_over_run(config.trainer, config.flat, 6)
    assert config.trainer.lr_decay_iters == 12


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="--lr-warmup-iters must be less than 10, the updates of the run, got 10"):
        parse("--num-rollout", "5", "--lr-decay-style", "linear", "--lr-warmup-iters", "10")


def test_iterations_that_train_the_critic_alone_are_no_part_of_the_policys_decay() -> None:
    words = ("--advantage-estimator", "ppo", "--lr-decay-style", "linear", "--num-critic-only-steps", "3")
    trainer = parse("--num-rollout", "10", *words).trainer
    assert (trainer.lr_decay_iters, trainer.critic_only_updates) == (14, 6)
    parse("--num-rollout", "10", *words, "--critic-lr-warmup-iters", "19")
    with pytest.raises(InvalidSetting, match="--critic-lr-warmup-iters must be less than 20, the updates of the run"):
        parse("--num-rollout", "10", *words, "--critic-lr-warmup-iters", "20")
    with pytest.raises(InvalidSetting, match="--lr-warmup-iters must be less than 14, the updates of the run"):
        parse("--num-rollout", "10", *words, "--lr-warmup-iters", "14")
    # A run of the critic alone.
    assert parse("--num-rollout", "2", *words).trainer.lr_decay_iters == 1


def test_a_critics_warm_up_as_long_as_the_run_is_refused() -> None:
    words = ("--advantage-estimator", "ppo", "--lr-decay-style", "linear", "--critic-lr-warmup-iters", "10")
    with pytest.raises(InvalidSetting, match="--critic-lr-warmup-iters must be less than 10, the updates of the run"):
        parse("--num-rollout", "5", *words)
    assert parse("--num-rollout", "0", "--eval-prompt-data", "held", "f", *words).trainer.on("cpu").lr_decay_iters == 11


@pytest.mark.parametrize(
    ("flags", "shared"),
    [
        (("--actor-num-gpus-per-node", "1"), None),
        (("--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "4"), None),
        (("--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2"), True),
        (("--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2"), True),
    ],
)
def test_replicas_of_a_megatron_model_share_the_optimizer(flags: tuple[str, ...], shared: bool | None) -> None:
    config = parse("--num-rollout", "5", "--train-backend", "megatron", *flags)
    assert config.megatron.use_distributed_optimizer is shared


def test_a_file_can_turn_the_shared_optimizer_off(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("use_distributed_optimizer: false\n")
    words = ("--config", str(tmp_path / "run.yaml"), "--train-backend", "megatron", "--actor-num-gpus-per-node", "2")
    assert parse("--num-rollout", "5", *words).megatron.use_distributed_optimizer is False


def test_a_default_by_which_the_original_trains_otherwise_is_announced() -> None:
    config = parse("--num-rollout", "5", "--train-backend", "megatron")
    (announced,) = other_defaults(config.trainer, config.explicit)
    assert "--lr-decay-style is not given: the learning rate stays 1e-06" in announced
    config = parse("--num-rollout", "5", "--train-backend", "megatron", "--lr-decay-style", "constant")
    assert not list(other_defaults(config.trainer, config.explicit))
    config = parse("--num-rollout", "5")
    assert not list(other_defaults(config.trainer, config.explicit))
