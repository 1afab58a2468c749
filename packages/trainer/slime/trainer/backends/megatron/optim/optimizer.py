"""Megatron's optimizer, stepped so that a gradient that is not finite leaves the weights as they are."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from slime.converters.megatron.flags import config_fields
from slime.trainer.backends.base import NonFiniteGradient
from slime.trainer.backends.learning_rate import learning_rate
from slime.trainer.backends.megatron.model.names import parameter_names
from slime.trainer.backends.megatron.optim.offload import check_optimizer
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting

Chunks = list[torch.nn.Module]


def freeze(chunks: Chunks, settings: TrainerSettings, ranks: Ranks) -> None:
    """Freezes parameters by --only-train-params-name-list or --freeze-params-name-list.

    The patterns are searched for (`re.search`) in the parameters' names in the whole model. What never trains, the
    indexer of sparse attention, stays frozen. Collective.
    Raises InvalidSetting naming the flag where that leaves nothing to train on any rank.
    """
    only, frozen = settings.only_train_params_name_list, settings.freeze_params_name_list or ()
    if not only and not frozen:
        return
    training = 0
    for name, parameter in parameter_names(chunks):
        if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad:
            trains = any(re.search(p, name) for p in only) if only else not any(re.search(p, name) for p in frozen)
            parameter.requires_grad_(trains)
            training += trains
    if not any(ranks.gather(training)):
        flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
        patterns = " ".join(only or frozen)
        raise InvalidSetting(
            f"{flag} {patterns}: no parameter is left to train",
            field=flag,
            value=patterns,
            expected="patterns of names such as decoder.layers.0.mlp.linear_fc1.weight",
        )


def distributed(chunks: Chunks, args: Mapping[str, Any], settings: TrainerSettings) -> Chunks:
    """Returns the chunks with gradient buffers in float32 whose sums, not means, are taken over replicas."""
    config = chunks[0].config
    options = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": False,
        **_fields_of(DistributedDataParallelConfig, args),
    }
    if options.get("overlap_param_gather") and not options["use_distributed_optimizer"]:
        options["overlap_param_gather"] = False
    ddp = DistributedDataParallelConfig(**options)
    wrapped: Chunks = []
    for number, chunk in enumerate(chunks):
        # Buckets of later chunks are not worth overlapping, says Megatron-LM: they are done when the pipeline drains.
        disable = number > 0 and not bool(args.get("overlap_param_gather_with_optimizer_step"))
        wrapped.append(DistributedDataParallel(config, ddp, chunk, disable_bucketing=disable))
    if ddp.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in wrapped])
        if args.get("align_grad_reduce", True):
            config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in wrapped])
    if ddp.overlap_param_gather and args.get("align_param_gather"):
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in wrapped])
    return wrapped


def _one_or_all(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else items


def _fields_of(cls: type, args: Mapping[str, Any]) -> dict[str, Any]:
    named = {field.name: args[field.name] for field in dataclasses.fields(cls) if field.name in args}
    # Flags have names and types of their own: accumulate_allreduce_grads_in_fp32, exp_avg_dtype "bf16".
    return named | config_fields(args, cls.__name__)


class Optimizer:
    """AdamW over the float32 weights of `chunks`, by `settings`; `args` may name any field of OptimizerConfig.

    Raises InvalidSetting where what the flags need is missing.
    """

    def __init__(self, chunks: Chunks, args: Mapping[str, Any], settings: TrainerSettings) -> None:
        self._chunks = chunks
        self._settings = settings
        check_optimizer(args, bf16=bool(settings.bf16), on_gpu=next(chunks[0].parameters()).is_cuda)
        s = settings
        options = {
            "optimizer": "adam", "bf16": bool(s.bf16), "lr": s.lr, "min_lr": s.min_lr, "weight_decay": s.weight_decay,
            "adam_beta1": s.adam_beta1, "adam_beta2": s.adam_beta2, "adam_eps": s.adam_eps, "clip_grad": s.clip_grad,
            "params_dtype": torch.bfloat16 if s.bf16 else torch.float32,
        } | _fields_of(OptimizerConfig, args)  # fmt: skip
        # It is meant for weights that are FP8 themselves, which are kept and updated in another way.
        options.pop("fp8_recipe", None)
        config = OptimizerConfig(**options)
        self.wrapped = get_megatron_optimizer(config, chunks, config_overrides=get_standard_config_overrides(config))
        # The factor of the loss in the backward pass; gradients are divided by it before the update.
        self.scale = 1.0
        self._biases: list[tuple[torch.Tensor, torch.Tensor]] = []
        chunks[0].config.finalize_model_grads_func = self._finalize

    def _finalize(self, chunks: Chunks, num_tokens: Any = None, **kwargs: Any) -> None:
        # Megatron moves the biases of routers here, before it is known whether the gradient is finite.
        biases = [b for chunk in chunks for name, b in chunk.named_buffers() if name.endswith(".router.expert_bias")]
        self._biases = [(bias, bias.clone()) for bias in biases]
        finalize_model_grads(chunks, None, **kwargs)
        if self.scale != 1.0:
            for chunk in chunks:
                chunk.scale_gradients(1.0 / self.scale)

    def settle(self) -> None:
        """Gathers the weights that Megatron would only gather in the next forward pass, so that they can be read.
        Collective."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def _each(self) -> Iterator[torch.optim.Optimizer]:
        """Yields torch's optimizers inside Megatron's."""
        for wrapped in getattr(self.wrapped, "chained_optimizers", [self.wrapped]):
            if getattr(wrapped, "optimizer", None) is not None:
                yield wrapped.optimizer

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields the weights that it updates, which may be the model's own, and the state that it keeps for each."""
        for optimizer in self._each():
            for group in optimizer.param_groups:
                yield from (parameter.detach() for parameter in group["params"])
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    @torch.no_grad()
    def reset(self) -> None:
        """Sets moments and step counts to 0, where they are: checkpoints and sharded weights refer to them."""
        for optimizer in self._each():
            for group in optimizer.param_groups:
                # Kernels that count steps of a group rather than of a parameter keep the count here.
                if "step" in group:
                    group["step"] = torch.zeros_like(group["step"]) if torch.is_tensor(group["step"]) else 0
            for state in optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq", "step"):
                    if torch.is_tensor(state.get(name)):
                        state[name].zero_()
                    elif name in state:
                        state[name] = 0

    def _without_finite_gradient(self) -> list[str]:
        trained = ((name, p) for name, p in parameter_names(self._chunks) if p.requires_grad)
        return [name for name, p in trained if not bool(p.main_grad.isfinite().all())]

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.wrapped.zero_grad()

    @torch.no_grad()
    def step(self, updates: int) -> tuple[float, float]:
        """Returns (gradient norm before clipping, learning rate used). updates: those done so far. Clears the
        gradients.

        Raises NonFiniteGradient, on every rank alike.
        """
        self.wrapped.prepare_grads()
        norm = float(self.wrapped.get_grad_norm())
        if not math.isfinite(norm):
            broken = self._without_finite_gradient()
            self.zero_grad()
            for bias, before in self._biases:
                bias.copy_(before)
            raise NonFiniteGradient(updates, norm, broken)
        if self._settings.clip_grad > 0:
            for optimizer in getattr(self.wrapped, "chained_optimizers", [self.wrapped]):
                parameters = optimizer.get_parameters()
                if parameters:
                    clip_grad_by_total_norm_fp32(
                        parameters,
                        max_norm=self._settings.clip_grad,
                        total_norm=norm,
                        use_decoupled_grad=optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                    )
        lr = learning_rate(self._settings, updates)
        for group in self.wrapped.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
        self.wrapped.step_with_ready_grads()
        self.zero_grad()
        return norm, lr
