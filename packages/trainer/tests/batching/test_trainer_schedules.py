"""Batches cut, padded and recomputed in other ways give the same numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_tiny import Runner, make_samples, make_settings, summarize

from slime.trainer.batching.packing import pack
from slime.trainer.batching.plan import Planner, assign
from slime.trainer.batching.schedule import Lengths, fewest_bins, first_fit, regroup, schedule
from slime.types import Sample

BACKENDS = ("fsdp", "megatron")


def run(model: str, samples: Sequence[Sample] | None = None, **values: Any) -> tuple[dict[str, float], Any]:
    runner = Runner(make_settings(model, **values))
    return runner.run(0, samples), runner


def assert_same(one: tuple[dict[str, float], Any], other: tuple[dict[str, float], Any], tolerance: float = 1e-5):
    for name in ("train/loss", "train/grad_norm", "train/ppo_kl", "train/entropy_loss"):
        assert other[0][name] == pytest.approx(one[0][name], rel=tolerance, abs=1e-6), name
    weights = other[1].weights()
    for name, weight in one[1].weights().items():
        # Adam turns the last bits of a gradient near 0 into a whole step.
        assert ((weights[name] - weight).abs() > 1e-4).float().mean() < 0.01, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "values",
    [
        {"log_probs_max_tokens_per_gpu": 12},
        {"log_probs_max_tokens_per_gpu": 1000},
        {"balance_by_flops": True},
        {"data_pad_size_multiplier": 16},
        {"recompute_loss_function": True},
    ],
    ids=lambda values: next(iter(values)),
)
def test_how_passes_are_made_changes_nothing(model: str, backend: str, values: dict[str, Any]):
    common: dict[str, Any] = {"train_backend": backend, "num_steps_per_rollout": 2, "entropy_coef": 0.01}
    assert_same(run(model, **common), run(model, **common, **values))


def test_passes_for_log_probs_have_their_own_micro_batches(model: str, monkeypatch: pytest.MonkeyPatch):
    runner = Runner(
        make_settings(model, num_steps_per_rollout=2, max_tokens_per_gpu=16, log_probs_max_tokens_per_gpu=1000)
    )
    seen: list[tuple[str, int]] = []
    scores, train = runner.backend.scores, runner.backend.forward_backward

    def counted_scores(batches: Any, **rest: Any) -> Any:
        seen.append(("scores", len(batches)))
        return scores(batches, **rest)

    def counted_train(batches: Any, *rest: Any, **named: Any) -> Any:
        seen.append(("train", len(batches)))
        return train(batches, *rest, **named)

    monkeypatch.setattr(runner.backend, "scores", counted_scores)
    monkeypatch.setattr(runner.backend, "forward_backward", counted_train)
    runner.run(0)
    of = {kind: [number for name, number in seen if name == kind] for kind in ("scores", "train")}
    assert of["scores"] == [1, 1] and sum(of["train"]) > 2


def test_the_loss_is_recomputed_from_the_logits(model: str):
    """Between the passes no float32 tensor of a row of logits is kept but the logits themselves."""

    def kept(recompute: bool) -> int:
        runner = Runner(make_settings(model, recompute_loss_function=recompute, max_tokens_per_gpu=1000))
        found = 0

        def pack_tensor(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal found
            found += tensor.dtype == torch.float32 and tensor.shape[-1:] == (32,) and tensor.ndim == 2
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor):
            runner.run(0)
        return found

    assert kept(True) < kept(False)


def test_micro_batches_of_equal_work_may_exceed_the_tokens():
    lengths = [30, 10, 10, 10, 10, 10]
    by_tokens = schedule(range(6), Lengths(lengths), 2, max_tokens=40, balance=True)
    by_work = schedule(
        range(6), Lengths(lengths), 2, max_tokens=40, balance=True, form_by_cost=True, cost=lambda n: float(n * n)
    )
    assert sorted(p for share in by_work for b in share for p in b) == list(range(6))
    assert [len(share) for share in by_work] == [len(share) for share in by_tokens] == [1, 1]
    work = sorted(sum(lengths[p] ** 2 for p in share[0]) for share in by_work)
    assert work == [500, 900]
    assert max(sum(lengths[p] for p in share[0]) for share in by_work) == 50
    assert schedule([], Lengths([]), 2, max_tokens=40, form_by_cost=True) == [[], []]


def test_replicas_keep_their_samples_in_other_micro_batches():
    lengths = Lengths([5] * 7)
    shares = [[[0, 1], [2, 3]], [[4], [5, 6]]]
    cut = regroup(shares, lengths, 100, multiple=2)
    assert [sorted(p for b in share for p in b) for share in cut] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [len(share) for share in cut] == [2, 2]
    assert regroup([[[0]], [[]]], lengths, 100) == [[[0]], [[]]]
    assert regroup([[], []], lengths, 100) == [[], []]
    assert first_fit([5, 5, 5], 10) == [[0, 1], [2]]


@given(st.lists(st.integers(1, 120), max_size=60))
def test_bins_hold_every_sample_once_and_are_no_more_than_first_fit_makes(lengths: list[int]):
    bins = fewest_bins(range(len(lengths)), Lengths(lengths), 100)
    assert sorted(p for b in bins for p in b) == list(range(len(lengths)))
    assert all(len(b) == 1 or sum(lengths[p] for p in b) <= 100 for b in bins)
    assert all(b == sorted(b) for b in bins) and bins == sorted(bins)
    in_order = first_fit(lengths, 100)
    assert len(bins) < len(in_order) or bins == in_order


def test_ragged_samples_fill_rows():
    random = np.random.default_rng(0)
    lengths = [int(16 * 64 ** random.random()) for _ in range(1000)]
    bins = fewest_bins(range(1000), Lengths(lengths), 8192)
    assert sum(lengths) / ((len(bins) - 1) * 8192) >= 0.99


def shared(prompts: list[int], responses: list[list[int]]) -> Lengths:
    """Groups of samples with a prompt each, end to end."""
    total = [p + r for p, of_prompt in zip(prompts, responses, strict=True) for r in of_prompt]
    which = [i for i, of_prompt in enumerate(responses) for _ in of_prompt]
    return Lengths(total, {i: (which[i], prompts[which[i]]) for i in range(len(total))})


@given(
    st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(1, 40), min_size=1, max_size=6)), max_size=12),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_rows_of_shared_prompts_are_filled_by_what_is_laid_out(
    groups: list[tuple[int, list[int]]], replicas: int, balance: bool, form_by_cost: bool
):
    lengths = shared([p for p, _ in groups], [r for _, r in groups])
    positions = range(len(lengths.total))
    bins = fewest_bins(positions, lengths, 100)
    assert sorted(p for b in bins for p in b) == list(positions)
    assert all(len(b) == 1 or lengths.cost(b) <= 100 for b in bins)
    assert len(bins) <= len(fewest_bins(positions, Lengths(lengths.total), 100))
    shares = schedule(positions, lengths, replicas, max_tokens=100, balance=balance, form_by_cost=form_by_cost)
    assert len({len(share) for share in shares}) == 1
    assert sorted(p for share in shares for b in share for p in b) == list(positions)


def test_groups_stay_together_whatever_cuts_them_into_rows():
    # 32 groups of 8, a prompt of 1,024 and responses of 128: 2,048 tokens a group, with its prompt once.
    lengths = shared([1024] * 32, [[128] * 8] * 32)
    for max_tokens, rows in ((8192, 8), (9216, 8), (32768, 2), (2048, 32)):
        for form_by_cost in (False, True):
            (bins,) = schedule(
                range(256), lengths, 1, max_tokens=max_tokens, form_by_cost=form_by_cost,
                cost=lambda length: length * (6 * 1024 + length),
            )  # fmt: skip
            assert len(bins) == rows and sum(lengths.cost(b) for b in bins) == 65536
    # Where groups do not divide a row, one is cut in two, and its prompt is laid out twice.
    bins = fewest_bins(range(256), shared([1024] * 32, [[250] * 8] * 32), 8192)
    assert len(bins) == 13


@pytest.mark.parametrize("share", [True, False])
def test_padded_rows_have_the_same_log_probs(model: str, share: bool):
    runner, samples = Runner(make_settings(model)), make_samples()
    arguments = (samples, range(len(samples)), [0.0] * len(samples), [1.0] * len(samples))
    plain, padded = (pack(*arguments, share_prompts=share, multiple=multiple) for multiple in (1, 64))
    assert padded.tokens.shape[1] % 64 == 0 and plain.tokens.shape[1] % 64
    (expected,), (got,) = runner.backend.log_probs([plain]), runner.backend.log_probs([padded])
    assert expected is not None and got is not None
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("number", [12, 7])
def test_a_dynamic_global_batch_is_one_update_of_all_rollouts(model: str, number: int):
    samples = make_samples()[:number]
    settings = make_settings(model, use_dynamic_global_batch_size=True)
    plan = Planner(settings).plan(0, summarize(samples))
    assert [update["num_rollouts"] for update in plan["updates"]] == [number] and not plan["dropped"]
    for replicas in (2, 3):
        shares = assign(plan, 0, replicas, settings, 32)
        assert len({len(share) for share in shares}) == 1
        assert sorted(p for share in shares for b in share for p in b) == plan["updates"][0]["train"]
    metrics, _ = run(model, samples, use_dynamic_global_batch_size=True)
    assert metrics["train/step"] == 1
