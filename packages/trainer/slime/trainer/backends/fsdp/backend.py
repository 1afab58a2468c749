"""The FSDP2 backend: float32 weights and optimizer, packed rows, logits only where they are trained."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slime.trainer.algorithms.logprobs import token_entropy, token_log_probs
from slime.trainer.backends.base import (
    POLICY,
    REFERENCE,
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
from slime.trainer.backends.fsdp.names import disk_parts, other_in_files
from slime.trainer.backends.fsdp.optimizer import build_adamw
from slime.trainer.backends.snapshots import Snapshots, local
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.batching.runs import Runs
from slime.trainer.collective import Ranks
from slime.trainer.learning_rate import learning_rate
from slime.trainer.settings import TrainerSettings
from slime.types.errors import WrongState
from slime.types.vision import vision_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpBackend(Backend):
    name = "fsdp"
    can_share_prompts = True

    def __init__(
        self, settings: TrainerSettings, ranks: Ranks, device: torch.device, weights: str | None = None
    ) -> None:
        """weights: a Hugging Face directory in place of `settings.hf_checkpoint` (a checkpoint to resume from)."""
        self.settings = settings
        self.ranks = ranks
        self.device = device
        flag = "--load" if weights else "--hf-checkpoint"
        policy = loading.load_model(weights or settings.hf_checkpoint, flag=flag)
        self._other_in_files = other_in_files(policy, flag)
        config = policy.config.get_text_config()
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.config = policy.config
        self.vision = vision_of(policy.config.to_dict())
        self.num_parameters = sum(p.numel() for p in policy.parameters())
        if settings.gradient_checkpointing:
            loading.enable_recomputation(policy)
        self.policy = self._place(policy)
        self.snapshots = Snapshots([self.policy])
        self.row_multiple = settings.data_pad_size_multiplier
        self.reference: nn.Module | None = None
        if settings.needs_reference:
            reference = loading.load_model(settings.ref_load or settings.hf_checkpoint, flag="--ref-load")
            self.reference = self._place(reference.requires_grad_(False))
        self.optimizer = build_adamw(self.policy, settings)
        self.updates = 0
        self.replica, self.replicas, self.leads_replica = ranks.rank, ranks.world_size, True

    def _place(self, model: nn.Module) -> nn.Module:
        model.to(self.device)
        if self.ranks.world_size > 1:
            return loading.shard(model, self.device.type, self.ranks.world_size, bf16=bool(self.settings.bf16))
        return model

    def _logits(self, model: nn.Module, batch: PackedBatch) -> Tensor:
        """[J, V] at the tokens that predict trained ones."""
        kwargs: dict[str, object] = {}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            kwargs["logits_to_keep"] = batch.rows
        if batch.images:
            images = {name: tensor.to(self.device) for name, tensor in batch.images.items()}
            kwargs |= {"images": images, "image_places": batch.image_places}
        positions = batch.position_ids if batch.grid_positions is None else batch.grid_positions
        autocast: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.settings.bf16 and self.ranks.world_size == 1:
            autocast = torch.autocast(self.device.type, dtype=torch.bfloat16)
        with autocast:
            logits = model(
                input_ids=batch.tokens,
                position_ids=positions,
                runs=batch.runs,
                use_cache=False,
                **kwargs,
            ).logits[0]
        return logits if "logits_to_keep" in kwargs else logits[batch.rows]

    def _idle(self, model: nn.Module) -> Tensor:
        """A forward pass over one token, times zero: the other ranks' collective calls need this rank."""
        token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        return model(input_ids=token, runs=Runs.apart([1], self.device), use_cache=False).logits.sum() * 0.0

    def scores(self, batches: Sequence[MaybeBatch], *, of: str = POLICY, entropy: bool = False) -> list[Outputs | None]:
        if of == REFERENCE:
            if self.reference is None:
                raise WrongState("no reference model was loaded")
            return self._scores(self.reference, batches, entropy)
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
        for batch in batches:
            if batch is None:
                self._idle(model)
                found.append(None)
            else:
                found.append(self._outputs(batch, self._logits(model, batch), "value" if entropy else "none"))
        return found

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

    def forward_backward(self, batches: Sequence[MaybeBatch], loss: LossFunction, *, entropy: str = "none") -> None:
        for number, batch in enumerate(batches):
            self._forward_backward(number, batch, loss, entropy)

    def _forward_backward(self, number: int, batch: MaybeBatch, loss: LossFunction, entropy: str) -> None:
        # FSDP averages gradients over ranks, the plan's weights expect their sum.
        scale = self.ranks.world_size
        if batch is None:
            self._idle(self.policy).backward()
            return
        logits = self._logits(self.policy, batch)
        if self.settings.recompute_loss_function:
            outputs = checkpoint(self._outputs, batch, logits, entropy, use_reentrant=False)
        else:
            outputs = self._outputs(batch, logits, entropy)
        (loss(number, batch, outputs) * scale).backward()

    def optimizer_step(self) -> tuple[float, float]:
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        for parameter in parameters:
            # An update without any gradient still moves weights by its momentum, on every rank alike.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not torch.isfinite(norm):
            named = ((name, p.grad) for name, p in self.policy.named_parameters() if p.requires_grad)
            broken = [name for name, gradient in named if not bool(local(gradient).isfinite().all())]
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(self.updates, float(norm), broken)
        if self.settings.clip_grad > 0:
            nn.utils.clip_grads_with_norm_(parameters, self.settings.clip_grad, norm)
        lr = learning_rate(self.settings, self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        return float(norm), lr

    def reset_optimizer(self) -> None:
        # In place: a fresh state would be the same numbers in other memory.
        with torch.no_grad():
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()

    def device_tensors(self, part: str) -> Iterator[tuple[Tensor, bool]]:
        if part == WEIGHTS:
            loading.reshard(self.policy)
            yield from ((tensor, True) for tensor in _tensors(self.policy))
            return
        assert part == TRAINING
        for parameter in self.policy.parameters():
            if parameter.grad is not None:
                yield local(parameter.grad), True
        for state in self.optimizer.state.values():
            yield from ((local(value), True) for value in state.values() if isinstance(value, Tensor))
        if self.reference is not None:
            loading.reshard(self.reference)
            yield from ((tensor, True) for tensor in _tensors(self.reference))

    def named_weights(self, *, dtype: torch.dtype | None = None, everywhere: bool = False) -> NamedTensors:
        for name, tensor in self._weights():
            tensor = tensor.detach()
            whole = _whole(tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor)
            yield from self._in_files(name, whole)

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
        persistent = self.policy.state_dict().keys()
        yield from ((name, buffer) for name, buffer in self.policy.named_buffers() if name in persistent)

    def optimizer_state(self) -> NamedTensors:
        for name, parameter in self._stepped():
            for moment in _MOMENTS:
                yield f"{moment}.{name}", _whole(self.optimizer.state[parameter][moment])

    def optimizer_sizes(self) -> dict[str, int]:
        return {f"{moment}.{name}": parameter.numel() for name, parameter in self._stepped() for moment in _MOMENTS}

    def _stepped(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.policy.named_parameters() if self.optimizer.state.get(p))

    def load_optimizer_state(self, read: Callable[[str], Tensor], updates: int) -> None:
        self.updates = updates
        if not updates:
            return
        for name, parameter in self.policy.named_parameters():
            if parameter.requires_grad:
                moments = {moment: _like(read(f"{moment}.{name}"), parameter) for moment in _MOMENTS}
                # AdamW counts updates per parameter, in float32 beside it when fused.
                self.optimizer.state[parameter] = {"step": torch.tensor(float(updates), device=self.device), **moments}


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """This rank's parts of all parameters and buffers."""
    yield from (local(parameter.detach()) for parameter in model.parameters())
    yield from model.buffers()


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _like(whole: Tensor, parameter: Tensor) -> Tensor:
    if not hasattr(parameter, "device_mesh"):
        return whole.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(parameter.device), parameter.device_mesh, parameter.placements)
