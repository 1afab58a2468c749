"""Settings of metrics that are computed only if they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from slime.types.settings import setting


@dataclass(kw_only=True)
class MetricSettings:
    """Optional metrics of samples."""

    log_passrate: bool = setting(False, "Log pass@k for k = 1, 2, 4, ... in training and evaluation")
    log_multi_turn: bool = setting(
        False,
        "Log multi_turn/...: lengths of responses with and without the tokens that the policy did not generate, and "
        "the turns that round_number or num_turns in metadata counts",
    )
    log_correct_samples: bool = setting(
        False,
        "Log the lengths of the responses with reward 1, their shares by quarter of --rollout-max-response-len, and "
        "the mean of -log p of their tokens",
    )
    log_reward_category: str | None = setting(
        None,
        "Log rollout/error_cat/VALUE and eval/NAME/error_cat/VALUE: the share of samples whose reward, a dictionary, "
        "has this value under this key",
        metavar="KEY",
    )
