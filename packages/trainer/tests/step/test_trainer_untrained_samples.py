"""Samples without a token to train: what they may lack, and that they change no number of the others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tiny import Runner, make_samples, make_settings

from slime.types import Sample

TIS = """
import torch

def weigh(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs):
    weight = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).clamp(max=2.0)
    return pg_loss * (weight * torch.cat(loss_masks)), loss_masks, {"tis": weight}
"""


def without_first(*, log_probs: bool) -> list[Sample]:
    """Samples of which the first is not trained on, with or without the engine's log-probs."""
    samples = make_samples()
    samples[0].remove_sample = True
    if not log_probs:
        samples[0].rollout_log_probs = None
    return samples


@pytest.mark.parametrize(
    "values",
    [
        {"use_tis": True},
        {"use_tis": True, "custom_tis_function_path": "tis.py:weigh"},
        {"use_rollout_logprobs": True},
        {"use_rollout_logprobs": True, "advantage_estimator": "gspo"},
        {
            "use_rollout_logprobs": True, "advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True,
            "kl_coef": 0.1,
        },
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 4])
def test_an_untrained_sample_needs_no_log_probs_of_the_engine(
    model: str, tmp_path: Path, values: dict[str, Any], size: int
):
    """The buffer takes such samples: generation may have failed before there was a token."""
    (tmp_path / "tis.py").write_text(TIS)
    if "custom_tis_function_path" in values:
        values = values | {"custom_tis_function_path": f"{tmp_path / 'tis.py'}:weigh"}
    # With the entropy of the rollout every sample takes a forward pass, as it does in a mixture of experts.
    settings = make_settings(
        model, use_rollout_entropy=True, use_dynamic_batch_size=False, micro_batch_size=size, **values
    )
    runs = [Runner(settings) for _ in range(2)]
    expected, got = (
        run.run(0, without_first(log_probs=log_probs)) for run, log_probs in zip(runs, (True, False), strict=True)
    )
    assert got["train/grad_norm"] == expected["train/grad_norm"] > 0
    assert got["train/loss"] == expected["train/loss"]
    for name, weight in runs[0].weights().items():
        assert torch.equal(runs[1].weights()[name], weight), name


REDUCER = """
import torch

def by_token(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    mask = torch.cat(loss_masks)
    return lambda values: (values * mask).sum()
"""


def test_a_sum_over_tokens_has_one_divisor_with_and_without_a_function(model: str, tmp_path: Path):
    """A sample without a token counts as one in the mean over tokens, whoever adds up the tokens."""
    (tmp_path / "reducer.py").write_text(REDUCER)
    path = f"{tmp_path / 'reducer.py'}:by_token"
    plain = Runner(make_settings(model, calculate_per_token_loss=True))
    reduced = Runner(make_settings(model, calculate_per_token_loss=True, custom_pg_loss_reducer_function_path=path))
    expected, got = (run.run(0, without_first(log_probs=True)) for run in (plain, reduced))
    assert got["train/pg_loss"] == pytest.approx(expected["train/pg_loss"], rel=1e-5)
    assert got["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)
