"""The algorithms against float64 references written from their formulas."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.trainer.algorithms import advantages as adv
from slime.trainer.algorithms.aggregation import sample_weights, weighted_sum
from slime.trainer.algorithms.estimators import group_mean
from slime.trainer.algorithms.importance import importance_weights
from slime.trainer.algorithms.kl import approximate_kl
from slime.trainer.algorithms.logprobs import token_entropy, token_log_probs
from slime.trainer.algorithms.policy_loss import cispo_loss, clipped_loss, off_policy_weights, sequence_mean
from slime.trainer.algorithms.rewards import normalize_rewards
from slime.trainer.settings.algorithm import TIS_MODES

FLOATS = st.floats(-100, 100, allow_nan=False)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_rewards_are_normalised_by_group_whatever_the_order():
    rewards, groups = [1.0, 5.0, 0.0, 7.0, 0.5], [4, 9, 4, 9, 4]
    out = normalize_rewards(rewards, groups, range(5), baseline=group_mean, scale=True)
    for group in (4, 9):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean, std = statistics.fmean(members), statistics.stdev(members)
        for i, g in enumerate(groups):
            if g == group:
                assert out[i] == pytest.approx((rewards[i] - mean) / (std + 1e-6), abs=1e-12)


def test_the_deviation_of_an_iteration_is_that_of_all_its_trajectories():
    rewards, groups = [1.0, 0.0, 5.0, 4.0, 3.0], ["a", "a", "b", "b", "b"]
    out = normalize_rewards(rewards, groups, range(5), baseline=group_mean, scale=True, over_iteration=True)
    deviation = statistics.stdev(rewards) + 1e-6
    assert out == pytest.approx([value / deviation for value in (0.5, -0.5, 1.0, 0.0, -1.0)], rel=1e-12)
    # Two samples of one trajectory count as their mean.
    fanned = normalize_rewards(
        [2.0, 0.0, *rewards[1:]], ["a", *groups], [0, 0, 1, 2, 3, 4], baseline=group_mean, scale=True,
        over_iteration=True,
    )  # fmt: skip
    assert fanned[2:] == pytest.approx(out[1:], rel=1e-12)
    assert normalize_rewards([2.0], [0], [0], baseline=group_mean, scale=True, over_iteration=True) == [0.0]


def test_a_trajectory_of_several_samples_counts_once():
    whole = normalize_rewards([1.0, 0.0, 0.0], [0, 0, 0], [10, 11, 12], baseline=group_mean, scale=True)
    fanned = normalize_rewards(
        [1.0, 1.0, 1.0, 0.0, 0.0], [0] * 5, [10, 10, 10, 11, 12], baseline=group_mean, scale=True
    )
    assert fanned == pytest.approx([whole[0]] * 3 + whole[1:])


@given(st.floats(-1e6, 1e6, allow_nan=False), st.integers(1, 33))
def test_equal_rewards_give_exact_zeros(reward: float, n: int):
    assert normalize_rewards([reward] * n, [0] * n, range(n), baseline=group_mean, scale=True) == [0.0] * n


@given(st.lists(FLOATS, min_size=2, max_size=12))
def test_centred_rewards_add_up_to_zero(rewards: list[float]):
    out = normalize_rewards(rewards, [0] * len(rewards), range(len(rewards)), baseline=group_mean, scale=False)
    assert math.fsum(out) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_estimators(kind: str):
    lp, ref = f64(-1.0, -2.0, -20.0), f64(-1.5, -1.0, -1.0)
    delta = [0.5, -1.0, -19.0]
    expected = {
        "k1": delta,
        "k2": [d * d / 2 for d in delta],
        "k3": [math.exp(-d) - 1 + d for d in delta],
        "low_var_kl": [min(10.0, math.exp(-d) - 1 + d) for d in delta],
    }[kind]
    assert approximate_kl(lp, ref, kind).tolist() == pytest.approx(expected)
    ratio = f64(0.5, 2.0, 1.0)
    weighted = approximate_kl(lp, ref, kind, ratio)
    assert weighted[:2].tolist() == pytest.approx([0.5 * expected[0], 2 * expected[1]])


@given(st.lists(FLOATS, min_size=1, max_size=40), st.floats(0, 1), st.integers(1, 7))
def test_discounted_returns_equal_the_recursion(rewards: list[float], gamma: float, chunk: int):
    expected, carry = [], 0.0
    for reward in reversed(rewards):
        carry = reward + gamma * carry
        expected.append(carry)
    assert adv.discounted_returns(f64(*rewards), gamma, chunk).tolist() == pytest.approx(expected[::-1], abs=1e-9)


def test_reinforce_plus_plus_puts_the_reward_at_the_last_trained_token():
    kl, mask = f64(0.1, 0.2, 0.3, 0.4, 0.5), f64(1, 1, 0, 1, 0)
    out = adv.reinforce_plus_plus(f64(2.0, -1.0), kl, mask, [3, 2], kl_coef=0.5, gamma=0.9)
    second = -0.1 + 2.0
    assert out.tolist() == pytest.approx([-0.05 + 0.9 * second, second, 0.0, -0.2 - 1.0, 0.0])
    assert adv.reinforce_plus_plus(f64(1.0), f64(0.5), f64(0.0), [1], kl_coef=1, gamma=1).tolist() == [0.0]


def test_reinforce_plus_plus_baseline_subtracts_the_kl():
    out = adv.reinforce_plus_plus_baseline(f64(2.0, -1.0), f64(0.1, 0.2, 0.3), [2, 1], kl_coef=0.5)
    assert out.tolist() == pytest.approx([1.95, 1.9, -1.15])


@given(st.lists(st.tuples(FLOATS, st.booleans()), min_size=3, max_size=30), st.integers(1, 29))
def test_whitening_is_the_same_however_ranks_share_the_tokens(tokens: list[tuple[float, bool]], cut: int):
    values, mask = f64(*(v for v, _ in tokens)), f64(*(float(m) for _, m in tokens))
    if mask.sum() < 2:
        return
    whole = adv.whiten(values, mask)
    chosen = values[mask > 0]
    expected = (values - chosen.mean()) * (chosen.var() + 1e-8).rsqrt()
    assert whole.tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)
    left, right = slice(None, cut), slice(cut, None)
    # The result of the two ranks' all-reduce, for each in turn.
    totals = [torch.stack([(values * mask).sum(), mask.sum()]), ((values - chosen.mean()).square() * mask).sum()[None]]
    for part in (left, right):
        calls = iter(totals)
        out = adv.whiten(values[part], mask[part], lambda _, calls=calls: next(calls))
        assert out.tolist() == pytest.approx(whole[part].tolist(), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("masked", [math.nan, math.inf, -math.inf])
def test_tokens_that_do_not_train_may_have_any_value(masked: float):
    mask = f64(1, 0, 1, 1, 0)
    usual, other = f64(0.1, 5.0, 0.2, 0.4, 5.0), f64(0.1, masked, 0.2, 0.4, masked)
    whitened, expected = adv.whiten(other, mask), adv.whiten(usual, mask)
    assert whitened[mask > 0].tolist() == expected[mask > 0].tolist()
    returns = [
        adv.reinforce_plus_plus(f64(2.0, -1.0), kl, mask, [3, 2], kl_coef=0.5, gamma=0.9) for kl in (usual, other)
    ]
    assert returns[1].tolist() == returns[0].tolist()


def test_clipped_loss():
    ratio = [0.5, 1.0, 1.5, 0.5, 1.5, 4.0]
    advantage = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    loss, clipped = clipped_loss(-f64(*ratio).log(), f64(*advantage), 0.2, 0.28)
    expected = [max(-r * a, -min(max(r, 0.8), 1.28) * a) for r, a in zip(ratio, advantage, strict=True)]
    assert loss.tolist() == pytest.approx(expected)
    assert clipped.tolist() == [0, 0, 1, 1, 0, 0]
    dual, _ = clipped_loss(-f64(*ratio).log(), f64(*advantage), 0.2, 0.28, 3.0)
    assert dual.tolist() == pytest.approx(expected[:5] + [3.0])


def test_on_policy_gradient_is_the_advantage():
    log_probs = f64(-1.0, -2.0).requires_grad_()
    loss, _ = clipped_loss(log_probs.detach() - log_probs, f64(0.5, -2.0), 0.2)
    loss.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-0.5, 2.0])


def test_cispo_weighs_the_log_probs_by_a_clipped_constant_ratio():
    log_probs = f64(-1.0, -2.0).requires_grad_()
    loss, clipped = cispo_loss(f64(-1.0, 0.0), log_probs, f64(2.0, -1.0), 1.0, 0.5)
    assert loss.tolist() == pytest.approx([1.5 * 2.0 * 1.0, -2.0])
    assert clipped.tolist() == [1, 0]
    loss.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-3.0, 1.0])


def test_gspo_and_opsm_look_at_whole_sequences():
    # A token that is not trained has no part in it, whatever is known of it.
    ppo_kl, mask, segments = f64(0.2, 0.4, math.inf, 1.0), f64(1, 1, 0, 1), torch.tensor([0, 0, 0, 1])
    assert sequence_mean(ppo_kl, mask, segments, 2).tolist() == pytest.approx([0.3, 0.3, 0.3, 1.0])
    kept = off_policy_weights(ppo_kl, f64(-1, 1, -1, -1), mask, segments, 2, delta=0.5)
    assert kept.tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token_truncate", [0.5, 1.0, 2.0, 1.5]),
        ("token_mask", [0.0, 1.0, 0.0, 1.5]),
        ("sequence_truncate", [0.5, 0.5, 2.0, 2.0]),
        ("sequence_mask", [0.0, 0.0, 0.0, 0.0]),
    ],
)
def test_importance_weights(mode: str, expected: list[float]):
    # Ratios .1 and 1 in the first sample, 3 and 1.5 in the second, which also has a token that is not trained.
    train, rollout = f64(0, 0, 0, 0, -900), f64(*(-math.log(r) for r in (0.1, 1.0, 3.0, 1.5)), math.nan)
    mask, segments = f64(1, 1, 1, 1, 0), torch.tensor([0, 0, 1, 1, 1])
    weights, metrics = importance_weights(train, rollout, mask, segments, 2, mode=mode, low=0.5, high=2.0)
    assert weights[:4].tolist() == pytest.approx(expected)
    ratio = [0.1, 1.0, 3.0, 1.5] if mode.startswith("token") else [0.1, 0.1, 4.5, 4.5]
    assert metrics["tis"][:4].tolist() == pytest.approx(ratio)
    assert metrics["tis_abs"][:4].tolist() == pytest.approx([abs(r - 1) for r in ratio])
    assert metrics["tis_clipfrac"][:4].tolist() == [w != pytest.approx(r) for w, r in zip(expected, ratio, strict=True)]


# Log-ratios on both sides of the clamp at 20, and where exp() of a float32 overflows.
FAR = [-120.0, -90.0, -20.5, -19.5, -1.0, 0.0, 1.0, 19.5, 20.5, 90.0, 120.0, math.inf, -math.inf]


def bounded(log_ratio: float) -> tuple[float, float]:
    """The ratio and its derivative by the log-ratio."""
    ratio = math.exp(min(20.0, max(-20.0, log_ratio)))
    return ratio, ratio if abs(log_ratio) < 20 else 0.0


@pytest.mark.parametrize("log_ratio", FAR)
@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_policy_losses_and_their_gradients_are_finite_however_far_the_ratio_is(
    log_ratio: float, advantage: float, dtype: torch.dtype
):
    tolerance = {"rel": 1e-5 if dtype == torch.float32 else 1e-12}
    ratio, slope = bounded(log_ratio)
    clipped = min(max(ratio, 0.8), 1.28)
    inside = -ratio * advantage > -clipped * advantage or ratio == clipped
    for c in (None, 3.0):
        log_probs = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
        old = torch.tensor([-1.0 - log_ratio], dtype=dtype)
        loss, _ = clipped_loss(old - log_probs, torch.tensor([advantage], dtype=dtype), 0.2, 0.28, c)
        loss.sum().backward()
        value, gradient = max(-ratio * advantage, -clipped * advantage), -slope * advantage * inside
        if c is not None and advantage < 0 and value > -c * advantage:
            value, gradient = -c * advantage, 0.0
        assert float(loss.detach()) == pytest.approx(value, **tolerance)
        assert float(log_probs.grad) == pytest.approx(gradient, **tolerance)
    log_probs = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    loss, _ = cispo_loss(old - log_probs, log_probs, torch.tensor([advantage], dtype=dtype), 1.0, 0.28)
    loss.sum().backward()
    assert float(log_probs.grad) == pytest.approx(-min(ratio, 1.28) * advantage, **tolerance)


@pytest.mark.parametrize("delta", FAR)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kl_estimators_and_their_gradients_are_finite_however_far_the_policies_are(delta: float, dtype: torch.dtype):
    tolerance = {"rel": 1e-4 if dtype == torch.float32 else 1e-9}
    for kind in ("k3", "low_var_kl"):
        log_probs = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
        estimate = approximate_kl(log_probs, torch.tensor([-1.0 - delta], dtype=dtype), kind)
        estimate.sum().backward()
        d = max(-20.0, delta)
        value, gradient = math.exp(-d) - 1 + d, 0.0 if delta < -20 else 1 - math.exp(-d)
        if kind == "low_var_kl" and value > 10:
            value, gradient = 10.0, 0.0
        assert float(estimate.detach()) == pytest.approx(value, **tolerance)
        assert float(log_probs.grad) == pytest.approx(gradient, abs=1e-12, **tolerance)


def test_what_is_not_a_number_is_not_clamped_away():
    advantages, old = torch.tensor([1.0, -1.0]), torch.full((2,), math.nan)
    for loss_of in (
        lambda lp: clipped_loss(old - lp, advantages, 0.2, 0.28, 3.0)[0],
        lambda lp: cispo_loss(old - lp, lp, advantages, 1.0)[0],
        lambda lp: approximate_kl(lp, old, "k3"),
        lambda lp: approximate_kl(lp, old, "low_var_kl"),
    ):
        log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
        loss_of(log_probs).sum().backward()
        assert bool(log_probs.grad.isnan().all())
    for mode in TIS_MODES:
        weights, _ = importance_weights(
            advantages, old, torch.ones(2), torch.arange(2), 2, mode=mode, low=0.0, high=2.0
        )  # fmt: skip
        assert bool(weights.isnan().all()), mode


def test_importance_weights_are_finite_however_far_the_engine_is():
    train, rollout = torch.tensor([-1.0, -120.0, -1.0]), torch.tensor([-120.0, -1.0, -math.inf])
    ones, segments = torch.ones(3), torch.arange(3)
    for mode in TIS_MODES:
        weights, metrics = importance_weights(train, rollout, ones, segments, 3, mode=mode, low=0.0, high=2.0)
        high = 2.0 if mode.endswith("truncate") else 0.0
        assert weights.tolist() == pytest.approx([high, 0.0, high], abs=1e-8), mode
        assert all(bool(values.isfinite().all()) for values in metrics.values()), mode


def test_log_probs_and_entropy_in_chunks():
    logits = torch.randn(7, 11, dtype=torch.float64)
    targets = torch.randint(0, 11, (7,))
    expected = (logits / 0.7).log_softmax(-1)
    for chunk in (-1, 3):
        got = token_log_probs(logits, targets, 0.7, chunk)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected[range(7), targets], atol=1e-5, rtol=1e-5)
        entropy = token_entropy(logits, 0.7, chunk)
        torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=1e-5)


def test_a_cpu_takes_logits_in_parts_and_computes_the_same(monkeypatch: pytest.MonkeyPatch):
    logits, targets = torch.randn(7, 11, requires_grad=True), torch.randint(0, 11, (7,))

    def numbers() -> list[torch.Tensor]:
        found = token_log_probs(logits, targets, 0.7), token_entropy(logits, 0.7)
        return [*found, *torch.autograd.grad((found[0] - found[1]).sum(), logits)]

    whole = numbers()
    monkeypatch.setattr("slime.trainer.algorithms.logprobs._CACHED_LOGITS", 3 * 11)
    for part, expected in zip(numbers(), whole, strict=True):
        assert part.equal(expected)


def test_aggregation_is_the_formula():
    # Rollout 0 has two samples of 2 and 1 trained tokens, rollout 1 one sample of 4.
    losses, masks = [f64(1, 2, 7), f64(3), f64(1, 1, 1, 1)], [f64(1, 1, 0), f64(1), f64(1, 1, 1, 1)]
    weights = sample_weights([3, 3, 4], [2, 1, 4], 2)
    total = sum(weighted_sum(v, m * w) for v, m, w in zip(losses, masks, weights, strict=True))
    assert float(total) == pytest.approx(((1 + 2 + 3) / 3 + 4 / 4) / 2)
    per_token = sample_weights([3, 3, 4], [2, 1, 4], 2, per_token=True)
    total = sum(weighted_sum(v, m * w) for v, m, w in zip(losses, masks, per_token, strict=True))
    assert float(total) == pytest.approx((1 + 2 + 3 + 4) / 7)


def test_a_masked_token_may_be_anything():
    assert float(weighted_sum(f64(1.0, math.nan, math.inf), f64(2.0, 0.0, 0.0))) == 2.0
