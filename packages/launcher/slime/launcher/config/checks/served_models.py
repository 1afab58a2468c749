"""Checks the models that the engines of a run serve, and the flags of SGLang's server for each group of engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.launcher.config.checks.engine_weights import check_pipeline_stages, check_plain_layers, refuse_adapters
from slime.launcher.config.checks.on_policy import engine_kernels, refuse_other_kernels
from slime.launcher.config.checks.run import check_model, refuse_password
from slime.rollout.engines.kind import REGULAR
from slime.rollout.settings.model_file import ConfiguredModel
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.settings.served_models import group_settings
from slime.types.errors import ConfigError, InvalidSetting

Args = Mapping[str, Any]


def check_trained_engines(rollout: RolloutSettings, args: Args) -> None:
    """Raises InvalidSetting for engines that the trained model cannot have, and for a password in the flags of any.
    args: every setting by its name."""
    for model in rollout.served_models:
        for group in model.groups:
            for name, value in group.overrides.items():
                refuse_password(f"{rollout.place_of(group)}.overrides.{name}", value)
        if model.trained and args["true_on_policy_mode"]:
            _check_on_policy_groups(model, f"{rollout.models_source}: model {model.name}")
    kernels = engine_kernels(args)

    def check(of_group: Args) -> None:
        refuse_other_kernels(kernels, of_group["sglang_args"])
        check_pipeline_stages(of_group)
        refuse_adapters(of_group)
        _check_tokenizer(of_group)

    _check_each_group(rollout, args, check)


def check_served_models(rollout: RolloutSettings, args: Args) -> None:
    """Raises MissingFile or InvalidFile for a model of --sglang-config that is not one, and InvalidSetting for engines
    that would hold the trained one in another form than its updates have. The trained one must exist."""
    for model in rollout.served_models:
        if not model.trained:
            check_model(f"{rollout.models_source}: model {model.name}", Path(model.path), tokenizer=True)
    if not args["debug_train_only"] and not args["debug_rollout_only"]:
        _check_each_group(rollout, args, check_plain_layers)


def _check_each_group(rollout: RolloutSettings, args: Args, check: Callable[[Args], None]) -> None:
    """Calls `check` with the settings of each group of the trained model. An error names the group whose `overrides`
    are over the flags of the command line."""
    groups = [(model, group) for model in rollout.served_models if model.trained for group in model.groups]
    if not groups:
        check(args)
    for model, group in groups:
        try:
            check({**args, "sglang_args": group_settings(rollout, model, group).sglang_args})
        except ConfigError as error:
            if not group.overrides:
                raise
            raise error.at(rollout.place_of(group)) from None


def _check_tokenizer(args: Args) -> None:
    if args["multimodal_keys"] and args["sglang_args"].get("skip_tokenizer_init"):
        raise InvalidSetting.conflict(
            "--sglang-skip-tokenizer-init", "--multimodal-keys", "the engine's tokenizer makes the tokens of images"
        )


def _check_on_policy_groups(model: ConfiguredModel, place: str) -> None:
    for group in model.groups:
        if group.num_gpus_per_engine > 1:
            raise InvalidSetting.conflict(
                "--true-on-policy-mode", f"num_gpus_per_engine {group.num_gpus_per_engine} in {place}",
                "sums over several GPUs round differently from the trainer's",
            )  # fmt: skip
        if group.worker_type != REGULAR:
            raise InvalidSetting.conflict(
                "--true-on-policy-mode", f"worker_type {group.worker_type} in {place}",
                "no test compares the log-probs of pairs of engines with the trainer's",
            )  # fmt: skip
