"""Rows padded to few shapes, for layers that are compiled once a shape and passes that a CUDA graph replays.

    T  tokens of a shape        J  trained ones        R  runs        P  prompts that several responses see

Padding is sequences of its own that nothing is trained on. The bounds are tight: FlashAttention launches blocks for
every run that there may be, times every block of the longest.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from slime.trainer.backends.base import LossFunction, Outputs
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.batching.runs import Runs, SharedPrompts, bound

log = logging.getLogger(__name__)

# A row is padded to eighths of the most tokens that a row may have.
_PARTS = 8
# Runs that there may be, times the longest, in rows of tokens: more begins to cost attention time.
_ROOM = 8
_MOST_ROOM = 16
_LARGEST_WASTE = 1.25
_MAX_GRAPHS = 8

Outcome = tuple[Tensor, Tensor]
# (model, tokens [1, T], position_ids [1, T], runs, rows [J], targets [J]) -> log-probs and entropies, [J].
Forward = Callable[[nn.Module, Tensor, Tensor, Runs, Tensor, Tensor], Outcome]
# Adds to the gradients of weights: (what makes log-probs and entropies once more, they, their gradients or None).
Backward = Callable[[Callable[[], Outcome], Outcome, tuple[Tensor, Tensor | None]], None]


@dataclasses.dataclass(frozen=True)
class RowShape:
    tokens: int
    trained: int
    runs: int
    longest: int
    # Shared prompts: their number, the longest, and the most response tokens that one has.
    prompts: int = 0
    longest_prompt: int = 0
    most_responses: int = 0

    @staticmethod
    def of(batch: PackedBatch, max_tokens: int | None) -> RowShape:
        length = batch.tokens.shape[1]
        unit = max(1, -(-(max_tokens or max(128, bound(length))) // _PARTS))
        tokens = -(-length // unit) * unit
        part = -(-tokens // _PARTS)
        trained = min(tokens, max(1, -(-len(batch.rows) // part)) * part)
        longest = batch.runs.max_q
        runs = len(batch.runs.q_lengths) + -(-(tokens - length) // longest)
        shape = RowShape(tokens, trained, bound(max(runs, _ROOM * tokens // longest, 1)), longest)
        shared = batch.runs.shared
        if shared is None:
            return shape
        # Responses are many and short beside a prompt: as many runs as there are, then, rounded up.
        return dataclasses.replace(
            shape, runs=bound(runs), prompts=bound(len(shared.k_limits) - 1), longest_prompt=shared.max_k,
            most_responses=shared.max_q,
        )  # fmt: skip

    def takes(self, batch: PackedBatch, wanted: RowShape) -> bool:
        """Returns True if a row that would get `wanted` may have this shape at little cost."""
        length = batch.tokens.shape[1]
        runs = len(batch.runs.q_lengths) + -(-(self.tokens - length) // self.longest)
        return (
            self.tokens == wanted.tokens
            and len(batch.rows) <= self.trained <= _LARGEST_WASTE * wanted.trained
            and batch.runs.max_q <= self.longest
            and runs <= self.runs
            and self.runs * self.longest <= max(_MOST_ROOM * self.tokens, wanted.runs * wanted.longest)
            and wanted.prompts <= self.prompts <= 2 * wanted.prompts
            and wanted.longest_prompt <= self.longest_prompt
            and wanted.most_responses <= self.most_responses <= 2 * wanted.most_responses
        )


class StaticRow:
    """The inputs of rows of one shape, in memory that stays."""

    def __init__(self, shape: RowShape, device: torch.device) -> None:
        self.shape = shape
        self.tokens = torch.zeros((1, shape.tokens), dtype=torch.int64, device=device)
        self.position_ids = torch.zeros_like(self.tokens)
        self.limits = torch.zeros(shape.runs + 1, dtype=torch.int32, device=device)
        self.rows = torch.zeros(shape.trained, dtype=torch.int64, device=device)
        self.targets = torch.zeros_like(self.rows)
        self.shared = None
        if shape.prompts:
            q_limits = torch.zeros(shape.prompts + 1, dtype=torch.int32, device=device)
            k_limits = torch.zeros_like(q_limits)
            self.shared = SharedPrompts(q_limits, k_limits, shape.most_responses, shape.longest_prompt)
        self.runs = Runs([], [], self.limits, self.limits, None, shape.longest, shape.longest, self.shared)
        self._steps = torch.arange(1, shape.runs + 1, dtype=torch.int32, device=device) * shape.longest
        # Different ones: gradients of many equal rows would be added up one after the other.
        self._any_rows = torch.arange(shape.trained, device=device)

    def run(self, forward: Forward, model: nn.Module) -> Outcome:
        return forward(model, self.tokens, self.position_ids, self.runs, self.rows, self.targets)

    def fill(self, batch: PackedBatch) -> None:
        length, trained, runs = batch.tokens.shape[1], len(batch.rows), len(batch.runs.q_lengths)
        self.tokens[:, :length].copy_(batch.tokens)
        self.tokens[:, length:].zero_()
        self.position_ids[:, :length].copy_(batch.position_ids)
        self.position_ids[:, length:].zero_()
        self.limits[: runs + 1].copy_(batch.runs.q_limits)
        rest = self.limits[runs + 1 :]
        torch.clamp(self._steps[: len(rest)] + length, max=self.shape.tokens, out=rest)
        if self.shared is not None and batch.runs.shared is not None:
            _fill(self.shared.q_limits, batch.runs.shared.q_limits)
            _fill(self.shared.k_limits, batch.runs.shared.k_limits)
        self.rows[:trained].copy_(batch.rows)
        self.rows[trained:].copy_(self._any_rows[trained:])
        self.targets[:trained].copy_(batch.targets)
        self.targets[trained:].zero_()


def _fill(limits: Tensor, values: Tensor) -> None:
    """Writes `values`, and repeats the last one for the prompts and responses that have no token."""
    limits[: len(values)].copy_(values)
    limits[len(values) :].copy_(values[-1].expand(len(limits) - len(values)))


class StaticRows:
    """Forward and backward passes over rows of few shapes. max_tokens: of a row, as a rule."""

    def __init__(self, forward: Forward, backward: Backward, device: torch.device, max_tokens: int | None) -> None:
        self._forward, self._backward = forward, backward
        self._device = device
        self._max_tokens = max_tokens
        self._graphs = False
        self._rows: dict[RowShape, StaticRow] = {}
        self._captured: dict[tuple[RowShape, bool], _Captured] = {}
        self._met: set[tuple[RowShape, bool]] = set()
        self._pool: tuple[int, int] | None = None

    def use_graphs(self, wanted: bool) -> None:
        """Captures a shape that comes again in CUDA graphs, and replays them; or drops the ones it has."""
        self._graphs = wanted
        if not wanted:
            self._captured.clear()
            self._pool = None

    @staticmethod
    def takes(batch: PackedBatch) -> bool:
        """Returns False for rows whose keys are gathered or that have images: these go as they are."""
        return batch.runs.keys is None and not batch.images

    @property
    def shapes(self) -> int:
        return len(self._rows)

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def _fill(self, batch: PackedBatch) -> StaticRow:
        wanted = RowShape.of(batch, self._max_tokens)
        fitting = [row for shape, row in self._rows.items() if shape.takes(batch, wanted)]
        if fitting:
            row = min(fitting, key=lambda row: (row.shape.trained, row.shape.runs * row.shape.longest))
        else:
            row = self._rows[wanted] = StaticRow(wanted, self._device)
        row.fill(batch)
        return row

    def scores(self, model: nn.Module, batch: PackedBatch) -> Outcome:
        """Returns log-probs and entropies, [J] of the batch, without gradient."""
        row, trained = self._fill(batch), len(batch.rows)
        log_probs, entropy = row.run(self._forward, model)
        return log_probs[:trained], entropy[:trained]

    def forward_backward(
        self, model: nn.Module, number: int, batch: PackedBatch, loss: LossFunction, entropy: str, scale: float
    ) -> None:
        row = self._fill(batch)
        captured = self._capture(model, row, entropy == "gradient")
        if captured is None:
            outcome = row.run(self._forward, model)
            gradients = gradients_of(number, batch, loss, entropy, outcome, scale)
            self._backward(lambda: row.run(self._forward, model), outcome, gradients)
            return
        captured.forward.replay()
        outcome = captured.log_probs, captured.entropies
        of_log_probs, of_entropy = gradients_of(number, batch, loss, entropy, outcome, scale)
        captured.of_log_probs.copy_(of_log_probs)
        if of_entropy is not None and captured.of_entropies is not None:
            captured.of_entropies.copy_(of_entropy)
        captured.backward.replay()

    def _capture(self, model: nn.Module, row: StaticRow, with_entropy: bool) -> _Captured | None:
        key = row.shape, with_entropy
        if key in self._captured:
            return self._captured[key]
        if key not in self._met or not self._graphs or len(self._captured) >= _MAX_GRAPHS:
            # The first of a shape compiles what is not compiled yet, which a capture cannot.
            self._met.add(key)
            return None
        try:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._captured[key] = _Captured(
                lambda: row.run(self._forward, model), self._backward, row, with_entropy, self._pool
            )
        except RuntimeError as error:
            self._graphs = False
            reason = str(error).strip().splitlines()
            log.warning("rows are not replayed as CUDA graphs: %s", reason[0] if reason else type(error).__name__)
            return None
        return self._captured[key]


class _Captured:
    """The forward and backward pass of a shape as two graphs; between them comes the loss, which may be anyone's."""

    def __init__(
        self,
        forward: Callable[[], Outcome],
        backward: Backward,
        row: StaticRow,
        with_entropy: bool,
        pool: tuple[int, int],
    ) -> None:
        self.of_log_probs = torch.zeros(row.shape.trained, device=row.tokens.device)
        self.of_entropies = torch.zeros_like(self.of_log_probs) if with_entropy else None
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward, pool=pool):
            log_probs, entropies = forward()
        with torch.cuda.graph(self.backward, pool=pool):
            backward(forward, (log_probs, entropies), (self.of_log_probs, self.of_entropies))
        # Without what the backward pass would need: its memory is the graphs'.
        self.log_probs, self.entropies = log_probs.detach(), entropies.detach()


def gradients_of(
    number: int, batch: PackedBatch, loss: LossFunction, entropy: str, outcome: Outcome, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Returns gradients of the loss with regard to all log-probs and entropies of a row, of which the first are the
    batch's."""
    trained = len(batch.rows)
    log_probs = outcome[0].detach().requires_grad_()
    entropies = outcome[1].detach().requires_grad_(entropy == "gradient")
    seen = None if entropy == "none" else batch.scatter(entropies[:trained])
    total = loss(number, batch, Outputs(batch.scatter(log_probs[:trained]), seen)) * scale
    leaves = [log_probs, entropies] if entropies.requires_grad else [log_probs]
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return gradients[0], gradients[1] if len(gradients) > 1 else None
