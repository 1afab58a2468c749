"""The FSDP2 backend: packed rows, logits only where they are trained, float32 weights and optimizer.

With bfloat16 the model computes with bfloat16 weights that are a copy of float32 ones (master.py), of which ranks
have parts. Where that takes too much of a GPU, and in float32, FSDP2 cuts weights and gradients over ranks too, and
gathers the weights of a layer, as bfloat16, when it is run.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slime.trainer.algorithms.fused_log_probs import FusedLogProbs
from slime.trainer.algorithms.logprobs import token_entropy, token_log_probs
from slime.trainer.backends.base import (
    POLICY,
    REFERENCE,
    TEACHER,
    TRAINING,
    WEIGHTS,
    Backend,
    LossFunction,
    MaybeBatch,
    NamedTensors,
    NonFiniteGradient,
    Outputs,
)
from slime.trainer.backends.fsdp import model as loading
from slime.trainer.backends.fsdp import routing
from slime.trainer.backends.fsdp.compilation import COMPILE_ERRORS, Compiler
from slime.trainer.backends.fsdp.master import MasterWeights
from slime.trainer.backends.fsdp.names import disk_parts, other_in_files
from slime.trainer.backends.fsdp.optimizer import PolicyOptimizer
from slime.trainer.backends.fsdp.rows import StaticRows, gradients_of
from slime.trainer.backends.learning_rate import learning_rate
from slime.trainer.backends.routing import RoutingReplay, replays_routing
from slime.trainer.backends.shared_attention import fuse
from slime.trainer.backends.snapshots import Snapshots, local
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.batching.runs import Runs
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting, NotAvailable, WrongState
from slime.types.experts import experts_of
from slime.types.vision import vision_of

log = logging.getLogger(__name__)

# Bytes per parameter: bfloat16 weight and float32 gradient; float32 weight and AdamW's moments.
_WHOLE_BYTES, _SHARDED_BYTES = 6, 12
# Share of a GPU's memory; activations need the rest.
_LARGEST_SHARE = 0.5


class FsdpBackend(Backend):
    name = "fsdp"
    can_share_prompts = True
    # True if other models may be loaded to compare the policy with.
    _has_references = True
    _replays_routing = True

    def __init__(
        self, settings: TrainerSettings, ranks: Ranks, device: torch.device, weights: str | None = None
    ) -> None:
        """weights: a Hugging Face directory in place of `settings.hf_checkpoint` (a checkpoint to resume from)."""
        self.settings = settings
        self.ranks = ranks
        self.device = device
        policy, flag = self._load(weights)
        self._other_in_files = other_in_files(policy, flag)
        config = policy.config.get_text_config()
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.config = policy.config
        self.vision = vision_of(policy.config.to_dict())
        self.num_parameters = sum(p.numel() for p in policy.parameters())
        if settings.gradient_checkpointing:
            loading.enable_recomputation(policy)
        self._routing = self._attach_routing(policy)
        # A router is told other experts for each row, which compiled layers do not see.
        compiles = settings.compile and self._routing is None
        self._compiler = Compiler(settings.activation_memory_budget) if compiles else None
        bf16_copy = self._keeps_weights_whole()
        self._cut = ranks.world_size > 1 and not bf16_copy
        self.policy = self._place(policy)
        self._master = MasterWeights(self.policy, ranks.rank, ranks.world_size) if bf16_copy else None
        self.snapshots = Snapshots([self.policy])
        self.row_multiple = settings.data_pad_size_multiplier
        self.gathers_keys = "sliding_attention" in loading.layer_types(policy.config)
        self.reference: nn.Module | None = None
        if settings.needs_reference and self._has_references:
            self.reference = self._load_compared(settings.ref_load or settings.hf_checkpoint, "--ref-load")
            if settings.ref_update_interval and not self._like_policy(self.reference):
                raise InvalidSetting.conflict(
                    f"--ref-update-interval {settings.ref_update_interval}", f"--ref-load {settings.ref_load}",
                    "a model of other shapes than the policy's cannot become it",
                )  # fmt: skip
        self.teacher: nn.Module | None = None
        if settings.loads_teacher and self._has_references:
            assert settings.opd_teacher_load is not None
            self.teacher = self._load_compared(settings.opd_teacher_load, "--opd-teacher-load")
        self._optimizer = PolicyOptimizer(self.policy, settings, self._master)
        self._fused: FusedLogProbs | None = None
        self._rows: StaticRows | None = None
        if self._compiler is not None:
            self._fused = FusedLogProbs(self._compiler.function)
            fuse(self._compiler.function)
            self._rows = StaticRows(self._row_outputs, self._backward, device, self._row_limit)
            self.memory_stays(not settings.offloads_train)
        in_checkpoints = self.policy.state_dict().keys()
        self._persistent_buffers = [name for name, _ in self.policy.named_buffers() if name in in_checkpoints]
        self.updates = 0
        self.replica, self.replicas, self.leads_replica = ranks.rank, ranks.world_size, True

    def _load(self, weights: str | None) -> tuple[nn.Module, str]:
        """Loads the model that trains; returns it and the flag that names where it comes from."""
        flag = "--load" if weights else "--hf-checkpoint"
        return loading.load_model(weights or self.settings.hf_checkpoint, flag=flag), flag

    def _attach_routing(self, policy: nn.Module) -> RoutingReplay | None:
        s = self.settings
        shape = experts_of(policy.config.to_dict())
        if not self._replays_routing or not replays_routing(s, shape is not None):
            return None
        layers = routing.attach(policy)
        if not layers:
            name = type(policy).__name__
            raise NotAvailable(f"experts of {name} cannot be replayed: its routers have another form", field=name)
        replay = RoutingReplay(layers, from_rollout=s.use_rollout_routing_replay)
        if s.use_rollout_routing_replay:
            self.replayed_experts = shape
        if s.compile:
            log.info("the model is trained without torch.compile: experts are replayed")
        return replay

    def _load_compared(self, path: str, flag: str) -> nn.Module:
        """Loads a model that scores the policy's rows and does not train."""
        model = loading.load_model(path, flag=flag)
        loading.check_vocabulary(model.config, self.vocab_size, flag, path)
        # Rows are laid out once for all models.
        self.gathers_keys |= "sliding_attention" in loading.layer_types(model.config)
        placed = self._place(model.requires_grad_(False))
        if self._master is not None:
            loading.round_parameters(placed)
        return placed

    def _like_policy(self, model: nn.Module) -> bool:
        return [t.shape for t in _tensors(model)] == [t.shape for t in _tensors(self.policy)]

    def _keeps_weights_whole(self) -> bool:
        """Tells if every rank has all weights and gradients, the same on all ranks."""
        bf16, ranks, choice = bool(self.settings.bf16), self.ranks.world_size, self.settings.fsdp_sharding
        if choice == "optimizer" and not bf16:
            reason = "it shards the float32 weights that are kept beside those in bfloat16"
            raise InvalidSetting.requires("--fsdp-sharding optimizer", "--bf16", reason)
        if ranks == 1 or not bf16 or choice != "auto":
            return bf16 and (ranks == 1 or choice == "optimizer")
        if self.device.type != "cuda":
            return True
        room = min(self.ranks.gather(torch.cuda.get_device_properties(self.device).total_memory))
        needed = self.num_parameters * (_WHOLE_BYTES + _SHARDED_BYTES / ranks)
        # Policy and critic decide by themselves, and are on the same GPUs.
        whole = needed <= _LARGEST_SHARE / (2 if self.settings.use_critic else 1) * room
        log.info(
            "each rank keeps %s: whole weights and gradients take %.1f of %.1f GiB (--fsdp-sharding)",
            "whole weights and gradients" if whole else "a part of weights and gradients", needed / 2**30, room / 2**30,
        )  # fmt: skip
        return whole

    @property
    def _row_limit(self) -> int | None:
        return self.settings.max_tokens_per_gpu if self.settings.use_dynamic_batch_size else None

    def memory_stays(self, stays: bool) -> None:
        # CUDA graphs hold addresses: memory that leaves the GPU comes back elsewhere.
        lasts = stays and self._master is not None and not self.settings.gradient_checkpointing
        if self._rows is not None:
            self._rows.use_graphs(lasts and self.device.type == "cuda")

    def _place(self, model: nn.Module) -> nn.Module:
        model.to(self.device)
        if self._compiler is not None:
            # Before it is sharded, so that FSDP2's hooks stay outside.
            self._compiler.layers(loading.decoder_layers(model))
        if self._cut:
            return loading.shard(model, self.device.type, self.ranks.world_size, bf16=bool(self.settings.bf16))
        return model

    def _logits(self, model: nn.Module, batch: PackedBatch) -> Tensor:
        """[J, V] at the tokens that predict trained ones."""
        images: dict[str, object] = {}
        if batch.images:
            images = {
                "images": {n: self._input(t) for n, t in batch.images.items()},
                "image_places": batch.image_places,
            }
        positions = batch.position_ids if batch.grid_positions is None else batch.grid_positions
        return _logits(model, batch.tokens, positions, batch.runs, batch.rows, **images)

    def _input(self, tensor: Tensor) -> Tensor:
        """On the device, in the type of the weights; FSDP2 casts what its modules are given itself."""
        dtype = torch.bfloat16 if self._master is not None and tensor.is_floating_point() else None
        return tensor.to(self.device, dtype)

    def _row_outputs(
        self, model: nn.Module, tokens: Tensor, positions: Tensor, runs: Runs, rows: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert self._fused is not None
        logits = _logits(model, tokens, positions, runs, rows)
        return self._fused(logits, targets, self.settings.rollout_temperature)

    def _idle(self, model: nn.Module) -> Tensor:
        """Runs a forward pass over one token, times zero: the other ranks' collective calls need this rank."""
        token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        return model(input_ids=token, runs=Runs.apart([1], self.device), use_cache=False).logits.sum() * 0.0

    def scores(self, batches: Sequence[MaybeBatch], *, of: str = POLICY, entropy: bool = False) -> list[Outputs | None]:
        if of == REFERENCE:
            if self.reference is None:
                raise WrongState("no reference model was loaded")
            return self._scores(self.reference, batches, entropy)
        if of == TEACHER:
            if self.teacher is None:
                raise WrongState("no teacher was loaded")
            return self._scores(self.teacher, batches, entropy)
        if of == POLICY:
            return self._scores(self.policy, batches, entropy)
        if of not in self.snapshots:
            raise WrongState(f"no weights were kept as {of}")
        loading.reshard(self.policy)
        with self.snapshots.swapped_in(of):
            found = self._scores(self.policy, batches, entropy)
            loading.reshard(self.policy)
        return found

    @torch.no_grad()
    def _scores(self, model: nn.Module, batches: Sequence[MaybeBatch], entropy: bool) -> list[Outputs | None]:
        found: list[Outputs | None] = []
        replay = self._routing if model is self.policy else None
        if replay is not None:
            replay.scores()
        for batch in batches:
            if replay is not None:
                replay.begin(batch, batch.experts if batch is not None else None)
            if batch is None:
                if self._cut:
                    self._idle(model)
                found.append(None)
            elif self._compiles:
                log_probs, entropies = self._fused_outputs(model, batch)
                found.append(Outputs(batch.scatter(log_probs), batch.scatter(entropies) if entropy else None))
            else:
                found.append(self._outputs(batch, self._logits(model, batch), "value" if entropy else "none"))
            if replay is not None:
                replay.end(batch)
        return found

    @property
    def _compiles(self) -> bool:
        return self._compiler is not None and not self._compiler.failed

    def _fused_outputs(self, model: nn.Module, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Returns log-probs and entropies, [J]."""
        assert self._fused is not None and self._rows is not None
        if not torch.is_grad_enabled() and StaticRows.takes(batch):
            return self._rows.scores(model, batch)
        return self._fused(self._logits(model, batch), batch.targets, self.settings.rollout_temperature)

    def _outputs(self, batch: PackedBatch, logits: Tensor, entropy: str) -> Outputs:
        temperature, chunk = self.settings.rollout_temperature, self.settings.log_probs_chunk_size
        log_probs = batch.scatter(token_log_probs(logits, batch.targets, temperature, chunk))
        if entropy == "none":
            return Outputs(log_probs, None)
        with torch.set_grad_enabled(entropy == "gradient"):
            return Outputs(log_probs, batch.scatter(token_entropy(logits, temperature, chunk)))

    def keep(self, name: str) -> None:
        loading.reshard(self.policy)
        if name != REFERENCE:
            self.snapshots.keep(name)
            return
        if self.reference is None:
            raise WrongState("no reference model was loaded")
        loading.reshard(self.reference)
        with torch.no_grad():
            for theirs, ours in zip(_tensors(self.reference), _tensors(self.policy), strict=True):
                theirs.copy_(ours)

    def drop(self, name: str) -> None:
        self.snapshots.drop(name)

    def forward_backward(
        self, batches: Sequence[MaybeBatch], loss: LossFunction, *, entropy: str = "none", logits: bool = False
    ) -> None:
        if self._routing is not None:
            self._routing.trains()
        for number, batch in enumerate(batches):
            if self._routing is not None:
                self._routing.begin(batch, batch.experts if batch is not None else None)
            self._forward_backward(number, batch, loss, entropy, logits)

    def _forward_backward(
        self, number: int, batch: MaybeBatch, loss: LossFunction, entropy: str, with_logits: bool
    ) -> None:
        # FSDP2 averages gradients over ranks, the plan's weights expect their sum.
        scale = self.ranks.world_size if self._cut else 1
        if batch is None:
            if self._cut:
                self._idle(self.policy).backward()
        elif not self._compiles or with_logits:
            logits = self._logits(self.policy, batch)
            if self.settings.recompute_loss_function:
                outputs = checkpoint(self._outputs, batch, logits, entropy, use_reentrant=False)
            else:
                outputs = self._outputs(batch, logits, entropy)
            if with_logits:
                outputs = dataclasses.replace(outputs, logits=logits)
            self._add_gradients([loss(number, batch, outputs) * scale])
        elif self._rows is not None and StaticRows.takes(batch):
            self._rows.forward_backward(self.policy, number, batch, loss, entropy, scale)
        else:
            outputs = self._fused_outputs(self.policy, batch)
            gradients = gradients_of(number, batch, loss, entropy, outputs, scale)
            self._backward(lambda: self._fused_outputs(self.policy, batch), outputs, gradients)

    def _backward(
        self, again: Callable[[], tuple[Tensor, ...]], outputs: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]
    ) -> None:
        """again: makes the outputs once more, where their backward pass cannot be compiled."""
        pairs = [
            (output, gradient) for output, gradient in zip(outputs, gradients, strict=True) if gradient is not None
        ]
        try:
            self._add_gradients(*map(list, zip(*pairs, strict=True)))
        except COMPILE_ERRORS as error:
            if self._master is None or self._compiler is None or self._compiler.failed:
                raise
            self._compiler.give_up(error)
            self._backward(again, again(), gradients)

    def _add_gradients(self, outputs: list[Tensor], gradients: list[Tensor] | None = None) -> None:
        if self._master is None:
            torch.autograd.backward(outputs, gradients)
        else:
            self._master.add_gradients(
                torch.autograd.grad(outputs, self._master.parameters, gradients, allow_unused=True)
            )

    def optimizer_step(self) -> tuple[float, float]:
        norm = self._optimizer.gradient_norm()
        if not torch.isfinite(norm):
            broken = [name for name, gradient in self._optimizer.gradients() if not bool(gradient.isfinite().all())]
            self._optimizer.clear_gradients()
            raise NonFiniteGradient(self.updates, float(norm), broken)
        if self.settings.clip_grad > 0:
            self._optimizer.clip(self.settings.clip_grad, norm)
        lr = learning_rate(self.settings, self.updates)
        self._optimizer.step(lr)
        self._optimizer.clear_gradients()
        self.updates += 1
        return float(norm), lr

    def reset_optimizer(self) -> None:
        self._optimizer.reset()

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
        for name, tensor in self._weights():
            tensor = tensor.detach()
            if self._master is not None and name in self._master and tensor.dtype != dtype:
                tensor = self._master.of(name)
            whole = _whole(tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor)
            yield from self._in_files(name, whole)

    def parts_of_weights(self, dtype: torch.dtype | None = None) -> tuple[str, ...]:
        # The float32 weights are the optimizer's.
        return (WEIGHTS,) if self._master is None or dtype == torch.bfloat16 else (WEIGHTS, TRAINING)

    def weights_stay(self, dtype: torch.dtype) -> bool:
        return self._master is not None and dtype == torch.bfloat16 and not self._other_in_files

    def weight_sizes(self) -> dict[str, int]:
        shapes = ((name, torch.empty(tensor.shape, device="meta")) for name, tensor in self._weights())
        return {n: part.numel() for name, shape in shapes for n, part in self._in_files(name, shape)}

    def _in_files(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        if name not in self._other_in_files:
            return [(name, tensor)]
        return disk_parts(self.policy, name, tensor).items()

    def _weights(self) -> NamedTensors:
        # named_parameters gives a tied weight once; persistent buffers belong to the checkpoint too.
        yield from self.policy.named_parameters()
        yield from ((name, self.policy.get_buffer(name)) for name in self._persistent_buffers)

    def optimizer_state(self) -> NamedTensors:
        return ((name, _whole(moment)) for name, moment in self._optimizer.moments())

    def optimizer_sizes(self) -> dict[str, int]:
        return self._optimizer.sizes()

    def load_optimizer_state(self, read: Callable[[str], Tensor], updates: int) -> None:
        self.updates = updates
        if updates:
            self._optimizer.load(read, updates)


def _logits(model: nn.Module, tokens: Tensor, positions: Tensor, runs: Runs, rows: Tensor, **images: object) -> Tensor:
    """[J, V] at `rows`."""
    keeps = {"logits_to_keep": rows} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits = model(input_ids=tokens, position_ids=positions, runs=runs, use_cache=False, **keeps, **images).logits[0]
    return logits if keeps else logits[rows]


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """This rank's parts of all parameters and buffers."""
    yield from (local(parameter.detach()) for parameter in model.parameters())
    yield from model.buffers()


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
