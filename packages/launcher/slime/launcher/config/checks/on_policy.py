"""Checks a run with --true-on-policy-mode: its settings, and its model where the trainer has GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.converters.families import read_config
from slime.launcher.config.catalogue import as_typed
from slime.rollout.engines.registry import KINDS
from slime.rollout.settings.model_file import counts_engines
from slime.trainer.settings.on_policy import check_engine_layers, uses_engine_kernels
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting
from slime.types.setting_values import flag_name


def check_on_policy(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting if --true-on-policy-mode meets settings that train on samples of older weights.

    args: every setting of the run by its name.
    """
    if not args["true_on_policy_mode"]:
        return
    samples = args["rollout_batch_size"] * args["n_samples_per_prompt"]
    for name, conflicts, reason in (
        ("num_steps_per_rollout", args["num_steps_per_rollout"] not in (None, 1), "a rollout is one update"),
        (
            "global_batch_size",
            args["global_batch_size"] not in (None, samples),
            f"an update takes all {samples} samples",
        ),
        ("update_weights_interval", (args.get("update_weights_interval") or 1) > 1, "each rollout needs new weights"),
        ("partial_rollout", args.get("partial_rollout"), "a sample must be of one version of the weights"),
        ("keep_old_actor", args.get("keep_old_actor"), "a sample must be of the newest weights"),
    ):
        if conflicts:
            raise InvalidSetting.conflict("--true-on-policy-mode", as_typed(name, args[name]), reason)


def engine_kernels(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags of SGLang's server that choose the kernels of the trainer, by name; none where the trainer does
    not compute the engines' log-probs bit for bit.

    args: settings by their names, not all of which need be set.
    """
    on_policy = args.get("true_on_policy_mode") is True and args.get("train_backend", "fsdp") == "fsdp"
    if not on_policy or args.get("rollout_external_engine_addrs"):
        return {}
    chosen, models = args.get("rollout_engine", "auto"), args.get("sglang_config")
    by_number = models is not None and counts_engines(models)
    kernels: dict[str, Any] = {}
    for kind in KINDS.values():
        # Engines that the file of --sglang-config counts by num_engines are of a kind without GPUs.
        if chosen == kind.name or (chosen == "auto" and not (by_number and kind.needs_gpu)):
            kernels |= kind.invariant_kernels
    return kernels


def refuse_other_kernels(kernels: Mapping[str, Any], sglang_args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for engines with other kernels than these."""
    for name, needed in kernels.items():
        if name in sglang_args and sglang_args[name] != needed:
            given = f"{flag_name(f'sglang_{name}')} {sglang_args[name]}"
            raise InvalidSetting.conflict("--true-on-policy-mode", given, f"the trainer has the kernels of {needed}")


def check_on_policy_model(trainer: TrainerSettings, *, on_gpu: bool) -> None:
    """Raises NotAvailable for a model that the trainer would refuse there: its layers are not the engine's kernels'."""
    if uses_engine_kernels(trainer, "cuda" if on_gpu else "cpu"):
        check_engine_layers(read_config(trainer.hf_checkpoint))
