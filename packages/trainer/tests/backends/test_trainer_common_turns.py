"""Turns that samples have in common are computed once, with the numbers of samples laid out one by one."""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_float64 import load64, reference_log_probs
from trainer_tiny import Runner, make_samples, make_settings, prefixes_of, turn_samples, write_model

from slime.trainer.backends.base import Outputs
from slime.trainer.batching.packing import PackedBatch, pack
from slime.trainer.batching.trunks import Prefixes
from slime.trainer.step import common_turns
from slime.types import Sample

BACKENDS = ("fsdp", "megatron")


def run(model: str, share: bool, samples: Sequence[Sample] | None = None, **values: Any) -> tuple[Any, Runner]:
    runner = Runner(make_settings(model, rewards_normalization=False, **values))
    assert runner.backend.can_share_prompts
    runner.backend.can_share_prompts = share
    return runner.run(0, turn_samples() if samples is None else samples), runner


@pytest.fixture
def prompts_alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Steps that share prompts, and no turns."""
    monkeypatch.setattr(Prefixes, "trunks", lambda self, positions: {})
    return monkeypatch


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens_per_gpu": 1000},
        {"max_tokens_per_gpu": 30},
        {"balance_by_flops": True, "calculate_per_token_loss": True},
        {"log_probs_max_tokens_per_gpu": 25, "entropy_coef": 0.1, "num_steps_per_rollout": 2},
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_tis": True, "get_mismatch_metrics": True},
        {"use_dynamic_batch_size": False, "micro_batch_size": 3},
    ],
    ids=lambda values: "-".join(values),
)
def test_steps_with_common_turns_are_the_steps_without(
    model: str, reference_model: str, backend: str, values: dict[str, Any], prompts_alone: pytest.MonkeyPatch
) -> None:
    values = {"train_backend": backend, "lr": 1e-4, "ref_load": reference_model, **values}
    by_prompts, _ = run(model, True, **values)
    prompts_alone.undo()
    (expected, plain), (found, shared) = (run(model, share, **values) for share in (False, True))
    assert found["perf/row_tokens"] < by_prompts["perf/row_tokens"] < expected["perf/row_tokens"]
    assert found["train/micro_batches"] <= by_prompts["train/micro_batches"]
    compared = [name for name in expected if name.startswith("train/") and name != "train/micro_batches"]
    assert {"train/loss", "train/ppo_kl", "train/entropy_loss", "train/pg_clipfrac", "train/grad_norm"} <= {*compared}
    for name in compared:
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    weights = plain.weights()
    for name, weight in shared.weights().items():
        assert ((weights[name] - weight).abs() > 1e-6).float().mean() < 0.01, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", ["turns", "fan-out"])
def test_gradients_and_log_probs_are_those_of_float64(model: str, backend: str, group: str) -> None:
    """Every sample has its own weight at every token, also at those of turns that it shares."""
    samples = turn_samples()[:4] if group == "turns" else turn_samples()[4:8]
    weight = 1.0 + torch.arange(sum(s.response_length for s in samples), dtype=torch.float64).sin()
    exact = load64(model)
    log_probs = torch.cat([reference_log_probs(exact, sample) for sample in samples])
    mask = torch.cat([torch.as_tensor(s.array("loss_mask")) for s in samples]).double()
    (log_probs * mask * weight).sum().backward()
    expected = {name: parameter.grad for name, parameter in exact.named_parameters()}

    runner = Runner(make_settings(model, train_backend=backend))
    (module,) = [runner.backend.policy] if backend == "fsdp" else runner.backend.models
    module.double()
    trunks = prefixes_of(samples).trunks(range(len(samples)))
    numbers = [1.0] * len(samples)
    batch = pack(samples, range(len(samples)), numbers, numbers, trunks=[trunks.get(i) for i in range(len(samples))])
    assert (batch.scored is not None) == (group == "turns") and len(trunks) >= 3
    seen = []

    def loss(number: int, batch: PackedBatch, outputs: Outputs) -> torch.Tensor:
        seen.append(outputs.log_probs.detach())
        return (outputs.log_probs * batch.weights * weight).sum()

    runner.backend.forward_backward([batch], loss)
    torch.testing.assert_close(seen[0].double(), log_probs.detach() * mask, atol=1e-6, rtol=1e-6)
    if backend == "fsdp":
        found = {name: p.grad for name, p in runner.backend.policy.named_parameters()}
    else:
        for parameter in module.parameters():
            # Megatron's own are float32.
            parameter.main_grad = parameter.grad
        found = dict(runner.backend.named_gradients())
    for name, gradient in expected.items():
        difference = (found[name] - gradient).norm() / gradient.norm()
        assert difference < 1e-6, (name, float(difference))


def test_samples_of_a_trajectory_keep_their_weights_and_their_counts(model: str) -> None:
    # No sample is skipped.
    runner, samples = (
        Runner(make_settings(model, rewards_normalization=False, use_rollout_entropy=True)),
        turn_samples(),
    )
    plan, found = runner.plan(0, samples), []
    for share in (True, False):
        runner.backend.can_share_prompts = share
        works = runner._step._read(plan, lambda positions: (samples[p] for p in positions))
        found.append({
            position: weights
            for work in works for batch in work.batches if batch is not None
            for position, weights in zip(batch.positions, batch.weights.split(batch.lengths), strict=True)
        })  # fmt: skip
    shared, apart = found
    assert shared.keys() == apart.keys() == set(range(len(samples)))
    for position, sample in enumerate(samples):
        assert torch.equal(shared[position], apart[position])
        # A trajectory counts once, however many samples it fans out into: 14 written tokens in 3 samples, or its own.
        siblings = [s for s in samples if s.rollout_id == sample.rollout_id] if sample.rollout_id else [sample]
        mask = torch.as_tensor(sample.array("loss_mask"))
        weight = 1 / 9 / sum(sum(s.loss_mask or ()) for s in siblings)
        torch.testing.assert_close(shared[position], mask * weight, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("by_flops", [False, True])
def test_whatever_a_row_may_hold_turns_never_cost_tokens_or_rows(
    model: str, by_flops: bool, prompts_alone: pytest.MonkeyPatch
) -> None:
    runner = Runner(make_settings(model, rewards_normalization=False, use_rollout_entropy=True))
    samples = turn_samples()
    plan, trained = runner.plan(0, samples), runner.settings

    def rows(most: int) -> tuple[int, int]:
        runner._step.settings = dataclasses.replace(trained, max_tokens_per_gpu=most, balance_by_flops=by_flops)
        (work,) = runner._step._read(plan, lambda positions: (samples[p] for p in positions))
        held = [batch.tokens.shape[1] for batch in work.batches if batch is not None]
        assert by_flops or len(held) < 2 or max(held) <= max(most, max(len(s.array("tokens")) for s in samples))
        return sum(held), len(held)

    limits = range(10, 130, 3)
    by_prompts = [rows(most) for most in limits]
    prompts_alone.undo()
    found = [rows(most) for most in limits]
    for one, other in zip(found, by_prompts, strict=True):
        assert one[0] <= other[0] and one[1] <= other[1]
    assert sum(tokens for tokens, _ in found) < 0.8 * sum(tokens for tokens, _ in by_prompts)


@pytest.mark.parametrize("values", [{"max_tokens_per_gpu": 40}, {"use_dynamic_batch_size": False}])
def test_steps_without_common_turns_are_what_they_were(
    model: str, values: dict[str, Any], prompts_alone: pytest.MonkeyPatch
) -> None:
    expected, before = run(model, True, make_samples(), **values)
    prompts_alone.undo()
    found, after = run(model, True, make_samples(), **values)
    same = [name for name in expected if not name.startswith("perf/") or name == "perf/row_tokens"]
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}
    weights = before.weights()
    assert all(torch.equal(weights[name], weight) for name, weight in after.weights().items())


def test_samples_are_read_once_however_they_are_assigned_in_the_end(model: str) -> None:
    runner, samples = Runner(make_settings(model, max_tokens_per_gpu=30)), turn_samples()
    reads: list[int] = []

    def read(positions: Sequence[int]) -> Any:
        reads.extend(positions)
        return (copy.deepcopy(samples[p]) for p in positions)

    runner._step.run(runner.plan(0, samples), read)
    assert len(reads) == len(set(reads))


def test_turns_are_shared_where_the_engine_sent_them_to_the_same_experts(tmp_path: Path) -> None:
    values = {"use_rollout_routing_replay": True, "max_tokens_per_gpu": 1000}
    samples, path = turn_samples()[:4], write_model(tmp_path / "experts", experts=4)
    routed = np.stack([np.stack([np.random.default_rng(i).permutation(4)[:2]] * 2) for i in range(40)])
    for sample in samples:
        sample.rollout_routed_experts = routed[: len(sample.array("tokens")) - 1].astype(np.int32)
    (expected, _), (same, _) = (run(path, share, samples, **values) for share in (False, True))
    assert same["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
    # One token of a turn of one sample went elsewhere: its turns are its own.
    assert samples[2].rollout_routed_experts is not None
    samples[2].rollout_routed_experts[6] = samples[2].rollout_routed_experts[6][:, ::-1] ^ 1
    (expected, _), (other, _) = (run(path, share, samples, **values) for share in (False, True))
    assert other["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
    assert same["perf/row_tokens"] < other["perf/row_tokens"] < expected["perf/row_tokens"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_function_has_the_logits_of_every_sample(model: str, backend: str) -> None:
    samples = turn_samples()[:4]
    trunks = prefixes_of(samples).trunks(range(4))
    runner = Runner(make_settings(model, train_backend=backend))
    found = []
    for chosen in ([None] * 4, [trunks.get(i) for i in range(4)]):
        batch = pack(samples, range(4), [1.0] * 4, [1.0] * 4, trunks=chosen)

        def loss(number: int, batch: PackedBatch, outputs: Outputs) -> torch.Tensor:
            assert outputs.logits is not None and len(outputs.logits) == len(batch.trained)
            found.append(outputs.logits.detach().clone())
            return outputs.logits.sum() * 0.0

        runner.backend.forward_backward([batch], loss, logits=True)
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_samples_that_begin_with_different_tokens_are_not_compared_further(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = turn_samples()
    for number, sample in enumerate(samples):
        sample.tokens = np.concatenate([[number], sample.array("tokens")[1:]])
    expected, _ = run(model, False, samples)
    monkeypatch.setattr(common_turns, "digests_at", lambda *_: pytest.fail("compared"))
    found, _ = run(model, True, samples)
    for name in ("train/loss", "train/grad_norm", "perf/row_tokens"):
        assert found[name] == expected[name]
