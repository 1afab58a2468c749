"""Loss and gradient norm of every estimator and every term of the loss, against float64 references sample by sample.

The references are written from the formulas, with loops over samples and without anything of the trainer.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_float64 import load64, reference_log_probs
from trainer_tiny import Runner, make_samples, make_settings

from slime.types import Sample

GROUPS, SIZE, EPSILON = 3, 4, 1e-6
OFF_POLICY = {"use_rollout_logprobs": True}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.2}
RPP = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.1}
BASELINE = RPP | {"advantage_estimator": "reinforce_plus_plus_baseline"}
TIS = {"use_tis": True, "tis_clip_low": 0.8, "tis_clip": 1.2}

CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo without deviation": {"grpo_std_normalization": False},
    "grpo with the deviation of the iteration": {"grpo_std_scope": "batch"},
    "rewards as they are": {"rewards_normalization": False},
    "clip": OFF_POLICY | {"eps_clip": 0.1, "eps_clip_high": 0.2},
    "dual clip": OFF_POLICY | {"eps_clip_c": 1.1},
    "per token": OFF_POLICY | {"calculate_per_token_loss": True},
    "dr. grpo": OFF_POLICY | {"loss_divisor": 12.0, "grpo_std_normalization": False},
    "divisor with every term": KL | {"loss_divisor": 7.0, "kl_loss_type": "k2", "entropy_coef": 0.1},
    "gspo": OFF_POLICY | {"advantage_estimator": "gspo", "eps_clip": 0.05},
    "cispo": OFF_POLICY | {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.2},
    "rloo": {"advantage_estimator": "rloo"},
    "rloo clip": OFF_POLICY | {"advantage_estimator": "rloo", "eps_clip": 0.1, "eps_clip_high": 0.2},
    "opsm": OFF_POLICY | {"use_opsm": True, "opsm_delta": 0.05, "eps_clip": 0.9},
    "reinforce++": RPP | {"gamma": 0.9},
    "reinforce++ k2": RPP | {"kl_loss_type": "k2"},
    "reinforce++ baseline": BASELINE,
    "reinforce++ baseline k3": BASELINE | {"kl_loss_type": "k3"},
    "whitened grpo": {"normalize_advantages": True},
    **{f"{kind} loss": KL | OFF_POLICY | {"kl_loss_type": kind} for kind in ("k1", "k2", "k3", "low_var_kl")},
    **{f"{kind} loss with ratio": KL | OFF_POLICY | {"kl_loss_type": kind, "use_unbiased_kl": True}
       for kind in ("k1", "k2", "k3", "low_var_kl")},
    "entropy": {"entropy_coef": 0.1},
    "entropy per token": {"entropy_coef": 0.1, "calculate_per_token_loss": True},
    **{mode: TIS | {"tis_mode": mode}
       for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")},
    "temperature": {"rollout_temperature": 0.7},
    "nuclei": OFF_POLICY | {"rollout_top_p": 0.9, "rollout_temperature": 0.7},
    "nuclei with every term": KL | {"rollout_top_k": 12, "entropy_coef": 0.1, "calculate_per_token_loss": True},
    "sft": {"loss_type": "sft_loss", "compute_advantages_and_returns": False},
    "sft per token": {"loss_type": "sft_loss", "compute_advantages_and_returns": False,
                      "calculate_per_token_loss": True},
}  # fmt: skip


def kl(kind: str, delta: Tensor) -> Tensor:
    if kind == "k1":
        return delta
    if kind == "k2":
        return delta**2 / 2
    return (-delta).exp() - 1 + delta


def rewards(samples: list[Sample], s: Any) -> list[float]:
    found = []
    for sample in samples:
        group = np.array([x.reward for x in samples if x.group_index == sample.group_index], dtype=np.float64)
        value = float(sample.reward)  # type: ignore[arg-type]
        if s.rewards_normalization and s.advantage_estimator != "reinforce_plus_plus":
            if s.advantage_estimator == "rloo":
                value -= float((group.sum() - value) / (len(group) - 1))
            else:
                value -= float(group.mean())
            if s.grpo_std_normalization and s.advantage_estimator in ("grpo", "gspo", "cispo"):
                scope = group if s.grpo_std_scope == "group" else np.array([x.reward for x in samples], np.float64)
                value /= float(scope.std(ddof=1)) + EPSILON
        found.append(value)
    return found


def advantages(samples: list[Sample], s: Any, before: list[Tensor], reference: list[Tensor]) -> list[Tensor]:
    found = []
    for sample, reward, old, ref in zip(samples, rewards(samples, s), before, reference, strict=True):
        mask = [int(m) for m in sample.loss_mask]  # type: ignore[union-attr]
        penalty = s.kl_coef * kl(s.kl_loss_type, old - ref) if s.kl_coef else torch.zeros_like(old)
        if s.advantage_estimator == "reinforce_plus_plus":
            tokens = [-float(p) * m for p, m in zip(penalty, mask, strict=True)]
            tokens[max(t for t, m in enumerate(mask) if m)] += reward
            returns = [sum(s.gamma ** (u - t) * tokens[u] for u in range(t, len(tokens))) for t in range(len(tokens))]
            found.append(torch.tensor(returns, dtype=torch.float64))
        else:
            found.append(reward - penalty)
    if s.normalize_advantages:
        masks = [torch.tensor(np.asarray(x.loss_mask), dtype=torch.bool) for x in samples]
        values = torch.cat([a[m] for a, m in zip(found, masks, strict=True)])
        found = [(a - values.mean()) / (values.var() + 1e-8).sqrt() for a in found]
    return found


def policy_loss(s: Any, lp: Tensor, old: Tensor, engine: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    log_ratio = lp - old
    if s.advantage_estimator == "gspo":
        log_ratio = ((log_ratio * mask).sum() / mask.sum()).expand_as(lp)
    ratio, high = log_ratio.exp(), 1 + (s.eps_clip if s.eps_clip_high is None else s.eps_clip_high)
    clipped = ratio.clamp(1 - s.eps_clip, high)
    if s.advantage_estimator == "cispo":
        loss = -clipped.detach() * advantage * lp
    else:
        loss = torch.maximum(-ratio * advantage, -clipped * advantage)
        if s.eps_clip_c:
            loss = torch.where(advantage < 0, torch.minimum(loss, -s.eps_clip_c * advantage), loss)
    if s.use_opsm and float(((old - lp) * mask).sum() / mask.sum()) > s.opsm_delta:
        loss = torch.where(advantage < 0, torch.zeros_like(loss), loss)
    if s.use_tis:
        gap = old - engine
        if s.tis_mode.startswith("sequence"):
            gap = (gap * mask).sum().expand_as(gap)
        weight = gap.exp()
        if s.tis_mode.endswith("truncate"):
            weight = weight.clamp(s.tis_clip_low, s.tis_clip)
        else:
            weight = torch.where((weight >= s.tis_clip_low) & (weight <= s.tis_clip), weight, torch.zeros_like(weight))
        loss = loss * weight
    return loss


def expected(samples: list[Sample], s: Any, policy: Any, reference: Any) -> tuple[float, float]:
    """(loss, gradient norm)"""
    among = s.rollout_temperature, s.samples_from_nuclei
    lps = [reference_log_probs(policy, sample, *among) for sample in samples]
    with torch.no_grad():
        refs = [reference_log_probs(reference, sample, *among) for sample in samples]
    before = [lp.detach() for lp in lps]
    of_samples = advantages(samples, s, before, refs) if s.loss_type == "policy_loss" else before
    total = torch.zeros((), dtype=torch.float64)
    tokens = sum(int(np.sum(sample.loss_mask)) for sample in samples)
    for sample, lp, ref, present, advantage in zip(samples, lps, refs, before, of_samples, strict=True):
        mask = torch.tensor(np.asarray(sample.loss_mask), dtype=torch.float64)
        engine = torch.tensor(np.asarray(sample.rollout_log_probs), dtype=torch.float64)
        old = engine if s.use_rollout_logprobs else present
        if s.loss_type == "sft_loss":
            loss = -lp
        else:
            loss = policy_loss(s, lp, old, engine, advantage, mask)
        if s.use_kl_loss:
            term = kl(s.kl_loss_type, lp - ref) * ((lp - old).exp() if s.use_unbiased_kl else 1.0)
            loss = loss + s.kl_loss_coef * (term.clamp(-10, 10) if s.kl_loss_type == "low_var_kl" else term)
        if s.entropy_coef:
            logits = policy(input_ids=torch.tensor(np.asarray(sample.tokens), dtype=torch.int64)[None]).logits[0]
            entropy = torch.distributions.Categorical(logits=logits).entropy()[-sample.response_length - 1 : -1]
            loss = loss - s.entropy_coef * entropy
        divisor = tokens if s.calculate_per_token_loss else len(samples) * (s.loss_divisor or mask.sum())
        total = total + (loss * mask).sum() / divisor
    policy.zero_grad()
    total.backward()
    squares = sum(float((p.grad**2).sum()) for p in policy.parameters() if p.grad is not None)
    return float(total.detach()), squares**0.5


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_formula(model: str, reference_model: str, name: str, backend: str):
    settings = make_settings(model, ref_load=reference_model, train_backend=backend, **CASES[name])
    policy, samples = load64(model), make_samples(groups=GROUPS, size=SIZE, nuclei=settings.samples_from_nuclei)
    random = np.random.default_rng(0)
    for sample in samples:
        with torch.no_grad():
            of_policy = reference_log_probs(policy, sample, nuclei=settings.samples_from_nuclei).numpy()
        # An engine that is a little off; the ratios lie on both sides of the clips.
        sample.rollout_log_probs = (of_policy + random.normal(0, 0.15, len(of_policy))).astype(np.float32)
    loss, norm = expected(samples, settings, policy, load64(reference_model))
    metrics = Runner(settings).run(0, samples)
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5, abs=2e-6)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=2e-5)
