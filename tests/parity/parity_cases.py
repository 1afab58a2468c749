"""The cases that are computed by TRL and by our trainer.

trl         arguments of TRL's GRPOConfig
ours        settings of our trainer; REDUCER stands for the path of the function below
off_policy  the samples were made by other weights than those that are trained
engine      log-probs of the engine that sampled are corrected for
trainer     TRL's GRPOTrainer or RLOOTrainer
different   why the two differ by definition; None where they are equal
"""

from __future__ import annotations

import dataclasses
from typing import Any

REDUCER = "{reducer}"
MAX_LENGTH = 8
# Dr.GRPO (arXiv:2503.20783) divides by the longest response that is allowed. `denominator` is left to the caller.
REDUCER_SOURCE = f"""
import torch

def constant(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    mask = torch.cat(list(loss_masks))
    return lambda values: (values * mask).sum() / {MAX_LENGTH}
"""


@dataclasses.dataclass(frozen=True)
class Case:
    trl: dict[str, Any]
    ours: dict[str, Any]
    off_policy: bool = False
    engine: bool = False
    trainer: str = "grpo"
    different: str | None = None


PER_TOKEN = {"calculate_per_token_loss": True}
K3 = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}
WIDE = {"epsilon": 0.2, "epsilon_high": 0.28}
OUR_WIDE = {"eps_clip": 0.2, "eps_clip_high": 0.28}


def corrected(mode: str, low: float | None, high: float) -> Case:
    return Case(
        {"loss_type": "grpo", "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": low,
         "vllm_importance_sampling_clip_max": high},
        {"use_tis": True, "tis_mode": mode, "tis_clip_low": low or 0.0, "tis_clip": high},
        engine=True,
    )  # fmt: skip


CASES: dict[str, Case] = {
    "grpo": Case({"loss_type": "grpo"}, {}),
    "grpo-temperature": Case({"loss_type": "grpo", "temperature": 0.7}, {"rollout_temperature": 0.7}),
    "grpo-clipped": Case({"loss_type": "grpo", **WIDE}, OUR_WIDE, off_policy=True),
    "grpo-delta": Case({"loss_type": "grpo", "delta": 1.5, **WIDE}, {"eps_clip_c": 1.5, **OUR_WIDE}, off_policy=True),
    "bnpo": Case({"loss_type": "bnpo", **WIDE}, PER_TOKEN | OUR_WIDE, off_policy=True),
    "dapo": Case({"loss_type": "dapo", **WIDE}, PER_TOKEN | OUR_WIDE, off_policy=True),
    "dr_grpo": Case(
        {"loss_type": "dr_grpo", **WIDE},
        {"custom_pg_loss_reducer_function_path": REDUCER, **OUR_WIDE},
        off_policy=True,
    ),
    "gspo": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.05},
        {"advantage_estimator": "gspo", "eps_clip": 0.05},
        off_policy=True,
    ),
    # TRL's bound of the ratio is the number itself, ours is 1 + --eps-clip-high; TRL has no lower bound.
    "cispo": Case(
        {"loss_type": "cispo", "epsilon_high": 1.1},
        PER_TOKEN | {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.1},
        off_policy=True,
    ),
    # TRL's RLOO is a ratio of whole responses: on policy its gradient is that of the sum over their tokens.
    "rloo": Case(
        {}, {"advantage_estimator": "rloo", "custom_pg_loss_reducer_function_path": REDUCER}, trainer="rloo",
    ),
    "grpo-k3": Case({"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}, K3, off_policy=True),
    "grpo-k3-ratio": Case(
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True}, K3 | {"use_unbiased_kl": True},
        off_policy=True,
    ),
    "dapo-k3": Case({"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False}, PER_TOKEN | K3),
    "gspo-k3": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": False},
        {"advantage_estimator": "gspo", **K3},
        off_policy=True,
    ),
    "dapo-entropy": Case({"loss_type": "dapo", "entropy_coef": 0.05}, PER_TOKEN | {"entropy_coef": 0.05}),
    # With clips this wide no token that OPSM drops is clipped anyway.
    "opsm": Case(
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.02, "epsilon": 0.9, "epsilon_high": 5.0},
        {"use_opsm": True, "opsm_delta": 0.02, "eps_clip": 0.9, "eps_clip_high": 5.0},
        off_policy=True,
    ),
    "tis": corrected("token_truncate", None, 1.1),
    "tis-both": corrected("token_truncate", 0.9, 1.1),
    "icepop": corrected("token_mask", 0.9, 1.1),
    "tis-sequence": corrected("sequence_truncate", 0.8, 1.2),
    "mis": corrected("sequence_mask", 0.8, 1.2),
    "grpo-entropy": Case(
        {"loss_type": "grpo", "entropy_coef": 0.05}, {"entropy_coef": 0.05},
        different="TRL's entropy bonus is a mean over tokens whatever the loss; ours is averaged as the loss is",
    ),
    "gspo-k3-ratio": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": True},
        {"advantage_estimator": "gspo", "use_unbiased_kl": True, **K3},
        off_policy=True,
        different="TRL weighs the KL by the ratio of the sequence, ours by that of the token, which is unbiased",
    ),
    "grpo-std": Case(
        {"loss_type": "grpo", "scale_rewards": "group"}, {"grpo_std_normalization": True},
        different="TRL adds 1e-4 to the standard deviation of a group, ours and the GRPO of verl and slime 1e-6",
    ),
    "grpo-std-batch": Case(
        {"loss_type": "grpo", "scale_rewards": "batch"}, {"grpo_std_normalization": True, "grpo_std_scope": "batch"},
        different="TRL adds 1e-4 to the standard deviation, ours 1e-6",
    ),
}  # fmt: skip
