"""Forward and backward passes over rows: eager, compiled, or replayed as CUDA graphs.

Logits are made only where they are trained: U of a row's tokens, each once for all samples that share it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slime.trainer.algorithms.fused_log_probs import FusedLogProbs
from slime.trainer.algorithms.logprobs import token_entropy, token_log_probs
from slime.trainer.algorithms.nucleus import nucleus_log_probs
from slime.trainer.backends.base import LossFunction, MaybeBatch, Outputs
from slime.trainer.backends.fsdp.compilation import COMPILE_ERRORS, Compiler
from slime.trainer.backends.fsdp.master import MasterWeights
from slime.trainer.backends.fsdp.on_policy import EngineForward
from slime.trainer.backends.fsdp.rows import StaticRows, gradients_of
from slime.trainer.backends.routing import RoutingReplay
from slime.trainer.backends.shared_attention import fuse
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.batching.runs import Runs
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import NotAvailable
from slime.types.models.vision import vision_of


class Passes:
    """Runs models over rows, with the outputs of a policy.

    world_size: ranks that the models are cut over; 1 where each rank has them whole. master: the float32 weights of the
    policy, which take its gradients; None where its own parameters do. compiler: None runs everything as it is. engine:
    computes the layers, and log-probs too.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        device: torch.device,
        world_size: int,
        master: MasterWeights | None,
        compiler: Compiler | None,
        engine: EngineForward | None = None,
    ) -> None:
        self.settings = settings
        self.device = device
        self._world_size = world_size
        self._master = master
        self._compiler = compiler
        self._engine = engine
        self._fused: FusedLogProbs | None = None
        self.rows: StaticRows | None = None
        if compiler is not None:
            self._fused = FusedLogProbs(compiler.function)
            fuse(compiler.function)
            limit = settings.max_tokens_per_gpu if settings.use_dynamic_batch_size else None
            self.rows = StaticRows(self._row_outputs, self._backward, device, limit)

    @torch.no_grad()
    def scores(
        self, model: nn.Module, batches: Sequence[MaybeBatch], entropy: bool, replay: RoutingReplay | None = None
    ) -> list[Outputs | None]:
        """Returns outputs without gradient, None for None. replay: of the experts of `model`."""
        outputs: list[Outputs | None] = []
        if replay is not None:
            replay.scores()
        for batch in batches:
            if replay is not None:
                replay.begin(batch, batch.experts if batch is not None else None)
            if batch is None:
                if self._world_size > 1:
                    self._idle(model)
                outputs.append(None)
            elif self._fuses(batch):
                log_probs, entropies = self._fused_outputs(model, batch)
                outputs.append(Outputs(batch.scatter(log_probs), batch.scatter(entropies) if entropy else None))
            else:
                outputs.append(self.outputs(batch, self._logits(model, batch), "value" if entropy else "none"))
            if replay is not None:
                replay.end(batch)
        return outputs

    def _fuses(self, batch: PackedBatch) -> bool:
        """Tells whether log-probs and entropies come from one reading of the logits: compiled, over all tokens."""
        compiled = self._compiler is not None and not self._compiler.failed
        return compiled and batch.nuclei is None and self._engine is None

    def _fused_outputs(self, model: nn.Module, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Returns log-probs and entropies, [U]."""
        assert self._fused is not None and self.rows is not None
        if not torch.is_grad_enabled() and StaticRows.takes(batch):
            return self.rows.scores(model, batch)
        return self._fused(self._logits(model, batch), batch.targets, self.settings.rollout_temperature)

    def outputs(self, batch: PackedBatch, logits: Tensor, entropy: str) -> Outputs:
        """Returns log-probs of a row and, unless `entropy` is "none", its entropies, from logits [U, V]."""
        temperature, chunk = self.settings.rollout_temperature, self.settings.log_probs_chunk_size
        if batch.nuclei is None:
            found = self._engine.token_log_probs if self._engine is not None else token_log_probs
            log_probs = batch.scatter(found(logits, batch.targets, temperature, chunk))
        else:
            log_probs = batch.scatter(nucleus_log_probs(logits, batch.nuclei, temperature))
        if entropy == "none":
            return Outputs(log_probs, None)
        with torch.set_grad_enabled(entropy == "gradient"):
            return Outputs(log_probs, batch.scatter(token_entropy(logits, temperature, chunk)))

    def forward_backward(
        self, model: nn.Module, number: int, batch: MaybeBatch, loss: LossFunction, entropy: str, with_logits: bool
    ) -> None:
        """Adds the gradients of `loss` for one micro-batch to those of the weights."""
        # FSDP2 averages gradients over ranks, the plan's weights expect their sum.
        scale = self._world_size
        if batch is None:
            if self._world_size > 1:
                self._idle(model).backward()
        elif with_logits or not self._fuses(batch):
            logits = self._logits(model, batch)
            if self.settings.recompute_loss_function:
                outputs = checkpoint(self.outputs, batch, logits, entropy, use_reentrant=False)
            else:
                outputs = self.outputs(batch, logits, entropy)
            if with_logits:
                outputs = dataclasses.replace(outputs, logits=batch.spread(logits))
            self._add_gradients([loss(number, batch, outputs) * scale])
        elif self.rows is not None and StaticRows.takes(batch):
            self.rows.forward_backward(model, number, batch, loss, entropy, scale)
        else:
            outputs = self._fused_outputs(model, batch)
            gradients = gradients_of(number, batch, loss, entropy, outputs, scale)
            self._backward(lambda: self._fused_outputs(model, batch), outputs, gradients)

    def _backward(
        self, again: Callable[[], tuple[Tensor, ...]], outputs: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]
    ) -> None:
        """Adds gradients to those of the weights. again: makes the outputs once more, where their backward pass cannot
        be compiled."""
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

    def _logits(self, model: nn.Module, batch: PackedBatch) -> Tensor:
        """[U, V] at the tokens that predict trained ones."""
        images: dict[str, object] = {}
        if batch.images:
            config: Any = model.config
            if vision_of(config.to_dict()) is None:
                # The policy reads them, or they would not have come here.
                raise NotAvailable.unavailable(
                    f"a {config.model_type}, which reads text alone, as critic, reference or teacher of a policy that "
                    "reads images",
                    "the samples have images",
                )
            images = {
                "images": {n: self._input(t) for n, t in batch.images.items()},
                "image_places": batch.image_places,
            }
        positions = batch.position_ids if batch.grid_positions is None else batch.grid_positions
        return _logits(model, batch.tokens, positions, batch.runs, batch.rows, **images)

    def _input(self, tensor: Tensor) -> Tensor:
        """Moves a tensor to the device, in the type of the weights; FSDP2 casts what its modules are given itself."""
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


def _logits(model: nn.Module, tokens: Tensor, positions: Tensor, runs: Runs, rows: Tensor, **images: object) -> Tensor:
    """[U, V] at `rows`."""
    keeps = {"logits_to_keep": rows} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits = model(input_ids=tokens, position_ids=positions, runs=runs, use_cache=False, **keeps, **images).logits[0]
    return logits if keeps else logits[rows]
