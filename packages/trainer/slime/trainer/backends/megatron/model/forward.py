"""Passes of micro-batches through a model that is cut into pipeline stages, and the outputs of the last stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.trainer.algorithms.fused_log_probs import FusedLogProbs
from slime.trainer.algorithms.logprobs import replicated_sum, token_entropy, token_log_probs
from slime.trainer.algorithms.nucleus import Nuclei, nucleus_log_probs
from slime.trainer.backends.base import MaybeBatch, Outputs
from slime.trainer.backends.megatron.model.head import Head
from slime.trainer.backends.megatron.model.routing import of_chunk
from slime.trainer.backends.megatron.model.row import RankRow, cut
from slime.trainer.backends.megatron.model.vocabulary import Scoring, real_columns
from slime.trainer.backends.routing import RoutingReplay
from slime.trainer.batching.packing import PackedBatch
from slime.types.errors import NotAvailable

Chunks = list[torch.nn.Module]


class Pipeline:
    """Runs micro-batches through `chunks`, one a virtual pipeline stage of this rank."""

    def __init__(
        self,
        chunks: Chunks,
        config: Any,
        scoring: Scoring,
        device: torch.device,
        *,
        row_multiple: int = 1,
        recompute: bool = False,
        fused: FusedLogProbs | None = None,
        routing: RoutingReplay | None = None,
        image_token: int = -1,
    ) -> None:
        """row_multiple: a rank's tokens of a row are padded to a multiple of it; above 1, also of the tensor-parallel
        size.

        recompute: compute log-probs and entropies again in the backward pass, and keep none of their float32 logits.
        fused: computes them if a rank has the whole vocabulary, without chunks and without `recompute`.
        image_token: its id, for a model that reads images.
        """
        self.chunks = chunks
        self.image_token = image_token
        self.routing = routing
        self._layers = {id(chunk): of_chunk(chunk) for chunk in chunks}
        self.row_multiple = row_multiple
        self.recompute = recompute
        whole = parallel_state.get_tensor_model_parallel_world_size() == 1
        self.fused = fused if whole and scoring.chunk <= 0 and not recompute else None
        self.config = config
        self.scoring = scoring
        self.device = device
        self._context = parallel_state.get_context_parallel_group()
        self._vocabulary = parallel_state.get_tensor_model_parallel_group()

    def scores(
        self, batches: Sequence[MaybeBatch], *, entropy: bool = False, replays: bool = True
    ) -> list[Outputs | None]:
        """Computes outputs without gradient, on every stage. replays: whether experts are replayed or recorded, as a
        policy's are."""

        def collect(number: int, batch: MaybeBatch, row: RankRow, logits: Tensor) -> tuple[Tensor, Any]:
            if batch is None:
                return logits.new_zeros(()), None
            outputs = self._outputs(batch, row, logits, "value" if entropy else "none")
            return logits.new_zeros(()), torch.stack(self._numbers(outputs))

        if self.routing is not None:
            # Also for another model: its weights use the same layers, which still hold the experts of the policy's
            # last row.
            self.routing.scores()
        with torch.no_grad():
            results = self._from_last_stage(
                batches, self._run(batches, collect, forward_only=True, replays=replays), 1 + entropy
            )
        return [None if found is None else self._of_numbers(found) for found in results]

    def train(
        self,
        batches: Sequence[MaybeBatch],
        loss: Callable[[int, PackedBatch, Outputs], Tensor],
        entropy: str,
        scale: float,
        *,
        logits: bool = False,
    ) -> None:
        """Adds the gradient of `scale` times the sum of losses to what the parameters hold.

        logits: whether the outputs have them. Raises NotAvailable where ranks have parts of them.
        """
        if logits and (self._context.size() > 1 or self._vocabulary.size() > 1):
            raise NotAvailable(
                "logits cannot be handed to a loss function with --tensor-model-parallel-size or "
                "--context-parallel-size above 1: no rank has all of them; the function can do without them, as "
                "fn(args, batch, sum_of_sample_mean)",
                field="--custom-loss-function-path",
            )
        with_logits = logits

        def compute(number: int, batch: MaybeBatch, row: RankRow, logits: Tensor) -> tuple[Tensor, Any]:
            if batch is None:
                return logits.sum() * 0.0, None
            if self.recompute:
                outputs = checkpoint(self._outputs, batch, row, logits, entropy, use_reentrant=False)
            else:
                outputs = self._outputs(batch, row, logits, entropy)
            if with_logits:
                columns = self._scored(logits)[0][: len(batch.targets)]
                outputs = dataclasses.replace(outputs, logits=batch.spread(columns))
            value = loss(number, batch, outputs)
            if row.trained is not None and self._vocabulary.size() == 1:
                return value * scale, None
            # Where a rank predicts nothing its logits still take part: all ranks make the same collective calls.
            return value * scale + logits.sum() * 0.0, None

        if self.routing is not None:
            self.routing.trains()
        self._run(batches, compute, forward_only=False)

    def _run(
        self, batches: Sequence[MaybeBatch], last: Callable[..., Any], *, forward_only: bool, replays: bool = True
    ) -> list[Any]:
        rank, size = self._context.rank(), self._context.size()
        padded = self.config.sequence_parallel or self.row_multiple > 1
        multiple = self.row_multiple * (self._vocabulary.size() if padded else 1)
        cut_row = partial(
            cut, rank=rank, size=size, multiple=multiple, device=self.device, image_token=self.image_token
        )
        rows = [cut_row(batch) for batch in batches]
        longest = max(row.tokens.shape[1] for row in rows)
        if not self.config.variable_seq_lengths:
            rows = [cut_row(batch, length=longest) for batch in batches]
        work = list(zip(range(len(batches)), batches, rows, strict=True))

        def step(iterator: Iterator[tuple[int, MaybeBatch, RankRow]], chunk: torch.nn.Module) -> Any:
            number, batch, row = next(iterator)
            model = get_attr_wrapped_model(chunk, "head", return_model_obj=True)
            model.head = Head(row.predicting, row.labels, row.has_label, self.scoring)
            layers = self._layers[id(chunk)] if replays else []
            if self.routing is not None and layers:
                self.routing.begin(batch, self._routed_here(row), layers)
            output = chunk(row.tokens, row.positions, None, packed_seq_params=row.packing)
            if self.routing is not None and layers:
                self.routing.end(batch, layers)
            return output, partial(finish, number, batch, row)

        def finish(number: int, batch: MaybeBatch, row: RankRow, logits: Tensor) -> Any:
            value, result = last(number, batch, row, logits[0])
            # With three values the schedule leaves the loss as it is: the plan's weights contain the denominators.
            return value, torch.ones((), dtype=torch.int, device=logits.device), result

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(work) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(work),
            # The length on all context-parallel ranks; ignored where stages exchange shapes.
            seq_length=longest * size,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _routed_here(self, row: RankRow) -> Tensor | None:
        """Returns the experts of the tokens that routers of this rank see."""
        if row.experts is None or not self.config.sequence_parallel:
            return row.experts
        return row.experts.chunk(self._vocabulary.size())[self._vocabulary.rank()]

    def _scored(self, logits: Tensor) -> tuple[Any, ...]:
        """Returns arguments that functions of log-probs and entropies share: logits, temperature, chunk, shard."""
        columns, shard = real_columns(logits, self.scoring.vocab_size, self._vocabulary)
        return columns, self.scoring.temperature, self.scoring.chunk, shard

    def _outputs(self, batch: PackedBatch, row: RankRow, logits: Tensor, entropy: str) -> Outputs:
        targets = batch.targets[row.trained] if row.trained is not None else batch.targets[:1].new_zeros(1)
        columns, temperature, chunk, shard = self._scored(logits)
        if self.fused is not None and batch.nuclei is None:
            log_probs, entropies = self.fused(columns, targets, temperature)
            seen = entropies if entropy == "gradient" else entropies.detach()
            whole = None if entropy == "none" else self._gather(batch, row, seen)
            return Outputs(self._gather(batch, row, log_probs), whole)
        if batch.nuclei is None:
            scored = token_log_probs(columns, targets, temperature, chunk, shard)
        elif row.trained is not None:
            scored = nucleus_log_probs(columns, batch.nuclei.take(row.trained), temperature, shard)
        else:
            only = torch.zeros_like(targets)
            scored = nucleus_log_probs(columns, Nuclei(ids=targets, rows=only, targets=only), temperature, shard)
        log_probs = self._gather(batch, row, scored)
        if entropy == "none":
            return Outputs(log_probs, None)
        with torch.set_grad_enabled(entropy == "gradient"):
            return Outputs(log_probs, self._gather(batch, row, token_entropy(columns, temperature, chunk, shard)))

    def _numbers(self, outputs: Outputs) -> list[Tensor]:
        """Returns what other stages need of outputs without gradient: [K] each."""
        return [outputs.log_probs, *([] if outputs.entropy is None else [outputs.entropy])]

    def _of_numbers(self, numbers: Tensor) -> Outputs:
        """Makes outputs of what `_numbers` returned, stacked."""
        return Outputs(numbers[0], numbers[1] if len(numbers) > 1 else None)

    def _gather(self, batch: PackedBatch, row: RankRow, values: Tensor) -> Tensor:
        """[j] of this rank's part of the sequences -> [K] of all of it."""
        whole = values.new_zeros(len(batch.targets))
        if row.trained is not None:
            whole = whole.index_put((row.trained,), values)
        return batch.scatter(replicated_sum(whole, self._context) if self._context.size() > 1 else whole)

    def _from_last_stage(self, batches: Sequence[MaybeBatch], results: list[Any], numbers: int) -> list[Tensor | None]:
        """[numbers, K] of each micro-batch."""
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return results
        sizes = [0 if batch is None else numbers * len(batch.mask) for batch in batches]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=self.device)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True) and sum(sizes):
            flat = torch.cat([result.flatten() for result in results if result is not None])
        dist.broadcast(flat, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        parts = flat.split(sizes)
        return [None if b is None else part.view(numbers, -1) for b, part in zip(batches, parts, strict=True)]
