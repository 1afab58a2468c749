"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) as a loss function of the user."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime.rollout.settings.plugin_args import RolloutArgs
from slime.rollout.sglang_rollout import GenerateState
from slime.types import Sample

BETA = 0.1


async def pair(args: RolloutArgs, samples: list[Sample], evaluation: bool = False) -> list[Sample]:
    """Fills the two samples of a prompt with the answers of its row: the preferred one has the larger reward."""
    tokenizer = GenerateState(args).tokenizer
    for sample, name, reward in zip(samples, ("chosen", "rejected"), (1.0, 0.0), strict=True):
        prompt = tokenizer.encode(sample.prompt, add_special_tokens=False)
        answer = tokenizer.encode(sample.metadata[name], add_special_tokens=False) + [tokenizer.eos_token_id]
        sample.tokens, sample.response_length = prompt + answer, len(answer)
        sample.response, sample.reward = sample.metadata[name], reward
        sample.status = Sample.Status.COMPLETED
    return samples


def dpo_loss(
    args: Namespace, batch: dict[str, Any], sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigmoid(BETA * (ratio of the chosen answer - ratio of the rejected one)), the mean over pairs.

    The ratio of an answer is the sum over its tokens of log p(policy) - log p(reference).
    """
    pairs: dict[int, list[int]] = {}
    for i, group in enumerate(batch["group_indices"]):
        pairs.setdefault(group, []).append(i)
    ratios = [
        ((policy - reference) * mask).sum()
        for policy, reference, mask in zip(
            batch["policy_log_probs"], batch["ref_log_probs"], batch["loss_masks"], strict=True
        )
    ]
    margins = []
    for group, members in pairs.items():
        if len(members) != 2:
            raise ValueError(f"group {group} has {len(members)} samples in this row: --micro-batch-size must be even")
        rejected, chosen = sorted(members, key=lambda i: batch["rewards"][i])
        margins.append(BETA * (ratios[chosen] - ratios[rejected]))
    margin = torch.stack(margins)
    # The trainer divides by the number of samples, which is twice that of pairs.
    loss = -2 * torch.nn.functional.logsigmoid(margin).sum()
    return loss, {"dpo_margin": 2 * margin.sum(), "dpo_accuracy": 2 * (margin > 0).sum()}
