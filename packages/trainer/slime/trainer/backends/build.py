"""Builds the backend that the settings name, and opens its checkpoints."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.trainer.backends.base import Backend
from slime.trainer.checkpoints.checkpoint import Checkpoints, HuggingFaceCheckpoints, critic_directory
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings, flat_args
from slime.types.errors import InvalidSetting, NotAvailable

if TYPE_CHECKING:
    from slime.trainer.backends.fsdp.critic import FsdpCritic
    from slime.trainer.backends.megatron.critic import MegatronCritic

    Critic = FsdpCritic | MegatronCritic

log = logging.getLogger(__name__)


def build_backend(
    settings: TrainerSettings,
    ranks: Ranks,
    device: torch.device,
    *,
    weights: str | None = None,
    megatron: Mapping[str, Any] | None = None,
    extra_args: dict[str, Any] | None = None,
) -> Backend:
    """Builds the backend of `settings`.

    weights: a directory in place of `settings.hf_checkpoint`; megatron: explicitly set arguments of Megatron.

    Raises InvalidSetting where those contradict the model's config, NotAvailable where megatron-core is not installed,
    and what loading raises.
    """
    if settings.train_backend == "fsdp":
        from slime.trainer.backends.fsdp.backend import FsdpBackend

        return FsdpBackend(settings, ranks, device, weights)
    if importlib.util.find_spec("megatron") is None:
        raise NotAvailable.not_installed("--train-backend megatron", "megatron-core", "slime-trainer[megatron]")
    # Without CUDA this has to come before any import of Megatron.
    from slime.converters.megatron import cpu_shim

    cpu_shim.install()
    from slime.converters.families import find_family
    from slime.converters.megatron.args import check_model_args, model_args, read_model_config
    from slime.trainer.backends.megatron.backend import MegatronBackend
    from slime.trainer.backends.megatron.hooks import Hooks

    explicit = dict(megatron or {})
    config = read_model_config(settings.hf_checkpoint, settings.model_name, train_vision=settings.train_vision)
    check_model_args(explicit, config)
    args = model_args(config, explicit)
    _refuse_dropped(settings, explicit)
    _check_groups(args)
    if settings.enable_mtp_training and find_family(config).untrained:
        kind = config.get("model_type")
        raise NotAvailable.unavailable(
            f"--enable-mtp-training of a {kind}", "the layers of its family for multi-token prediction are not trained"
        )
    if not settings.enable_mtp_training:
        args.pop("mtp_num_layers", None)
    elif not args.get("mtp_num_layers"):
        raise InvalidSetting.requires(
            "--enable-mtp-training",
            "a model with multi-token-prediction layers",
            f"{settings.hf_checkpoint} has none: its config.json needs num_nextn_predict_layers above 0, and "
            "--mtp-num-layers must not be 0",
        )
    # slime's default; Megatron-LM's is 0.1.
    args.setdefault("mtp_loss_scaling_factor", 0.2)
    if settings.gradient_checkpointing:
        args = _recomputed(args)
    hooks = Hooks(settings, flat_args(settings, {**(extra_args or {}), **args}))
    return MegatronBackend(settings, ranks, device, args, config, weights, hooks)


def build_critic(settings: TrainerSettings, ranks: Ranks, device: torch.device, policy: Backend) -> Critic | None:
    """Builds the critic of an estimator that has one, with the weights of the checkpoint of --load if that has them."""
    if not settings.use_critic:
        return None
    weights = critic_directory(settings.load) if settings.load else None
    if settings.load and weights is None:
        start = settings.critic_load or settings.hf_checkpoint
        log.warning("%s has no critic: it starts with the weights of %s", settings.load, start)
    if settings.train_backend == "fsdp":
        from slime.trainer.backends.fsdp.critic import FsdpCritic

        return FsdpCritic(settings, ranks, device, weights)
    from slime.trainer.backends.megatron.backend import MegatronBackend
    from slime.trainer.backends.megatron.critic import MegatronCritic

    assert isinstance(policy, MegatronBackend)
    return MegatronCritic(settings, policy, weights)


def _refuse_dropped(settings: TrainerSettings, explicit: Mapping[str, Any]) -> None:
    """Raises InvalidSetting where megatron-core would compute something other than what the arguments say."""
    if explicit.get("moe_token_dispatcher_type") == "allgather":
        raise InvalidSetting.must_be(
            "--moe-token-dispatcher-type", "alltoall, the default here, or flex", got="allgather",
            reason="it takes rows of one length only, and packed rows differ",
        )  # fmt: skip
    if settings.enable_mtp_training:
        return
    if explicit.get("mtp_loss_scaling_factor") is not None:
        raise InvalidSetting.requires(
            f"--mtp-loss-scaling-factor {explicit['mtp_loss_scaling_factor']}",
            "--enable-mtp-training",
            "it scales the loss of those layers",
        )
    if explicit.get("mtp_num_layers"):
        # Model scripts set this flag as part of the model, whether the layers are trained or not.
        log.warning(
            "--mtp-num-layers %s without --enable-mtp-training: those layers stay as they are, and are exported"
            " as --hf-checkpoint has them",
            explicit["mtp_num_layers"],
        )


def _check_groups(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for routers that choose groups of experts by another rule than the models were made with.

    Those rank a group by the sum of its 2 best experts, megatron-core by that of its best topk / group_topk.
    """
    groups, chosen = args.get("moe_router_num_groups"), args.get("moe_router_group_topk")
    if not groups or not chosen or chosen >= groups:
        return
    experts = args.get("moe_router_topk") or 2
    if experts // chosen != 2:
        raise InvalidSetting.conflict(
            f"--moe-router-group-topk {chosen}",
            f"--moe-router-topk {experts}",
            f"megatron-core ranks a group of experts by its best {experts // chosen}, and the model by its best 2; use "
            f"--moe-router-group-topk {max(1, experts // 2)}",
        )


def _recomputed(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `args` with every layer recomputed, one at a time, where they do not say more about it."""
    granularity = args.get("recompute_granularity")
    if granularity not in (None, "full"):
        raise InvalidSetting.conflict(
            f"--recompute-granularity {granularity}", "--gradient-checkpointing", "that recomputes whole layers"
        )
    explicit = {name: value for name, value in args.items() if value is not None}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} | explicit


def open_checkpoints(
    settings: TrainerSettings, backend: Backend, ranks: Ranks, source: Path, critic: Critic | None = None
) -> Checkpoints:
    """Opens the checkpoints of `backend` and of the critic. source: directory of the config and the tokenizer."""
    if settings.train_backend == "fsdp":
        from slime.trainer.backends.fsdp.backend import FsdpBackend

        assert isinstance(backend, FsdpBackend) and (critic is None or isinstance(critic, FsdpBackend))
        return HuggingFaceCheckpoints(backend, ranks, source, critic)
    from slime.trainer.backends.megatron.backend import MegatronBackend
    from slime.trainer.backends.megatron.weights.checkpoint import TorchDistCheckpoints

    assert isinstance(backend, MegatronBackend) and (critic is None or isinstance(critic, MegatronBackend))
    return TorchDistCheckpoints(backend, ranks, source, critic, asynchronous=settings.async_save)
