"""The backend that the settings ask for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slime.trainer.backends.base import Backend
from slime.trainer.checkpoint import Checkpoints, HuggingFaceCheckpoints
from slime.trainer.collective import Ranks
from slime.trainer.settings import TrainerSettings, flat_args
from slime.types.errors import InvalidSetting


def build_backend(
    settings: TrainerSettings,
    ranks: Ranks,
    device: torch.device,
    *,
    weights: str | None = None,
    megatron: Mapping[str, Any] | None = None,
    extra_args: dict[str, Any] | None = None,
) -> Backend:
    """weights: a directory in place of `settings.hf_checkpoint`; megatron: Megatron's arguments that were given.

    Raises InvalidSetting where those contradict the model's config, and what loading raises.
    """
    if settings.train_backend == "fsdp":
        from slime.trainer.backends.fsdp.backend import FsdpBackend

        return FsdpBackend(settings, ranks, device, weights)
    # On a machine without CUDA this has to come before anything of Megatron's.
    from slime.converters import cpu_shim

    cpu_shim.install()
    from slime.converters.megatron_args import check_model_args, model_args, read_model_config
    from slime.trainer.backends.megatron.backend import MegatronBackend
    from slime.trainer.backends.megatron.hooks import Hooks

    given = dict(megatron or {})
    config = read_model_config(settings.hf_checkpoint, settings.model_name)
    check_model_args(given, config)
    args = model_args(config, given)
    if not settings.enable_mtp_training:
        args.pop("mtp_num_layers", None)
    elif not args.get("mtp_num_layers"):
        raise InvalidSetting(
            f"--enable-mtp-training: the model of {settings.hf_checkpoint} has no layers that predict ahead",
            field="--enable-mtp-training",
            value=True,
            expected="a model whose config.json has num_nextn_predict_layers above 0, and --mtp-num-layers not 0",
        )
    # The default of the system whose flags these are; Megatron-LM's is 0.1.
    args.setdefault("mtp_loss_scaling_factor", 0.2)
    if settings.gradient_checkpointing:
        args = _recomputed(args)
    hooks = Hooks(settings, flat_args(settings, {**(extra_args or {}), **args}))
    return MegatronBackend(settings, ranks, device, args, config, weights, hooks)


def _recomputed(args: Mapping[str, Any]) -> dict[str, Any]:
    """Every layer, one at a time, where `args` do not say more about it."""
    granularity = args.get("recompute_granularity")
    if granularity not in (None, "full"):
        raise InvalidSetting(
            f"--gradient-checkpointing contradicts --recompute-granularity {granularity}: it is full recomputation",
            field="--recompute-granularity",
            value=granularity,
            expected="full, or one of the two flags",
        )
    given = {name: value for name, value in args.items() if value is not None}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} | given


def open_checkpoints(settings: TrainerSettings, backend: Backend, ranks: Ranks, source: Path) -> Checkpoints:
    """How `backend` is saved. source: directory of the config and the tokenizer."""
    if settings.train_backend == "fsdp":
        from slime.trainer.backends.fsdp.backend import FsdpBackend

        assert isinstance(backend, FsdpBackend)
        return HuggingFaceCheckpoints(backend, ranks, source)
    from slime.trainer.backends.megatron.backend import MegatronBackend
    from slime.trainer.backends.megatron.checkpoint import TorchDistCheckpoints

    assert isinstance(backend, MegatronBackend)
    return TorchDistCheckpoints(backend, ranks, source, asynchronous=settings.async_save)
