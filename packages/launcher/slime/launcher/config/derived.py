"""Derives settings from other settings: the one place where a flag changes the value of another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from slime.converters.megatron.flags import MegatronSettings
from slime.launcher.config.catalogue import as_typed
from slime.launcher.config.checks.engine_weights import are_plain
from slime.launcher.config.checks.loop import FULLY_ASYNC_FUNCTION, imply_debugging
from slime.launcher.config.checks.on_policy import engine_kernels, refuse_other_kernels
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting

MEGATRON_SETTINGS = (
    *(field.name for field in dataclasses.fields(MegatronSettings)),
    "initial_megatron_checkpoint",
    "megatron_to_hf_mode",
)


def imply(values: dict[str, Any]) -> None:
    """Sets the settings in `values`, by name, that others imply. Raises InvalidSetting for a conflict."""
    if values.get("offload") is True:
        for name in ("offload_rollout", "offload_train"):
            if values.get(name) is False:
                raise InvalidSetting.conflict("--offload", as_typed(name, False), "it sets the opposite")
            values[name] = True
    if any(values.get(name) is not None for name in MEGATRON_SETTINGS):
        # Command lines of the original system do not name the backend, because it has only Megatron.
        values.setdefault("train_backend", "megatron")
    if values.get("true_on_policy_mode") is True:
        if values.get("global_batch_size") is None:
            values.setdefault("num_steps_per_rollout", 1)
        _use_invariant_kernels(values)
    if values.get("multimodal_keys"):
        values.setdefault("train_vision", True)
    if values.get("rollout_function_path") == FULLY_ASYNC_FUNCTION:
        values.setdefault("fully_async", True)
    if are_plain((values.get("sglang_args") or {}).get("json_model_override_args")):
        values.setdefault("update_weight_quantization", "none")
    imply_debugging(values)


def _use_invariant_kernels(values: dict[str, Any]) -> None:
    """Sets the engines' flags for --true-on-policy-mode. Raises InvalidSetting for other kernels, and several GPUs."""
    kernels = engine_kernels(values)
    if not kernels:
        return
    if (values.get("rollout_num_gpus_per_engine") or 1) > 1:
        raise InvalidSetting.conflict(
            "--true-on-policy-mode",
            as_typed("rollout_num_gpus_per_engine", values["rollout_num_gpus_per_engine"]),
            "sums over several GPUs round differently from the trainer's",
        )
    values["sglang_args"] = kernels | dict(values.get("sglang_args") or {})
    refuse_other_kernels(kernels, values["sglang_args"])


def share_optimizer(values: dict[str, Any]) -> None:
    """Turns on --use-distributed-optimizer if several replicas of a Megatron model can share its optimizer states."""
    if values.get("train_backend") != "megatron" or values.get("use_distributed_optimizer") is not None:
        return
    ranks = (values.get("actor_num_nodes") or 1) * values["actor_num_gpus_per_node"]
    parts = math.prod(
        values.get(f"{name}_parallel_size") or 1 for name in ("tensor_model", "pipeline_model", "context")
    )
    if ranks > parts:
        values["use_distributed_optimizer"] = True


def share_gpus(values: dict[str, Any]) -> None:
    """Sets --rollout-num-gpus to all GPUs of the trainer for engines in pairs that share them."""
    if values.get("colocate") and values.get("prefill_num_servers") and values.get("rollout_num_gpus") is None:
        values["rollout_num_gpus"] = (values.get("actor_num_nodes") or 1) * values["actor_num_gpus_per_node"]


def other_defaults(trainer: TrainerSettings, explicit: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each default that differs from slime's original, where a script relies on it."""
    if trainer.train_backend == "megatron" and "lr_decay_style" not in explicit:
        yield (
            f"--lr-decay-style is not given: the learning rate stays {trainer.lr:g}, where slime's original lowers it "
            "to --min-lr over the run; --lr-decay-style linear does that"
        )


def decay_over_run(trainer: TrainerSettings, flat: dict[str, Any], num_rollout: int | None) -> None:
    """Sets --lr-decay-iters to the number of the policy's updates in the run, if it is needed and was not given.

    Raises InvalidSetting for a warm-up that is at least as long as the run.
    """
    if not trainer.depends_on_length or trainer.lr_decay_iters is not None:
        return
    if num_rollout is None or flat["debug_rollout_only"]:
        return
    warm_ups = {"--lr-warmup-iters": trainer.lr_warmup_iters}
    if trainer.use_critic:
        warm_ups["--critic-lr-warmup-iters"] = trainer.critic_lr_warmup_iters
    # A run without updates starts a trainer too, for its weights.
    iterations = max(0, num_rollout - trainer.num_critic_only_steps)
    updates = iterations * trainer.updates_per_iteration or max(warm_ups.values()) + 1
    for flag, warm_up in warm_ups.items():
        trained_updates = updates if flag == "--lr-warmup-iters" else updates + trainer.critic_only_updates
        if warm_up >= trained_updates:
            raise InvalidSetting.must_be(flag, f"less than {trained_updates}, the updates of the run", got=warm_up)
    trainer.lr_decay_iters = flat["lr_decay_iters"] = updates
