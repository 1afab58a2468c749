"""Old log-probs of the weights that made each token, the moving reference model, entropies and mismatch metrics."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_float64 import load64, reference_log_probs
from trainer_stack import Stack
from trainer_tiny import Runner, make_samples, make_settings

from slime.trainer.backends.base import REFERENCE
from slime.trainer.step.old_policies import MOST_KEPT, OldPolicies, token_versions
from slime.types import Sample
from slime.types.errors import InvalidField, WrongState
from slime.types.sample import TokenSpan

BACKENDS = ("fsdp", "megatron")


def runner_of(model: str, backend: str, **values: Any) -> Runner:
    runner = Runner(make_settings(model, train_backend=backend, **values))
    if values.get("keep_old_actor"):
        runner._step.preparation.old_policies = OldPolicies(runner.backend, 0)
    return runner


def versioned(step: int, *versions: str) -> list[Sample]:
    """Samples whose first response token was made at the first version, the others at the last."""
    samples = make_samples(step)
    for sample in samples:
        sample.weight_versions = list(versions)
        sample.spans = [
            TokenSpan(0, 1, weight_version=versions[0]),
            TokenSpan(1, sample.response_length, weight_version=versions[-1]),
        ]
    return samples


def mean_kl(old: Any, new: Any, samples: list[Sample]) -> float:
    """The value of train/ppo_kl: the mean of old - new over tokens, then over the trajectories that are trained on."""
    total, weight = 0.0, 0.0
    for sample in samples:
        if sample.group_index == 2:  # equal rewards: no gradient, not computed
            continue
        mask = torch.tensor(sample.loss_mask, dtype=torch.float64)
        total += float(((old(sample) - new(sample)) * mask).sum() / mask.sum())
        weight += 1.0
    return total / weight


@pytest.mark.parametrize("backend", BACKENDS)
def test_old_log_probs_are_those_of_the_weights_that_made_each_token(model: str, backend: str, tmp_path: Any):
    runner = runner_of(model, backend, keep_old_actor=True)
    runner.run(0, versioned(0, "0"))
    old_policies = runner._step.preparation.old_policies
    assert old_policies is not None
    old_policies.keep(1)
    second = load64(model)
    weights = runner.weights()
    second.load_state_dict({name: weights.get(name, t).double() for name, t in second.state_dict().items()})
    first = load64(model)

    samples = versioned(1, "0", "1")

    def old(sample: Sample) -> torch.Tensor:
        made_first = torch.arange(sample.response_length) == 0
        return torch.where(made_first, reference_log_probs(first, sample), reference_log_probs(second, sample))

    with torch.no_grad():
        expected = mean_kl(old, lambda sample: reference_log_probs(second, sample), samples)
    metrics = runner.run(1, samples)
    assert abs(expected) > 1e-3
    assert metrics["train/ppo_kl"] == pytest.approx(expected, abs=2e-5)
    assert (metrics["train/old_policies"], metrics["train/old_policies_missing"]) == (2.0, 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_on_policy_rollouts_train_alike_with_and_without_the_old_policy(model: str, backend: str):
    plain, keeping = runner_of(model, backend), runner_of(model, backend, keep_old_actor=True)
    expected, got = plain.run(0), keeping.run(0, versioned(0, "0"))
    assert got["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-6)
    assert all(torch.equal(weight, keeping.weights()[name]) for name, weight in plain.weights().items())


def test_weights_that_are_gone_are_counted_and_replaced_by_the_policy(model: str):
    runner = runner_of(model, "fsdp", keep_old_actor=True)
    runner.run(0, versioned(0, "0"))
    metrics = runner.run(1, versioned(1, "7"))
    assert metrics["train/old_policies_missing"] == 1.0
    assert metrics["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)


def test_old_policies_are_kept_until_what_they_made_is_trained_on(model: str):
    backend = runner_of(model, "fsdp").backend
    policies = OldPolicies(backend, 0)
    assert (policies.find("0"), policies.find("default"), policies.find("")) == ("", "", None)
    policies.trained(["0"])
    policies.keep(1)
    assert (policies.find("0"), policies.find("1")) == ("version-0", "")
    policies.trained(["1"])
    assert (policies.find("0"), policies.find("1")) == (None, "version-1")
    with pytest.raises(WrongState, match="version-0"):
        backend.scores([None], of="version-0")
    for version in range(2, MOST_KEPT + 4):
        policies.keep(version)
    assert policies.find("1") is None and policies.find("4") == "version-4"


def test_groups_as_late_as_any_before_find_the_weights_that_made_them(model: str):
    policies = OldPolicies(runner_of(model, "fsdp").backend, 0)
    for version, made in enumerate(["0", "0", "0", "3", "4"]):
        policies.trained([made])
        policies.keep(version + 1)
    # Samples were two updates old once, so that others may be.
    assert [policies.find(str(version)) for version in range(2, 6)] == ["version-2", "version-3", "version-4", ""]
    assert policies.find("1") is None
    policies.trained(["3"])
    assert (policies.find("2"), policies.find("3")) == (None, "version-3")


def test_resumed_weights_are_not_those_that_generated_before_their_last_update(model: str, tmp_path: Path):
    """A checkpoint is written before its weights are sent: the version in it is that of the weights before."""
    straight = Stack(model, keep_old_actor=True)
    try:
        straight.client.train_step(0, 3, timeout=60)
        straight.client.save_checkpoint(0, str(tmp_path / "step_0"), timeout=60)
    finally:
        straight.close()
    resumed = Stack(model, keep_old_actor=True, load=str(tmp_path / "step_0"))
    try:
        policies = resumed.trainer._step.preparation.old_policies
        assert policies.find("0") is None
        resumed.client.update_weights(1, timeout=60)
        assert (policies.find("0"), policies.find("1")) == (None, "")
    finally:
        resumed.close()


def test_versions_of_tokens_come_from_spans_or_from_a_single_version():
    sample = Sample(tokens=[1, 2, 3, 4], response_length=3, weight_versions=["5"])
    assert token_versions(sample).tolist() == ["5", "5", "5"]
    sample.weight_versions = ["5", "6"]
    assert token_versions(sample).tolist() == ["", "", ""]
    sample.spans = [TokenSpan(1, 2, weight_version="5")]
    assert token_versions(sample).tolist() == ["", "5", ""]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_policy_becomes_the_reference_model(model: str, reference_model: str, backend: str):
    runner = runner_of(model, backend, use_kl_loss=True, ref_load=reference_model)
    assert runner.run(0)["train/kl_loss"] != pytest.approx(0.0, abs=1e-3)
    runner.backend.keep(REFERENCE)
    assert runner.run(1)["train/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert runner.run(2)["train/kl_loss"] != pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forgotten_moments_make_an_update_like_the_first(model: str, backend: str):
    forgetting = runner_of(model, backend, reset_optimizer_states=True, weight_decay=0.0)
    forgetting.run(0)
    before = forgetting.weights()
    forgetting.run(1)
    moved = torch.cat([(w - before[name]).abs().flatten() for name, w in forgetting.weights().items()])
    # The first update of AdamW moves a weight by the learning rate, whatever its gradient is.
    first_like = (moved - 1e-2).abs() < 1e-4
    assert first_like.float().mean() > 0.9
    remembering = runner_of(model, backend, weight_decay=0.0)
    remembering.run(0)
    before = remembering.weights()
    remembering.run(1)
    moved = torch.cat([(w - before[name]).abs().flatten() for name, w in remembering.weights().items()])
    assert ((moved - 1e-2).abs() < 1e-4).float().mean() < 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_entropy_of_a_rollout_equals_its_float64_reference(model: str, backend: str):
    metrics = runner_of(model, backend, use_rollout_entropy=True, entropy_coef=1e-9).run(0)
    reference, samples = load64(model), make_samples(0)
    total = 0.0
    for sample in samples:
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor(sample.tokens, dtype=torch.int64)[None]).logits[0]
        entropy = torch.distributions.Categorical(logits=logits).entropy()[-sample.response_length - 1 : -1]
        mask = torch.tensor(sample.loss_mask, dtype=torch.float64)
        total += float((entropy * mask).sum() / mask.sum())
    assert metrics["rollout/entropy"] == pytest.approx(total / len(samples), rel=1e-5)


@pytest.mark.parametrize("values", [{}, {"use_rollout_logprobs": True, "num_steps_per_rollout": 2}])
def test_mismatch_metrics_are_those_of_the_correction_and_change_no_loss(model: str, values: dict[str, Any]):
    plain, watching = runner_of(model, "fsdp", **values), runner_of(model, "fsdp", get_mismatch_metrics=True, **values)
    expected, got = plain.run(0), watching.run(0)
    assert got["train/loss"] == expected["train/loss"]
    assert all(torch.equal(weight, watching.weights()[name]) for name, weight in plain.weights().items())
    assert "train/tis" not in expected
    reference, total, weight = load64(model), 0.0, 0
    for sample in make_samples(0)[:8]:
        with torch.no_grad():
            ratio = (reference_log_probs(reference, sample) - torch.tensor(sample.rollout_log_probs).double()).exp()
        mask = torch.tensor(sample.loss_mask, dtype=torch.float64)
        total, weight = total + float((ratio * mask).sum() / mask.sum()), weight + 1
    if not values:
        assert got["train/tis"] == pytest.approx(total / weight, rel=1e-4)
    assert math.isfinite(got["train/tis_clipfrac"])


def test_mismatch_metrics_need_the_log_probs_of_the_engine(model: str):
    samples = make_samples()
    samples[0].rollout_log_probs = None
    with pytest.raises(InvalidField, match="rollout_log_probs"):
        runner_of(model, "fsdp", get_mismatch_metrics=True).run(0, samples)
