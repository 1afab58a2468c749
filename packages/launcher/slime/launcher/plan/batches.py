"""Divides the samples of an iteration into optimizer updates and forward passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.rollout.settings.rollout import RolloutSettings
from slime.trainer.settings.trainer import TrainerSettings


@dataclass(frozen=True)
class Batches:
    """The samples of one rollout, divided into updates.

    samples: of one rollout; per_update: of one optimizer update; left_over: samples that fill no update.
    """

    prompts: int
    samples_per_prompt: int
    per_update: int
    updates: int
    replicas: int

    @property
    def samples(self) -> int:
        return self.prompts * self.samples_per_prompt

    @property
    def left_over(self) -> int:
        return self.samples - self.updates * self.per_update

    def passes(self, size: int, multiple: int = 1) -> int:
        """Returns the number of forward passes per replica and update: equal on all replicas, a multiple of `multiple`.

        size: maximum number of samples of a pass.
        """
        batches = -(-self.per_update // size)
        return -(-batches // (self.replicas * multiple)) * multiple


def batches(trainer: TrainerSettings, rollout: RolloutSettings, replicas: int) -> Batches:
    prompts, each = rollout.rollout_batch_size, rollout.n_samples_per_prompt
    samples, steps = prompts * each, trainer.num_steps_per_rollout
    per_update = trainer.global_batch_size or samples
    if steps:
        per_update = min(per_update, samples // steps)
    return Batches(prompts, each, per_update, steps or samples // per_update, replicas)


def longest_sample(rollout: RolloutSettings, config: Mapping[str, Any]) -> tuple[int, str]:
    """Returns (tokens of the longest possible sample, the limit that bounds it, in words)."""
    limit, model = rollout.rollout_max_context_len, config.get("max_position_embeddings")
    context, because = limit, f"--rollout-max-context-len {limit}"
    if limit is None and isinstance(model, int):
        context, because = model, f"max_position_embeddings {model} of the model"
    response, prompt = rollout.rollout_max_response_len, rollout.rollout_max_prompt_len
    whole, words = response, f"--rollout-max-response-len {response}, without the prompt"
    if prompt is not None:
        whole, words = prompt + response, f"--rollout-max-prompt-len {prompt} + --rollout-max-response-len {response}"
    elif limit is not None:
        return limit, because
    return (whole, words) if context is None or whole <= context else (context, because)


def pass_tokens(trainer: TrainerSettings, longest: int) -> tuple[int, str]:
    """Returns (tokens of the largest forward pass of a replica, the reason in words)."""
    budget = trainer.max_tokens_per_gpu
    if trainer.use_dynamic_batch_size and budget is not None:
        if longest > budget:
            return longest, f"a sample of {longest:,} is alone, above --max-tokens-per-gpu {budget:,}"
        return budget, f"--max-tokens-per-gpu {budget:,}"
    size = trainer.micro_batch_size
    return size * longest, f"--micro-batch-size {size} x {longest:,}"
