"""The advantage estimators by name. Everything else about an estimator derives from its entry in ESTIMATORS.

For the trajectories of a group with rewards r (see `algorithms.rewards`), then for each response token:

    rho = r - baseline(group)                    training reward; rho = r without a baseline
    rho = rho / (std(group) + 1e-6)              with `scale`, unless --disable-grpo-std-normalization; unbiased std
    A   = advantages(rho, KL)                    `algorithms.advantages`
    A   = (A - mean(A)) / std(A)                 over all tokens of an iteration; `whiten` requires it
    l   = loss(ratio, A)                         `algorithms.policy_loss`

An entry states all five, so these formulas, the entry and the functions that it names are the whole estimator. A new
estimator is an entry, and a pure function for each formula that no other estimator has. This module imports no torch:
settings, `--help` and the documentation read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slime.trainer.algorithms.rewards import Baseline, mean
from slime.types.errors import InvalidSetting

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Inputs of advantages: rewards [S] of S samples; of their tokens, KL to the reference, loss mask and values [K].

    values: those of the critic; None for an estimator without one.
    """

    rewards: Tensor
    kl: Tensor
    mask: Tensor
    lengths: Sequence[int]
    kl_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0
    values: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class PolicyTerms:
    """Inputs of a policy loss; every tensor [K]. ppo_kl = old_log_probs - log_probs.

    sample_mean averages over the trained tokens of each sample, and puts the average at every token of it.
    """

    ppo_kl: Tensor
    log_probs: Tensor
    advantages: Tensor
    eps_clip: float
    eps_clip_high: float | None
    eps_clip_c: float | None
    sample_mean: Callable[[Tensor], Tensor]


def group_mean(rewards: Sequence[float]) -> list[float]:
    """b_i = 1/n * sum_j r_j. Source: GRPO (arXiv:2402.03300, section 4.1.2)."""
    return [mean(rewards)] * len(rewards)


def leave_one_out_mean(rewards: Sequence[float]) -> list[float]:
    """b_i = 1/(n - 1) * sum_{j != i} r_j, and b_i = r_i for n = 1, where there is nothing to compare with.

    No r_i is in its own baseline, so the policy gradient is unbiased: r_i - b_i is n / (n - 1) times r_i - mean(r).
    Source: RLOO (arXiv:2402.14740; first in Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!", 2019).
    """
    if len(rewards) == 1:
        return list(rewards)
    return [mean([*rewards[:i], *rewards[i + 1 :]]) for i in range(len(rewards))]


def trajectory_reward(x: Rewards) -> Tensor:
    """A_t = rho."""
    from slime.trainer.algorithms.advantages import broadcast_rewards

    return broadcast_rewards(x.rewards, x.lengths)


def reward_minus_kl(x: Rewards) -> Tensor:
    """A_t = rho - kl_coef * KL_t."""
    from slime.trainer.algorithms.advantages import reinforce_plus_plus_baseline

    return reinforce_plus_plus_baseline(x.rewards, x.kl, x.lengths, kl_coef=x.kl_coef)


def discounted(x: Rewards) -> Tensor:
    """A_t = sum_{s>=t} gamma^(s-t) * r_s, with r_s = -kl_coef * KL_s * mask_s, plus rho at the last trained token."""
    from slime.trainer.algorithms.advantages import reinforce_plus_plus

    return reinforce_plus_plus(x.rewards, x.kl, x.mask, x.lengths, kl_coef=x.kl_coef, gamma=x.gamma)


def generalized(x: Rewards) -> Tensor:
    """A_t = sum_{s>=t} (gamma * lambd)^(s-t) * delta_s, with delta_t = r_t + gamma * V_{t+1} - V_t, r as `discounted`.

    Returns of the critic are A + V.
    """
    from slime.trainer.algorithms.advantages import generalized_advantages

    assert x.values is not None
    return generalized_advantages(
        x.rewards, x.values, x.kl, x.mask, x.lengths, kl_coef=x.kl_coef, gamma=x.gamma, lambd=x.lambd
    )


def ratio_of_tokens(x: PolicyTerms) -> tuple[Tensor, Tensor]:
    """l_t = max(-ratio_t * A_t, -clip(ratio_t, 1 - eps_clip, 1 + eps_clip_high) * A_t); dual clip at eps_clip_c."""
    from slime.trainer.algorithms.policy_loss import clipped_loss

    return clipped_loss(x.ppo_kl, x.advantages, x.eps_clip, x.eps_clip_high, x.eps_clip_c)


