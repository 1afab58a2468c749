"""Losses of Tinker's protocol by name: their inputs, and their value at every token.

Shapes: every tensor is float32 [K], over the tokens of a row's data end to end; log_probs are those of the target
tokens. The loss of a request is the sum over all of its tokens: clients normalize through weights and advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime.trainer.algorithms.policy_loss import cispo_loss, clipped_loss
from slime.trainer.algorithms.ratio import probability_ratio
from slime.types.errors import InvalidField, NotAvailable

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


@dataclass(frozen=True)
class TinkerLoss:
    """A loss of Tinker's protocol. terms: returns the loss of every token. inputs: names of inputs with their default;
    None: required. config: names of options with their default. share: the input that is 0 for tokens without a share
    in the loss; None if every token has one."""

    terms: Callable[[Tensor, Inputs, Config], Tensor]
    inputs: Mapping[str, float | None]
    config: Mapping[str, float] = field(default_factory=dict)
    share: str | None = "advantages"


def cross_entropy(log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -log_probs * inputs["weights"]


def importance_sampling(log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -probability_ratio(log_probs - inputs["logprobs"]) * inputs["advantages"]


def ppo(log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low, high = 1 - config[LOW], config[HIGH] - 1
    return clipped_loss(inputs["logprobs"] - log_probs, inputs["advantages"], low, high)[0]


def cispo(log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low, high = 1 - config[LOW], config[HIGH] - 1
    return cispo_loss(inputs["logprobs"] - log_probs, log_probs, inputs["advantages"], low, high)[0]


def dro(log_probs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    moved = log_probs - inputs["logprobs"]
    return -log_probs * inputs["advantages"] + 0.5 * config["beta"] * torch.square(moved)


_SAMPLED: Mapping[str, float | None] = {"logprobs": None, "advantages": None}
LOSSES: Mapping[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss(cross_entropy, {"weights": 1.0}, share="weights"),
    "importance_sampling": TinkerLoss(importance_sampling, _SAMPLED),
    "ppo": TinkerLoss(ppo, _SAMPLED, {LOW: 0.8, HIGH: 1.2}),
    "cispo": TinkerLoss(cispo, _SAMPLED, {LOW: 0.0, HIGH: 4.0}),
    "dro": TinkerLoss(dro, _SAMPLED, {"beta": 0.05}, share=None),
}
# Losses that the SDK names and this service does not compute.
REFUSED = ("gspo", "stable_reinforce", "custom")


def find_loss(name: str) -> TinkerLoss:
    """Returns the loss of a name. Raises NotAvailable, or InvalidField for a name that is not in the protocol."""
    if name in LOSSES:
        return LOSSES[name]
    if name in REFUSED:
        raise NotAvailable.unavailable(f"loss_fn {name}", "this service does not compute it", " or ".join(LOSSES))
    raise InvalidField("loss_fn", name, f"one of {', '.join(LOSSES)}")


def check_config(name: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """Returns the configuration of a loss, defaults included. Raises InvalidField."""
    merged = dict(LOSSES[name].config)
    for key, value in config.items():
        where = f"loss_fn_config.{key}"
        if key not in merged:
            raise InvalidField(where, value, f"nothing: {name} takes {', '.join(merged) or 'no configuration'}")
        if not isinstance(value, float) or not math.isfinite(value) or value < 0:
            raise InvalidField(where, value, "a finite number, at least 0")
        merged[key] = value
    if LOW in merged and not merged[LOW] <= 1 <= merged[HIGH]:
        raise InvalidField(f"loss_fn_config.{LOW}", [merged[LOW], merged[HIGH]], f"{LOW} <= 1 <= {HIGH}")
    return merged
