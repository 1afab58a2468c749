"""Contracts of plug-ins: the arguments and the return value of the function behind each flag.

Code that loads a plug-in names only its flag (`slime.types.plugins.load_plugin`); the checks before a run, the loaders
and the documentation read this table.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Contract:
    """Contract of one plug-in: the arguments it is called with.

    parameters      positional arguments
    returns         the return value, in words
    keywords        arguments that are passed by keyword
    optional        keywords that are passed if the function takes them
    alternatives    other lists of positional arguments that are accepted
    names           usual names of the function, for a file that defines several
    constructor     class method that makes the object, if a class has it
    """

    parameters: tuple[str, ...]
    returns: str
    keywords: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    alternatives: tuple[tuple[str, ...], ...] = ()
    names: tuple[str, ...] = ()
    constructor: str = ""

    def fits(self, function: Callable[..., Any]) -> bool:
        """Returns whether the function can be called with these arguments."""
        try:
            signature = inspect.signature(function)
        except ValueError:  # a builtin without a signature
            return True
        keywords = dict.fromkeys(self.keywords) | accepted(function, dict.fromkeys(self.optional))
        for parameters in (self.parameters, *self.alternatives):
            try:
                signature.bind(*parameters, **keywords)
            except TypeError:
                continue
            return True
        return False

    def alternative(self, function: Callable[..., Any]) -> tuple[str, ...]:
        """Returns the list of positional arguments that the function takes, the first of those that fit."""
        for parameters in (self.parameters, *self.alternatives):
            if dataclasses.replace(self, parameters=parameters, alternatives=()).fits(function):
                return parameters
        raise TypeError(f"{function} takes none of {self}")

    def __str__(self) -> str:
        """Spells the arguments: `(args, sample[, evaluation=])`."""
        keywords = [f"{name}=" for name in self.keywords]
        optional = "".join(f"[, {name}=]" for name in self.optional)
        shapes = [f"({', '.join([*p, *keywords])}{optional})" for p in (self.parameters, *self.alternatives)]
        return " or ".join(shapes)


def accepted(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments among `keywords` that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}


CONTRACTS: dict[str, Contract] = {
    # Rollouts
    "--rollout-function-path": Contract(
        ("args", "rollout_id", "data_source"), "a RolloutFnTrainOutput, or a list of groups",
        keywords=("evaluation",), names=("generate_rollout",),
    ),
    "--eval-function-path": Contract(
        ("args", "rollout_id", "data_source"), "a RolloutFnEvalOutput, or its data",
        keywords=("evaluation",), names=("eval_rollout", "generate_rollout"),
    ),
    "--data-source-path": Contract(
        ("args",), "an object with get_samples(n), add_samples(groups), save(rollout_id) and load(rollout_id)",
        constructor="from_args",
    ),
    "--buffer-filter-path": Contract(
        ("args", "rollout_id", "buffer", "num_samples"), "the chosen groups, removed from the buffer",
        names=("buffer_filter",),
    ),
    "--custom-generate-function-path": Contract(
        ("args", "sample", "sampling_params"), "a Sample, or a list of them",
        alternatives=(("args", "samples"),), optional=("evaluation",), names=("custom_generate", "generate"),
    ),
    "--custom-agent-path": Contract(
        ("base_url", "sample"), "a reward, or None where the run's reward function gives it",
        optional=("api_key", "model", "sampling_params", "evaluation", "args"), names=("agent",),
    ),
    "--rollout-sample-hook-path": Contract(
        ("args", "sample"), "the Sample, or None", optional=("rollout_id", "evaluation"),
    ),
    "--custom-rm-path": Contract(
        ("args", "sample"), "a number or a dict, or a list of them for a list of samples",
        names=("reward_func", "custom_rm", "batched_custom_rm"),
    ),
    "--dynamic-sampling-filter-path": Contract(("args", "group"), "a bool, or a DynamicFilterOutput"),
    "--rollout-sample-filter-path": Contract(("args", "groups"), "None; it sets remove_sample"),
    "--rollout-all-samples-process-path": Contract(("args", "groups", "get_samples"), "None"),
    "--custom-rollout-log-function-path": Contract(
        ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"), "true to log nothing else",
    ),
    "--custom-eval-rollout-log-function-path": Contract(
        ("rollout_id", "args", "data", "extra_metrics"), "true to log nothing else",
    ),
    # Training data and losses
    "--custom-reward-post-process-path": Contract(("args", "samples"), "(raw rewards, training rewards)"),
    "--custom-convert-samples-to-train-data-path": Contract(
        ("args", "samples"), "a dict of lists with one entry per sample",
    ),
    "--rollout-data-postprocess-path": Contract(
        ("args", "rollout_id", "rollout_data"), "None; it changes rollout_data",
    ),
    "--custom-advantage-function-path": Contract(
        ("args", "rollout_data"), 'None; it sets rollout_data["advantages"] and rollout_data["returns"]',
    ),
    "--custom-loss-function-path": Contract(
        ("args", "batch", "logits", "sum_of_sample_mean"), "(loss, metrics)",
        alternatives=(("args", "batch", "sum_of_sample_mean"),), names=("custom_loss", "loss_function"),
    ),
    "--custom-tis-function-path": Contract(
        (), "(pg_loss, loss masks, metrics)",
        keywords=(
            "args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths",
            "response_lengths",
        ),
    ),
    "--custom-pg-loss-reducer-function-path": Contract(
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
        "a function from the loss of each token to a number",
    ),
    # Weight updates
    "--custom-update-weight-post-write-path": Contract(("args", "version_dir", "rollout_engines"), "None"),
    # Megatron
    "--custom-model-provider-path": Contract(
        (), "the model", keywords=("pre_process", "post_process"), optional=("vp_stage",),
    ),
    "--custom-megatron-init-path": Contract(("args",), "None"),
    "--custom-megatron-before-log-prob-hook-path": Contract(("args", "model", "store_prefix"), "None"),
    "--custom-megatron-before-train-step-hook-path": Contract(
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"), "None",
    ),
}  # fmt: skip