def ratio_of_sequences(x: PolicyTerms) -> tuple[Tensor, Tensor]:
    """l_t = max(-ratio * A_t, -clip(ratio) * A_t); ratio is the geometric mean over the sample's trained tokens."""
    from slime.trainer.algorithms.policy_loss import clipped_loss

    return clipped_loss(x.sample_mean(x.ppo_kl), x.advantages, x.eps_clip, x.eps_clip_high, x.eps_clip_c)


def constant_ratio(x: PolicyTerms) -> tuple[Tensor, Tensor]:
    """l_t = -stop_gradient(clip(ratio_t)) * A_t * log_prob_t. It has no dual clip, and needs no lower bound."""
    from slime.trainer.algorithms.policy_loss import cispo_loss

    return cispo_loss(x.ppo_kl, x.log_probs, x.advantages, x.eps_clip, x.eps_clip_high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimator:
    """A row of the table.

    help            a phrase for `--help`
    baseline        what is subtracted from the rewards of a group; None: nothing
    scale           whether the difference is divided by the group's standard deviation
    whiten          whether it requires --normalize-advantages
    advantages      advantages [K] of the tokens
    subtracts_kl    whether `advantages` reads kl_coef
    discounts       whether `advantages` reads gamma
    critic          whether a critic is trained, whose values `advantages` reads
    loss            (loss [K], 1 where the ratio was clipped [K])
    """

    help: str
    baseline: Baseline | None
    scale: bool
    whiten: bool
    advantages: Callable[[Rewards], Tensor]
    subtracts_kl: bool = False
    discounts: bool = False
    critic: bool = False
    loss: Callable[[PolicyTerms], tuple[Tensor, Tensor]]


ESTIMATORS: dict[str, Estimator] = {
    # GRPO (arXiv:2402.03300, section 4.1.2); Dr. GRPO (arXiv:2503.20783) without the scale.
    "grpo": Estimator(
        help="reward minus its group's mean, divided by the group's standard deviation",
        baseline=group_mean, scale=True, whiten=False, advantages=trajectory_reward, loss=ratio_of_tokens,
    ),
    # GSPO (arXiv:2507.18071).
    "gspo": Estimator(
        help="grpo with one probability ratio for a whole sequence",
        baseline=group_mean, scale=True, whiten=False, advantages=trajectory_reward, loss=ratio_of_sequences,
    ),
    # CISPO (arXiv:2506.13585).
    "cispo": Estimator(
        help="grpo with the clipped ratio as a constant weight of the log-probability",
        baseline=group_mean, scale=True, whiten=False, advantages=trajectory_reward, loss=constant_ratio,
    ),
    # RLOO: REINFORCE with a leave-one-out baseline (arXiv:2402.14740, section 2.2).
    "rloo": Estimator(
        help="reward minus the mean of the other rewards of its group",
        baseline=leave_one_out_mean, scale=False, whiten=False, advantages=trajectory_reward, loss=ratio_of_tokens,
    ),
    # REINFORCE++ (arXiv:2501.03262).
    "reinforce_plus_plus": Estimator(
        help="discounted return of the reward and of the KL penalty, whitened",
        baseline=None, scale=False, whiten=True, advantages=discounted, loss=ratio_of_tokens,
        subtracts_kl=True, discounts=True,
    ),
    "reinforce_plus_plus_baseline": Estimator(
        help="reward minus its group's mean and minus the KL penalty, whitened",
        baseline=group_mean, scale=False, whiten=True, advantages=reward_minus_kl, loss=ratio_of_tokens,
        subtracts_kl=True,
    ),
    # PPO (arXiv:1707.06347) with GAE (arXiv:1506.02438).
    "ppo": Estimator(
        help="generalized advantage estimation with the values of a critic, a model of its own",
        baseline=None, scale=False, whiten=False, advantages=generalized, loss=ratio_of_tokens,
        subtracts_kl=True, discounts=True, critic=True,
    ),
}  # fmt: skip


def find_estimator(name: str) -> Estimator:
    """Returns the estimator of that name. Raises InvalidSetting, which names the nearest one."""
    if name not in ESTIMATORS:
        raise InvalidSetting.one_of("--advantage-estimator", ESTIMATORS, got=name)
    return ESTIMATORS[name]


def estimators_that(holds: Callable[[Estimator], bool]) -> str:
    """Returns the names of the estimators for which `holds` is true, joined for a sentence."""
    return ", ".join(name for name, row in ESTIMATORS.items() if holds(row))
