"""Recipes that `--preset NAME` selects: values of settings that no flag, file or variable sets.

A recipe sets the algorithm. It leaves out all that depends on the task: model, data, lengths, number of iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # GRPO (arXiv:2402.03300) with the reward `math`, and the small KL term that is usual for math.
    "grpo-math": {
        "advantage_estimator": "grpo",
        "rm_type": "math",
        "n_samples_per_prompt": 8,
        "rollout_temperature": 1.0,
        "eps_clip": 0.2,
        "use_kl_loss": True,
        "kl_loss_coef": 0.001,
        "kl_loss_type": "low_var_kl",
        "lr": 1e-6,
    },
    # DAPO (arXiv:2503.14476): asymmetric clipping, a loss per token, groups with equal rewards replaced, no KL term.
    # Its reward for overlong responses is not part of this.
    "dapo": {
        "advantage_estimator": "grpo",
        "n_samples_per_prompt": 16,
        "rollout_temperature": 1.0,
        "eps_clip": 0.2,
        "eps_clip_high": 0.28,
        "calculate_per_token_loss": True,
        "dynamic_sampling_filter_path": ("slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"),
        "lr": 1e-6,
        "weight_decay": 0.1,
    },
    # REINFORCE++ (arXiv:2501.03262): one response per prompt, the KL inside the reward, advantages whitened over the
    # batch, which has to be large for that.
    "reinforce++": {
        "advantage_estimator": "reinforce_plus_plus",
        "normalize_advantages": True,
        "n_samples_per_prompt": 1,
        "rollout_batch_size": 128,
        "rollout_temperature": 1.0,
        "kl_coef": 0.001,
        "lr": 1e-6,
    },
}


def apply_preset(values: dict[str, Any]) -> list[str]:
    """Adds the settings of the recipe `values["preset"]` that `values` does not have; returns their names."""
    added = {name: value for name, value in PRESETS.get(str(values.get("preset")), {}).items() if name not in values}
    values.update(added)
    return list(added)
