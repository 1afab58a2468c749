"""Prompts that a group shares are computed once, with the numbers of samples laid out one by one."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from trainer_tiny import Runner, make_samples, make_settings

from slime.trainer.backends.base import Outputs
from slime.trainer.batching.packing import PackedBatch, pack
from slime.types import Sample

BACKENDS = ("fsdp", "megatron")


def run(model: str, samples: list[Sample], share: bool, **values: Any) -> tuple[dict[str, float], Runner]:
    runner = Runner(make_settings(model, rewards_normalization=False, **values))
    assert runner.backend.can_share_prompts
    runner.backend.can_share_prompts = share
    return runner.run(0, samples), runner


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens_per_gpu": 1000},
        {"balance_by_flops": True},
        {"log_probs_max_tokens_per_gpu": 20, "entropy_coef": 0.1},
    ],
    ids=lambda values: next(iter(values)),
)
def test_steps_with_shared_prompts_are_the_steps_without(model: str, backend: str, values: dict[str, Any]):
    values = {"train_backend": backend, "num_steps_per_rollout": 2, "lr": 1e-4, **values}
    (expected, plain), (found, shared) = (run(model, make_samples(), share, **values) for share in (False, True))
    assert found["perf/row_tokens"] < expected["perf/row_tokens"]
    for name, value in expected.items():
        if name.startswith("train/") and name != "train/micro_batches":
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    weights = plain.weights()
    for name, weight in shared.weights().items():
        assert ((weights[name] - weight).abs() > 1e-6).float().mean() < 0.01, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_prompts_of_a_group_that_differ_are_not_shared(model: str, backend: str):
    samples = make_samples()
    for number, sample in enumerate(samples):
        tokens = np.array(sample.tokens)
        # Two prompts of one length in every group.
        tokens[0] = 2 + number % 2
        samples[number] = dataclasses.replace(sample, tokens=tokens)
    values = {"train_backend": backend, "max_tokens_per_gpu": 24}
    expected, found = (run(model, samples, share, **values)[0] for share in (False, True))
    assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
    assert found["perf/row_tokens"] < expected["perf/row_tokens"]
    assert found["perf/row_tokens"] <= 24 * found["train/micro_batches"]


def test_gradients_with_shared_prompts_are_those_of_float64(model: str):
    runner = Runner(make_settings(model))
    runner.backend.policy.double()
    samples = make_samples()
    gradients = []
    for share in (False, True):
        numbers = [1.0] * len(samples)
        batch = pack(samples, range(len(samples)), numbers, numbers, share_prompts=share)
        assert (batch.runs.shared is not None) == share

        def loss(number: int, batch: PackedBatch, outputs: Outputs) -> torch.Tensor:
            return (outputs.log_probs * torch.arange(len(batch.mask))).sum()

        runner.backend.forward_backward([batch], loss)
        gradients.append({n: p.grad.clone() for n, p in runner.backend.policy.named_parameters()})
        runner.backend.policy.zero_grad()
    for name, gradient in gradients[0].items():
        difference = (gradients[1][name] - gradient).norm() / gradient.norm()
        assert difference < 1e-6, (name, difference)
