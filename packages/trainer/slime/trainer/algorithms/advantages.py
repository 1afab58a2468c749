"""Advantages per response token, over S samples laid end to end.

Shapes: K = sum of response lengths; `lengths` is a list of S of them; a tensor [K] holds sample 0's tokens, then
sample 1's. `mask` is 1.0 where a token trains, else 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slime.trainer.process.moving import to_device


def broadcast_rewards(rewards: Tensor, lengths: Sequence[int]) -> Tensor:
    """[S] -> [K]: A_t = rho for every token."""
    repeats = to_device(torch.tensor(list(lengths)), rewards.device)
    # Without the size the host would wait for the device to tell it.
    return torch.repeat_interleave(rewards, repeats, output_size=sum(lengths))


def reinforce_plus_plus(
    rewards: Tensor, kl: Tensor, mask: Tensor, lengths: Sequence[int], *, kl_coef: float, gamma: float
) -> Tensor:
    """[K] discounted returns G_t = sum_{s>=t} gamma^(s-t) r_s, with r_t = -kl_coef * kl_t * m_t, plus rho at the last
    token whose mask is 1. Source: REINFORCE++ (arXiv:2501.03262). A sample without such a token has 0.
    """
    token_rewards = (-kl_coef * kl).where(mask != 0, 0.0)
    returns = []
    for reward, r, m in zip(rewards, token_rewards.split(list(lengths)), mask.split(list(lengths)), strict=True):
        trained = m.nonzero()
        if len(trained):
            r = r.index_add(0, trained[-1], reward.to(r.dtype)[None])
        returns.append(discounted_returns(r, gamma))
    return torch.cat(returns)


def reinforce_plus_plus_baseline(rewards: Tensor, kl: Tensor, lengths: Sequence[int], *, kl_coef: float) -> Tensor:
    """[K]: A_t = rho - kl_coef * kl_t, rho already centred in its group."""
    return broadcast_rewards(rewards, lengths) - kl_coef * kl


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    kl: Tensor,
    mask: Tensor,
    lengths: Sequence[int],
    *,
    kl_coef: float,
    gamma: float,
    lambd: float,
) -> Tensor:
    """[K] generalized advantage estimates (Schulman et al. 2016, arXiv:1506.02438) over the tokens whose mask is 1.

        delta_t = r_t + gamma * V_{t+1} - V_t        A_t = delta_t + gamma * lambd * A_{t+1}

    r_t = -kl_coef * kl_t, plus rho at the last such token, after which V and A are 0. Tokens with mask 0 are no actions
    of the policy: their A is 0, and t + 1 means the next token with mask 1.
    """
    advantages = torch.zeros_like(values)
    ends = torch.tensor(list(lengths)).cumsum(0).tolist()
    for reward, end, length in zip(rewards, ends, lengths, strict=True):
        actions = mask[end - length : end].nonzero()[:, 0] + end - length
        if not len(actions):
            continue
        token_values = values[actions]
        token_rewards = -kl_coef * kl[actions]
        token_rewards[-1] += reward
        deltas = token_rewards + gamma * torch.cat([token_values[1:], token_values.new_zeros(1)]) - token_values
        advantages[actions] = discounted_returns(deltas, gamma * lambd)
    return advantages


def discounted_returns(rewards: Tensor, gamma: float, chunk: int = 128) -> Tensor:
    """[R] -> [R]: G_t = r_t + gamma * G_{t+1}, G_{R+1} = 0, by one triangular product per chunk."""
    out = torch.empty_like(rewards)
    carry = rewards.new_zeros(())
    steps = torch.arange(chunk, device=rewards.device)
    distance = steps[None, :] - steps[:, None]
    powers = torch.where(distance >= 0, torch.tensor(gamma, dtype=rewards.dtype) ** distance.clamp(min=0), 0.0).to(
        rewards.dtype
    )
    for start in reversed(range(0, len(rewards), chunk)):
        r = rewards[start : start + chunk]
        n = len(r)
        decay = torch.tensor(gamma, dtype=rewards.dtype) ** torch.arange(n, 0, -1, device=rewards.device)
        out[start : start + n] = powers[:n, :n] @ r + decay.to(rewards.dtype) * carry
        carry = out[start]
    return out


def whiten(advantages: Tensor, mask: Tensor, all_reduce: Callable[[Tensor], Tensor] = lambda sums: sums) -> Tensor:
    """[K] -> [K]: (A - mu) * rsqrt(var + 1e-8), moments over the tokens with mask 1 of every rank, var with Bessel's
    correction; other tokens may have any value. `all_reduce` adds a float64 tensor over ranks. Raises ValueError where
    no token has mask 1.
    """
    values, weights = advantages.double(), mask.double()
    trained = values.where(mask != 0, 0.0)
    total, count = all_reduce(torch.stack([trained.sum(), weights.sum()])).unbind()
    if count == 0:
        raise ValueError("whiten: no token of the step has loss mask 1")
    mean = total / count
    squares = all_reduce(((trained - mean).square() * weights).sum()[None])[0]
    variance = squares / (count - 1).clamp(min=1)
    return ((values - mean) * torch.rsqrt(variance + 1e-8)).to(advantages.dtype)
