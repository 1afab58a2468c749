"""The FSDP2 backend: a policy and the models that it is compared with, with float32 weights and optimizer states.

With bfloat16, every rank computes with a whole bfloat16 copy of the weights, and holds a shard of the float32 originals
(master.py). If that takes too much of a GPU's memory, and always in float32, FSDP2 shards weights and gradients too,
and gathers the weights of a layer when it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slime.trainer.backends.base import (
    POLICY,
    REFERENCE,
    TEACHER,
    TRAINING,
    WEIGHTS,
    Backend,
    LossFunction,
    MaybeBatch,
    NonFiniteGradient,
    Outputs,
)
from slime.trainer.backends.delta_net import has_state
from slime.trainer.backends.fsdp import model as loading
from slime.trainer.backends.fsdp.compilation import Compiler, lengths_vary
from slime.trainer.backends.fsdp.lora import Adapters, ModelTensors, add_adapters
from slime.trainer.backends.fsdp.master import MasterWeights
from slime.trainer.backends.fsdp.names import disk_parts, left_out, other_in_files
from slime.trainer.backends.fsdp.on_policy import EngineForward
from slime.trainer.backends.fsdp.optimizer import AdamWStep, PolicyOptimizer
from slime.trainer.backends.fsdp.passes import Passes
from slime.trainer.backends.fsdp.routing import replay_of
from slime.trainer.backends.fsdp.sglang_kernels import SglangKernels
from slime.trainer.backends.learning_rate import learning_rate
from slime.trainer.backends.snapshots import Snapshots, local
from slime.trainer.backends.sparse_attention import has_indexer
from slime.trainer.checkpoints.adapter import Adapter, read_adapter
from slime.trainer.checkpoints.hf_directory import NamedTensors
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.on_policy import check_engine_layers, uses_engine_kernels
from slime.trainer.settings.sharding import compared_models, keeps_weights_whole, whole_bytes
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting, WrongState
from slime.types.models.experts import experts_of
from slime.types.models.vision import vision_of

log = logging.getLogger(__name__)


class FsdpBackend(Backend):
    name = "fsdp"
    # True if other models may be loaded to compare the policy with.
    _has_references = True
    _replays_routing = True
    _passes_class = Passes

    def __init__(
        self,
        settings: TrainerSettings,
        ranks: Ranks,
        device: torch.device,
        weights: str | None = None,
        base: nn.Module | None = None,
    ) -> None:
        """weights: a Hugging Face directory in place of `settings.hf_checkpoint` (a checkpoint to resume from).
        base: with LoRA, the loaded model; its weights stay as they are."""
        self.settings = settings
        self.ranks = ranks
        self.device = device
        policy, flag = (
            self._load(None if settings.lora_rank else weights) if base is None else (base, "--hf-checkpoint")
        )
        self._other_in_files = other_in_files(policy, flag)
        config = policy.config.get_text_config()
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.config = policy.config
        self.vision = vision_of(policy.config.to_dict())
        self.num_parameters = sum(p.numel() for p in policy.parameters())
        self.adapters = self._add_adapters(policy, weights)
        self._num_trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        self._engine = self._engine_forward(policy.config)
        if settings.gradient_checkpointing and self._engine is None:
            loading.enable_recomputation(policy)
        self.routing = replay_of(policy, settings) if self._replays_routing else None
        if self.routing is not None and settings.use_rollout_routing_replay:
            self.replayed_experts = experts_of(policy.config.to_dict())
        # Replayed experts change with each row, and compiled layers do not see that.
        compiles = settings.compile and self.routing is None
        self._compiler = Compiler(settings.activation_memory_budget) if compiles else None
        bf16_copy = self._keeps_weights_whole()
        self._cut = ranks.world_size > 1 and not bf16_copy
        if self._cut and self._engine is not None:
            raise InvalidSetting.requires(
                "--true-on-policy-mode", "--fsdp-sharding optimizer", "a layer's weights are needed outside of its turn"
            )
        if self.adapters is not None and settings.bf16 and (bf16_copy or loading.shards_two_types()):
            # Before the model is on the device, which never holds more of the frozen weights than it computes with.
            loading.round_parameters(policy)
        self.policy = self._place(policy)
        self._master = MasterWeights(self.policy, ranks.rank, ranks.world_size) if bf16_copy else None
        self.snapshots = Snapshots([self.policy] if self.adapters is None else self.adapters.modules)
        self.row_multiple = settings.data_pad_size_multiplier
        self.can_share_prompts = not has_state(policy)
        self.gathers_keys = "sliding_attention" in loading.layer_types(policy.config) or self._engine is not None
        self.reference: nn.Module | None = None
        self._reference_is_base = settings.reference_is_base and self._has_references
        if settings.needs_reference and self._has_references and not self._reference_is_base:
            self.reference = self._load_compared(settings.ref_load or settings.hf_checkpoint, "--ref-load")
            if settings.ref_update_interval and not self._like_policy(self.reference):
                raise InvalidSetting.conflict(
                    f"--ref-update-interval {settings.ref_update_interval}", f"--ref-load {settings.ref_load}",
                    "its shapes differ from the policy's",
                )  # fmt: skip
        self.teacher: nn.Module | None = None
        if settings.loads_teacher and self._has_references:
            assert settings.opd_teacher_load is not None
            self.teacher = self._load_compared(settings.opd_teacher_load, "--opd-teacher-load")
        if not self.can_share_prompts:
            log.info("prompts and turns that samples have in common are laid out for each of them: delta nets carry a "
                     "state from token to token")  # fmt: skip
        self._optimizer = PolicyOptimizer(self.policy, settings, self._master)
        cut_over = ranks.world_size if self._cut else 1
        self._passes = self._passes_class(settings, device, cut_over, self._master, self._compiler, self._engine)
        self.memory_stays(not settings.offloads_train)
        in_checkpoints = self.policy.state_dict().keys()
        self._persistent_buffers = [name for name, _ in self.policy.named_buffers() if name in in_checkpoints]
        self.updates = 0
        self.replica, self.replicas, self.leads_replica = ranks.rank, ranks.world_size, True

    def _engine_forward(self, config: Any) -> EngineForward | None:
        """Returns the engine's arithmetic for --true-on-policy-mode; None where engine and trainer differ by rounding.

        Raises NotAvailable for a model, or an SGLang, that lacks it.
        """
        if not self.settings.true_on_policy_mode:
            return None
        if not uses_engine_kernels(self.settings, self.device.type):
            log.info("--true-on-policy-mode: log-probs differ from the engine's by rounding, on a CPU and in float32")
            return None
        check_engine_layers(config.to_dict())
        log.info("--true-on-policy-mode: log-probs are computed with SGLang's deterministic kernels")
        return EngineForward(SglangKernels(config, self.device))

    def _load(self, weights: str | None) -> tuple[nn.Module, str]:
        """Loads the model to train; returns it and the flag that named its directory."""
        path, flag = (weights, "--load") if weights else (self.settings.hf_checkpoint, "--hf-checkpoint")
        return loading.load_model(path, flag=flag, train_vision=self.settings.train_vision), flag

    def _add_adapters(self, policy: nn.Module, weights: str | None) -> Adapters | None:
        """Freezes the policy and adds the adapters of --lora-rank, those in the directory `weights` if it is given."""
        s = self.settings
        if not s.lora_rank:
            return None
        adapters = add_adapters(policy, s, self._other_in_files)
        if weights:
            shapes = {name: p.shape for name, p in policy.named_parameters() if name in adapters.names}
            adapters.load(read_adapter(weights, adapters.config, shapes, adapters.names))
        return adapters

    def _load_compared(self, path: str, flag: str) -> nn.Module:
        """Loads a model that scores the policy's rows and does not train."""
        model = loading.load_model(path, flag=flag, train_vision=self.settings.train_vision)
        loading.check_vocabulary(model.config, self.vocab_size, flag, path)
        if self._engine is not None:
            check_engine_layers(model.config.to_dict(), flag)
        # All models share one layout of the rows.
        self.gathers_keys |= "sliding_attention" in loading.layer_types(model.config)
        self.can_share_prompts &= not has_state(model)
        placed = self._place(model.requires_grad_(False))
        if self._master is not None:
            loading.round_parameters(placed)
        return placed

    def _like_policy(self, model: nn.Module) -> bool:
        return [t.shape for t in _tensors(model)] == [t.shape for t in _tensors(self.policy)]

    def _keeps_weights_whole(self) -> bool:
        """Tells whether every rank keeps whole weights and gradients."""
        settings, ranks = self.settings, self.ranks.world_size
        room: float | None = None
        if self.device.type == "cuda" and ranks > 1:
            room = min(self.ranks.gather(torch.cuda.get_device_properties(self.device).total_memory))
        compared = compared_models(settings) if self._has_references else 0
        trained = self._num_trained
        whole = keeps_weights_whole(settings, self.num_parameters, ranks, room, compared=compared, trained=trained)
        if room is not None and settings.bf16 and settings.fsdp_sharding == "auto":
            needed = whole_bytes(self.num_parameters, ranks, compared, trained)
            log.info(
                "each rank keeps %s: whole weights and gradients take %.1f of %.1f GiB (--fsdp-sharding)",
                "whole weights and gradients" if whole else "a part of weights and gradients",
                needed / 2**30, room / 2**30,
            )  # fmt: skip
        return whole

    @property
    def only_updates_read_training(self) -> bool:
        return self.reference is None and self.teacher is None

    def memory_stays(self, stays: bool) -> None:
        # CUDA graphs hold addresses, and offloaded memory comes back at other ones.
        lasts = stays and self._master is not None and not self.settings.gradient_checkpointing
        # Layers with a state, or with chosen keys, launch other kernels for samples of other lengths.
        lasts &= not has_state(self.policy) and not has_indexer(self.policy)
        if self._passes.rows is not None:
            self._passes.rows.use_graphs(lasts and self.device.type == "cuda")

    def _place(self, model: nn.Module) -> nn.Module:
        model.to(self.device)
        if self._compiler is not None:
            # Compiled before it is sharded, so that FSDP2's hooks stay outside.
            self._compiler.layers(loading.decoder_layers(model), lengths_vary)
        if self._engine is not None:
            self._engine.attach(model)
        if self._cut:
            return loading.shard(model, self.device.type, self.ranks.world_size, bf16=bool(self.settings.bf16))
        return model

    def scores(self, batches: Sequence[MaybeBatch], *, of: str = POLICY, entropy: bool = False) -> list[Outputs | None]:
        if of == REFERENCE and self.reference is not None:
            return self._passes.scores(self.reference, batches, entropy)
        if of == TEACHER:
            if self.teacher is None:
                raise WrongState("no teacher was loaded")
            return self._passes.scores(self.teacher, batches, entropy)
        if of == POLICY:
            return self._passes.scores(self.policy, batches, entropy, self.routing)
        if of in self.snapshots:
            others = self.snapshots.swapped_in(of)
        elif of == REFERENCE and self._reference_is_base and self.adapters is not None:
            others = self.adapters.switched_off()
        else:
            raise WrongState("no reference model was loaded" if of == REFERENCE else f"no weights were kept as {of}")
        replay = self.routing
        if of == REFERENCE and replay is not None:
            # As a model of its own it chooses experts by itself, and what the policy chose stays recorded.
            replay.scores()
            replay = None
        loading.reshard(self.policy)
        with others:
            found = self._passes.scores(self.policy, batches, entropy, replay)
            loading.reshard(self.policy)
        return found

    def keep(self, name: str) -> None:
        loading.reshard(self.policy)
        if name != REFERENCE or self._reference_is_base:
            self.snapshots.keep(name)
            return
        if self.reference is None:
            raise WrongState("no reference model was loaded")
        loading.reshard(self.reference)
        with torch.no_grad():
            for of_reference, of_policy in zip(_tensors(self.reference), _tensors(self.policy), strict=True):
                of_reference.copy_(of_policy)

    def drop(self, name: str) -> None:
        self.snapshots.drop(name)

    def forward_backward(
        self, batches: Sequence[MaybeBatch], loss: LossFunction, *, entropy: str = "none", logits: bool = False
    ) -> None:
        if self.routing is not None:
            self.routing.trains()
        for number, batch in enumerate(batches):
            if self.routing is not None:
                self.routing.begin(batch, batch.experts if batch is not None else None)
            self._passes.forward_backward(self.policy, number, batch, loss, entropy, logits)
            if self.routing is not None:
                self.routing.end(batch)

    def optimizer_step(self) -> tuple[float, float]:
        lr = learning_rate(self.settings, self.updates)
        return self._update(lr, self.settings.clip_grad), lr

    def adamw_step(self, step: AdamWStep) -> float:
        """Updates the weights as `optimizer_step` does, with these numbers in place of the settings'; returns the
        gradient norm."""
        self._optimizer.configure(step)
        return self._update(step.lr, step.clip)

    def drop_gradients(self) -> None:
        """Drops the gradients accumulated since the last update."""
        self._optimizer.clear_gradients()

    def _update(self, lr: float, clip: float) -> float:
        norm = self._optimizer.gradient_norm()
        if not torch.isfinite(norm):
            broken = [name for name, gradient in self._optimizer.gradients() if not bool(gradient.isfinite().all())]
            self._optimizer.clear_gradients()
            raise NonFiniteGradient(self.updates, float(norm), broken)
        if clip > 0:
            self._optimizer.clip(clip, norm)
        self._optimizer.step(lr)
        self._optimizer.clear_gradients()
        self.updates += 1
        self.moment_updates += 1
        if self._passes.rows is not None:
            self._passes.rows.updated()
        return float(norm)

    def reset_optimizer(self) -> None:
        self._optimizer.reset()
        self.moment_updates = 0

    def device_tensors(self, part: str) -> Iterator[tuple[Tensor, bool]]:
        if part == WEIGHTS:
            loading.reshard(self.policy)
            yield from ((tensor, True) for tensor in _tensors(self.policy))
            return
        assert part == TRAINING
        yield from self._optimizer.device_tensors()
        for other in (self.reference, self.teacher):
            if other is not None:
                loading.reshard(other)
                yield from ((tensor, True) for tensor in _tensors(other))

    def named_weights(self, *, dtype: torch.dtype | None = None, everywhere: bool = False) -> NamedTensors:
        if self.adapters is None:
            for name, tensor in self._weights():
                yield from self._in_files(name, self._whole(name, tensor, dtype))
            return
        exact = dtype is None and (everywhere or self.ranks.rank == 0)
        model = ModelTensors(self._weights(), self._adapter_weights(), self._whole, self._in_files, self.ranks.together)
        yield from self.adapters.named_weights(model, dtype, self.settings.hf_checkpoint if exact else None)

    def _whole(self, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        tensor = tensor.detach()
        if self._master is not None and name in self._master and tensor.dtype != dtype:
            tensor = self._master.of(name)
        return _whole(tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor)

    def adapter(self) -> Adapter | None:
        if self.adapters is None:
            return None
        updates = self._adapter_weights()
        names = self.adapters.names
        whole = ((names[name], self._whole(name, tensor, torch.float32)) for name, tensor in updates.items())
        return Adapter(self.adapters.config, whole, sum(tensor.numel() for tensor in updates.values()))

    def _adapter_weights(self) -> dict[str, Tensor]:
        names = self.adapters.names if self.adapters is not None else ()
        return {name: tensor for name, tensor in self.policy.named_parameters() if name in names}

    def parts_of_weights(self, dtype: torch.dtype | None = None) -> tuple[str, ...]:
        # The float32 weights are the optimizer's.
        return (WEIGHTS,) if self._master is None or dtype == torch.bfloat16 else (WEIGHTS, TRAINING)

    def weights_stay(self, dtype: torch.dtype) -> bool:
        as_they_are = self.adapters is None and not self._other_in_files
        return self._master is not None and dtype == torch.bfloat16 and as_they_are

    def weight_sizes(self) -> dict[str, int]:
        shapes = ((name, torch.empty(tensor.shape, device="meta")) for name, tensor in self._weights())
        return {n: part.numel() for name, shape in shapes for n, part in self._in_files(name, shape)}

    def untrained_weights(self) -> list[str]:
        return left_out(self.policy, self.settings.hf_checkpoint, self.weight_sizes())

    def _in_files(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if name not in self._other_in_files:
            return [(name, tensor)]
        return disk_parts(self.policy, name, tensor).items()

    def _weights(self) -> NamedTensors:
        """Yields the weights of the model without its adapters."""
        # named_parameters yields a tied weight once; persistent buffers belong to the checkpoint too.
        names = self.adapters.names if self.adapters is not None else ()
        yield from ((name, tensor) for name, tensor in self.policy.named_parameters() if name not in names)
        yield from ((name, self.policy.get_buffer(name)) for name in self._persistent_buffers)

    def optimizer_state(self) -> NamedTensors:
        return ((name, _whole(moment)) for name, moment in self._optimizer.moments())

    def optimizer_sizes(self) -> dict[str, int]:
        return self._optimizer.sizes()

    def load_optimizer_state(self, read: Callable[[str], Tensor], updates: int, seen: int | None = None) -> None:
        """Restores the moments, which have seen `seen` of the `updates`; None: all of them."""
        self.updates = updates
        self.moment_updates = updates if seen is None else seen
        if updates:
            self._optimizer.load(read, self.moment_updates)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """This rank's parts of all parameters and buffers."""
    yield from (local(parameter.detach()) for parameter in model.parameters())
    yield from model.buffers()


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
