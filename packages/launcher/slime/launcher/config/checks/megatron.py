"""Checks a run with --train-backend megatron: its parallel layout, and its model against --hf-checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.converters.megatron import rank_layout
from slime.launcher.config.settings import LauncherSettings
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting, NotAvailable
from slime.types.models.vision import trained_vision
from slime.types.plugin_contracts import CONTRACTS
from slime.types.plugins import load_setting
from slime.types.setting_values import flag_name


def check_megatron(launcher: LauncherSettings, values: Mapping[str, Any]) -> None:
    """Raises InvalidSetting where Megatron's flags do not fit the number of trainer ranks.

    values: Megatron's flags that were set, by attribute.
    """
    if launcher.train_backend == "megatron":
        rank_layout.check_ranks(values, _ranks(launcher))
    elif launcher.initial_megatron_checkpoint is not None:
        raise InvalidSetting.requires("--initial-megatron-checkpoint", "--train-backend megatron")


def _ranks(launcher: LauncherSettings) -> int:
    return launcher.actor_num_nodes * int(launcher.actor_num_gpus_per_node or 1)


def check_model(launcher: LauncherSettings, trainer: TrainerSettings, values: Mapping[str, Any]) -> None:
    """Compares --model-type, Megatron's flags and the parallel sizes with the config of --hf-checkpoint.

    Raises InvalidSetting with each contradiction, NotAvailable for a model of no known family, and any error of reading
    the config.
    """
    if launcher.train_backend != "megatron" and launcher.model_type is None:
        return
    from slime.converters.families import find_family
    from slime.converters.megatron.args import check_model_args, model_args, read_model_config
    from slime.converters.megatron.model_scripts import model_config

    config = read_model_config(trainer.hf_checkpoint, trainer.model_name)
    source = f"the config.json of --hf-checkpoint {trainer.hf_checkpoint}"
    if launcher.model_type is not None:
        known = model_config(launcher.model_type)
        check_model_args(
            find_family(known).arguments(known), config, source=f"{source}, by --model-type {launcher.model_type}"
        )
    if launcher.train_backend == "megatron":
        check_model_args(values, config, source=source)
        for flag, directory in (
            # A run may begin with the weights of the reference.
            ("--ref-load", trainer.ref_load),
            ("--load", trainer.load),
            ("--opd-teacher-load", trainer.opd_teacher_load),
            ("--critic-load", trainer.critic_load),
        ):
            _check_checkpoint(flag, directory, config, source, trainer.model_name)
        args = model_args(config, values)
        sizes = rank_layout.sizes_of(args, _ranks(launcher))
        if trained_vision(config, trainer.train_vision) is not None:
            rank_layout.check_images(args, config, sizes, own_model=trainer.custom_model_provider_path is not None)
        _check_loss(trainer, values)


def _check_loss(trainer: TrainerSettings, values: Mapping[str, Any]) -> None:
    """Raises NotAvailable for a loss function that takes logits, if they are split over ranks."""
    flag = "--custom-loss-function-path"
    function = load_setting(trainer, "custom_loss_function_path")
    if function is None or "logits" not in CONTRACTS[flag].alternative(function):
        return
    for name in ("tensor_model_parallel_size", "context_parallel_size"):
        if (values.get(name) or 1) > 1:
            raise NotAvailable.unavailable(
                f"{flag} {trainer.custom_loss_function_path} with {flag_name(name)} {values[name]}",
                "the function takes logits, of which no rank has all",
                f"a function of the form {CONTRACTS[flag].alternatives[0]}".replace("'", ""),
            )


def _check_checkpoint(
    flag: str, directory: str | None, config: Mapping[str, Any], source: str, model_name: str | None
) -> None:
    """Compares the config stored in a torch_dist checkpoint with `config`; a checkpoint without a config passes."""
    from slime.converters.families import find_family
    from slime.converters.megatron.args import check_model_args, read_model_config
    from slime.converters.torch_dist.directory import HF_DIR, is_torch_dist, iteration_directory

    if directory is None or not is_torch_dist(directory):
        return
    hf_dir = iteration_directory(Path(directory)) / HF_DIR
    if (hf_dir / "config.json").is_file():
        carried = read_model_config(hf_dir, model_name)
        described = find_family(carried).arguments(carried)
        # A checkpoint may lack the layers for multi-token prediction, and the maximum length affects no weight.
        for name in ("mtp_num_layers", "max_position_embeddings"):
            described.pop(name, None)
        check_model_args(described, config, source=f"{source}, by the checkpoint of {flag} {directory}")
