"""The example of a loss of the user: DPO, against its formula in float64, and as a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_float64 import load64, reference_log_probs
from trainer_tiny import Runner, make_samples, make_settings, write_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "dpo" / "dpo.py"
BETA = 0.1


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_loss_and_gradient_are_those_of_the_formula(tmp_path: Path, backend: str) -> None:
    policy, reference = (write_model(tmp_path / name, seed=seed) for seed, name in enumerate(("policy", "reference")))
    samples = make_samples(groups=4, size=2)
    for sample in samples:
        assert sample.index is not None
        sample.reward = float(sample.index % 2)
    of_policy, of_reference = load64(policy), load64(reference)
    total = torch.zeros((), dtype=torch.float64)
    for rejected, chosen in zip(samples[::2], samples[1::2], strict=True):
        ratios = []
        for sample in (chosen, rejected):
            mask = torch.tensor(np.asarray(sample.loss_mask), dtype=torch.float64)
            with torch.no_grad():
                fixed = reference_log_probs(of_reference, sample)
            ratios.append(((reference_log_probs(of_policy, sample) - fixed) * mask).sum())
        total = total + torch.log1p(torch.exp(-BETA * (ratios[0] - ratios[1]))) / 4
    total.backward()
    norm = sum(float((p.grad**2).sum()) for p in of_policy.parameters() if p.grad is not None) ** 0.5

    for size in (2, 8):
        settings = make_settings(
            policy, ref_load=reference, train_backend=backend, loss_type="custom_loss", use_kl_loss=True,
            custom_loss_function_path=f"{EXAMPLE}:dpo_loss", use_dynamic_batch_size=False, micro_batch_size=size,
        )  # fmt: skip
        metrics = Runner(settings).run(0, samples)
        assert metrics["train/loss"] == pytest.approx(float(total.detach()), rel=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=2e-5)


def test_a_row_with_half_a_pair_is_an_error(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    settings = make_settings(
        model, loss_type="custom_loss", custom_loss_function_path=f"{EXAMPLE}:dpo_loss", use_kl_loss=True,
        use_dynamic_batch_size=False, micro_batch_size=3,
    )  # fmt: skip
    with pytest.raises(ValueError, match="--micro-batch-size must be even"):
        Runner(settings).run(0, make_samples(groups=4, size=2))


def test_the_model_learns_to_prefer(
    run_example: Callable[..., str], steps_of: Callable[[Path], list[dict[str, Any]]], tmp_path: Path
) -> None:
    output = run_example("dpo", "out", "--num-rollout", "10")
    rows = steps_of(tmp_path / "out")
    assert rows[0]["train/loss"] == pytest.approx(0.6931, abs=1e-3) and rows[0]["train/dpo_margin"] == 0, output
    assert rows[-1]["train/loss"] < 0.6 and rows[-1]["train/dpo_accuracy"] > 0.9, output
