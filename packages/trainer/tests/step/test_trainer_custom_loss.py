"""Loss functions of the user over packed rows: their inputs, their gradients, and what is wrong with an answer."""

from pathlib import Path
from typing import Any

import pytest
from trainer_tiny import Runner, make_samples, make_settings

from slime.types.errors import InvalidSetting, PluginError

FUNCTIONS = """
import torch


def likelihood(args, batch, sum_of_sample_mean):
    loss = -sum_of_sample_mean(torch.cat(batch["policy_log_probs"]))
    return loss, {"tokens": sum(mask.sum() for mask in batch["loss_masks"]), "loss": 0.0}


def likelihood_of_logits(args, batch, logits, sum_of_sample_mean):
    assert len(logits) == sum(int(mask.sum()) for mask in batch["loss_masks"])
    targets = torch.cat([
        tokens[-length:][mask > 0]
        for tokens, length, mask in zip(
            batch["unconcat_tokens"], batch["response_lengths"], batch["loss_masks"], strict=True
        )
    ])
    of_trained = torch.log_softmax(logits.float() / args.rollout_temperature, -1).gather(-1, targets[:, None])[:, 0]
    mask = torch.cat(batch["loss_masks"])
    return -sum_of_sample_mean(torch.zeros_like(mask).masked_scatter(mask > 0, of_trained)), {}


def policy_gradient(args, batch, sum_of_sample_mean):
    new, old = torch.cat(batch["policy_log_probs"]), torch.cat(batch["log_probs"])
    ratio, advantage = (new - old).exp(), torch.cat(batch["advantages"])
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip)
    loss = sum_of_sample_mean(torch.maximum(-ratio * advantage, -clipped * advantage))
    return loss - args.entropy_coef * sum_of_sample_mean(torch.cat(batch["policy_entropy"])), {}


def no_pair(args, batch, sum_of_sample_mean):
    return torch.cat(batch["policy_log_probs"]).sum()


def by_token(args, batch, sum_of_sample_mean):
    return torch.cat(batch["policy_log_probs"]), {}


def constant(args, batch, sum_of_sample_mean):
    return torch.ones(()), {}


def metric_by_token(args, batch, sum_of_sample_mean):
    values = torch.cat(batch["policy_log_probs"])
    return values.sum(), {"values": values}
"""
CUTS: tuple[dict[str, Any], ...] = (
    {"max_tokens_per_gpu": 10**6},
    {"use_dynamic_batch_size": False, "micro_batch_size": 1},
)


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return str(file)


def custom(model: str, functions: str, name: str, **values: Any) -> Any:
    path = f"{functions}:{name}"
    return make_settings(model, loss_type="custom_loss", custom_loss_function_path=path, **values)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("name", ["likelihood", "likelihood_of_logits"])
@pytest.mark.parametrize("per_token", [False, True])
def test_the_supervised_loss_written_by_a_user_is_the_built_in_one(
    model: str, functions: str, backend: str, name: str, per_token: bool
):
    values: dict[str, Any] = dict(
        train_backend=backend, compute_advantages_and_returns=False, calculate_per_token_loss=per_token,
        rollout_temperature=0.8,
    )  # fmt: skip
    built_in = Runner(make_settings(model, loss_type="sft_loss", **values)).run()
    for cut in CUTS:
        own = Runner(custom(model, functions, name, **values, **cut)).run()
        assert own["train/loss"] == pytest.approx(built_in["train/loss"], rel=1e-6)
        assert own["train/grad_norm"] == pytest.approx(built_in["train/grad_norm"], rel=1e-5)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_the_policy_loss_written_by_a_user_is_the_built_in_one(model: str, functions: str, backend: str):
    """With advantages, old log-probs of a second update, and an entropy bonus."""
    values: dict[str, Any] = dict(train_backend=backend, num_steps_per_rollout=2, entropy_coef=0.02, lr=3e-2)
    built_in = Runner(make_settings(model, **values))
    expected = built_in.run()
    runner = Runner(custom(model, functions, "policy_gradient", **values))
    metrics = runner.run()
    assert metrics["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
    for name, weight in runner.weights().items():
        assert ((weight - built_in.weights()[name]).abs() > 1e-3).float().mean() < 0.01, name


def test_metrics_of_rows_add_up_as_the_loss_does(model: str, functions: str):
    for cut in CUTS:
        samples = make_samples()
        metrics = Runner(custom(model, functions, "likelihood", **cut)).run(0, samples)
        # Trained tokens of an update over its twelve trajectories; the loss stays the loss.
        assert metrics["train/tokens"] == pytest.approx(sum(sum(s.loss_mask) for s in samples) / 12)
        assert metrics["train/loss"] > 0
        # Whoever compares samples needs all of them.
        assert metrics["train/skipped_samples"] == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_pair", r"it returned a tensor of shape \[\], expected \(loss, metrics\)"),
        ("by_token", "its loss is a tensor of shape .*, expected a tensor of one number, with a gradient"),
        ("constant", r"its loss is a tensor of shape \[\] without a gradient"),
        ("metric_by_token", "its metric 'values' is a tensor of shape"),
    ],
)
def test_an_answer_of_another_form_names_the_function(model: str, functions: str, name: str, words: str):
    runner = Runner(custom(model, functions, name))
    with pytest.raises(PluginError, match=f"--custom-loss-function-path .*{name}: {words}"):
        runner.run()


def test_a_custom_loss_and_its_function_require_each_other(model: str):
    with pytest.raises(InvalidSetting, match="--loss-type custom_loss requires --custom-loss-function-path PATH"):
        make_settings(model, loss_type="custom_loss")
    with pytest.raises(InvalidSetting, match="--custom-loss-function-path a.b requires --loss-type custom_loss"):
        make_settings(model, custom_loss_function_path="a.b")
    with pytest.raises(InvalidSetting, match="--use-tis requires --loss-type policy_loss"):
        make_settings(model, loss_type="custom_loss", custom_loss_function_path="a.b", use_tis=True)
