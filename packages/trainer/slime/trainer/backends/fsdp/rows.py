"""Rows padded to few shapes, whose passes CUDA graphs replay.

    T  tokens of a shape        U  scored ones        R  runs        P  prompts that several responses see

The padding is made of sequences of its own, on which nothing is trained. Compiled layers take any shape; a graph has
one shape, with room for other rows. The room is tight, because FlashAttention launches as many blocks for every
possible run as the longest run needs. Rows that fit no graph run as compiled code, which costs less than many graphs; a
graph is captured for such rows once they have cost as much time as a capture.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from slime.trainer.backends.base import LossFunction, Outputs
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.batching.runs import Runs, SharedPrompts, notch

log = logging.getLogger(__name__)

# A row is padded to a multiple of an eighth of the largest number of tokens in a row.
_PARTS = 8
# Largest product of a shape's runs and its longest run, as a multiple of its tokens: above it attention takes longer.
_MOST_ROOM = 16
# Factors by which a shape has room for more runs and prompts than it was made for; the first that _MOST_ROOM allows.
# The longest run has none but what rounding leaves: FlashAttention would launch blocks for it in every run.
_SLACKS = (1.5, 1.25, 1.0)
_LARGEST_WASTE = 1.25
# A shape may have logits on which nothing is trained: one for this many tokens.
_TRAINED_WASTE = 4
_MAX_SHAPES = 4
# For the first updates and rows, a shape is made or widened for each row that fits none. After that, only once so many
# rows had no graph.
_FIRST_UPDATES = 3
_FIRST_ROWS = 8
_ROWS_WORTH_A_GRAPH = 64

Outcome = tuple[Tensor, Tensor]
# (model, tokens [1, T], position_ids [1, T], runs, rows [U], targets [U]) -> log-probs and entropies, [U].
Forward = Callable[[nn.Module, Tensor, Tensor, Runs, Tensor, Tensor], Outcome]
# Adds to the gradients of weights: (function that recomputes log-probs and entropies, these, their gradients or None).
Backward = Callable[[Callable[[], Outcome], Outcome, tuple[Tensor, Tensor | None]], None]


@dataclasses.dataclass(frozen=True)
class RowShape:
    tokens: int
    trained: int
    runs: int
    longest: int
    # Shared prompts: their number, the longest, and the largest number of response tokens that follow one.
    prompts: int = 0
    longest_prompt: int = 0
    most_responses: int = 0

    @staticmethod
    def of(batch: PackedBatch, max_tokens: int | None, tokens: int = 0) -> RowShape:
        """Returns the smallest shape for a row, of at least `tokens`. max_tokens: limit that most rows keep to."""
        length = batch.tokens.shape[1]
        unit = max(1, -(-(max_tokens or max(128, 1 << max(0, length - 1).bit_length())) // _PARTS))
        tokens = max(tokens, -(-length // unit) * unit)
        part = -(-tokens // _PARTS)
        trained = max(1, -(-len(batch.rows) // part)) * part
        if len(batch.rows) <= tokens:
            # A shared token may predict the next one of many samples, so there can be more than tokens.
            trained = min(tokens, trained)
        longest = max(batch.runs.max_q, 1)
        shape = RowShape(tokens, trained, len(batch.runs.q_lengths) + -(-(tokens - length) // longest), longest)
        shared = batch.runs.shared
        if shared is None:
            return shape
        return dataclasses.replace(
            shape, prompts=len(shared.k_limits) - 1, longest_prompt=shared.max_k, most_responses=shared.max_q
        )

    @property
    def cost(self) -> tuple[int, ...]:
        return self.tokens, self.trained, self.runs * self.longest

    @property
    def roomy(self) -> bool:
        """True if attention would spend its time on blocks that no row fills."""
        return max(self.runs * self.longest, self.prompts * self.most_responses) > _MOST_ROOM * self.tokens

    def takes(self, batch: PackedBatch, wanted: RowShape) -> bool:
        """Returns True if a row that needs `wanted` fits this shape, at little cost."""
        padding = self.tokens - batch.tokens.shape[1]
        return (
            wanted.tokens <= self.tokens <= _LARGEST_WASTE * wanted.tokens
            and wanted.trained <= self.trained <= wanted.trained + wanted.tokens // _TRAINED_WASTE
            and len(batch.runs.q_lengths) + -(-padding // self.longest) <= self.runs
            and all(getattr(self, name) >= getattr(wanted, name) for name in _BOUNDS)
        )

    def widened(self, wanted: RowShape) -> RowShape | None:
        """Returns this shape with room for `wanted` too; None if that would slow down rows of either shape."""
        trained = max(self.trained, wanted.trained)
        if self.tokens != wanted.tokens or abs(self.trained - wanted.trained) > self.tokens // _TRAINED_WASTE:
            return None
        for slack in _SLACKS:
            bounds = {name: (getattr(self, name), getattr(wanted, name)) for name in ("runs", *_BOUNDS)}
            more = {
                name: held if held >= new else notch(int(slack * new) + (slack > 1) if name in _COUNTS else new)
                for name, (held, new) in bounds.items()
            }
            shape = RowShape(self.tokens, trained, **more)
            if not shape.roomy:
                return shape
        return None


_COUNTS = ("runs", "prompts")
_BOUNDS = ("longest", "prompts", "longest_prompt", "most_responses")


class StaticRow:
    """The inputs of rows of one shape, in memory that stays."""

    def __init__(self, shape: RowShape, device: torch.device, one_length: bool = False) -> None:
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
        self.runs = Runs(
            [], [], self.limits, self.limits, None, shape.longest, shape.longest, self.shared, one_length, padded=True
        )
        self._steps = torch.arange(1, shape.runs + 1, dtype=torch.int32, device=device) * shape.longest
        # Distinct row numbers: the gradients of one row that occurs many times would be added one after the other.
        self._any_rows = torch.arange(shape.trained, device=device) % shape.tokens

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
        if self.shared is not None:
            shared = batch.runs.shared
            _fill(self.shared.q_limits, shared.q_limits if shared is not None else None)
            _fill(self.shared.k_limits, shared.k_limits if shared is not None else None)
        self.rows[:trained].copy_(batch.rows)
        self.rows[trained:].copy_(self._any_rows[trained:])
        self.targets[:trained].copy_(batch.targets)
        self.targets[trained:].zero_()


def _fill(limits: Tensor, values: Tensor | None) -> None:
    """Writes `values`, and repeats the last one for the prompts and responses that have no token; None: all of them."""
    if values is None:
        limits.zero_()
        return
    limits[: len(values)].copy_(values)
    limits[len(values) :].copy_(values[-1].expand(len(limits) - len(values)))


class _Slot:
    """A shape that rows get, and the graphs that were captured for it, by whether they have gradients of entropies."""

    def __init__(self, row: StaticRow) -> None:
        self.row = row
        self.graphs: dict[bool, _Captured] = {}
        self.used = 0

    def widen(self, row: StaticRow) -> None:
        self.row = row
        self.graphs.clear()


class StaticRows:
    """Forward and backward passes over rows of few shapes. max_tokens: limit that most rows keep to; None for none."""

    def __init__(self, forward: Forward, backward: Backward, device: torch.device, max_tokens: int | None) -> None:
        self._forward, self._backward = forward, backward
        self._device = device
        self._max_tokens = max_tokens
        self._graphs = False
        self._slots: list[_Slot] = []
        self._updates = self._met = 0
        # Tokens of the first row, whose length layers are compiled for, and of the shortest row. Layers are compiled
        # once more for all other lengths; torch may guard that code by a smallest length, as fusion depends on sizes.
        self._first_tokens = self._fewest_tokens = 0
        # Rows that fitted no shape since the shapes last changed.
        self._without = 0
        # The passes that ran without a graph in this update, with gradients of entropies or without.
        self._ran: dict[bool, nn.Module] = {}
        self._pool: tuple[int, int] | None = None
        self.captured = 0

    def use_graphs(self, wanted: bool) -> None:
        """Captures recurring shapes as CUDA graphs and replays them; or, if not `wanted`, drops the graphs it has."""
        self._graphs = wanted
        if not wanted:
            self._slots.clear()
            self._pool = None

    def updated(self) -> None:
        """Ends an update and captures its shapes, now that their code is compiled: a capture cannot compile."""
        self._updates += 1
        for with_entropy, model in self._ran.items() if self._graphs else ():
            self._capture(model, with_entropy)
        self._ran.clear()

    @staticmethod
    def takes(batch: PackedBatch) -> bool:
        """Returns False for rows whose keys are gathered or that have images: these are not padded."""
        return batch.runs.keys is None and not batch.images

    @property
    def shapes(self) -> list[RowShape]:
        return [slot.row.shape for slot in self._slots]

    @property
    def num_graphs(self) -> int:
        return sum(len(slot.graphs) for slot in self._slots)

    @property
    def _settled(self) -> bool:
        return self._updates >= _FIRST_UPDATES and self._met >= _FIRST_ROWS

    def _wanted(self, batch: PackedBatch, trains: bool) -> RowShape:
        """Returns the shape of a row; that of the shortest row so far for a shorter one that comes late, because layers
        might have to be compiled again for it."""
        wanted = RowShape.of(batch, self._max_tokens)
        self._first_tokens = self._first_tokens or wanted.tokens
        if self._settled and wanted.tokens < self._fewest_tokens:
            self._without += trains
            if self._without < _ROWS_WORTH_A_GRAPH:
                return RowShape.of(batch, self._max_tokens, self._fewest_tokens)
        self._fewest_tokens = min(self._fewest_tokens or wanted.tokens, wanted.tokens)
        return wanted

    def _static(self, shape: RowShape) -> StaticRow:
        return StaticRow(shape, self._device, shape.tokens == self._first_tokens)

    def _slot(self, batch: PackedBatch, wanted: RowShape) -> _Slot | None:
        """Returns the slot of a row; None for a row that goes without a graph."""
        fitting = [slot for slot in self._slots if slot.row.shape.takes(batch, wanted)]
        slot = min(fitting, key=lambda slot: slot.row.shape.cost, default=None)
        own = wanted == RowShape.of(batch, self._max_tokens)
        if own and (slot is None or (slot.row.shape.tokens > wanted.tokens and len(self._slots) < _MAX_SHAPES)):
            slot = self._changed(wanted) or slot
        if slot is not None:
            slot.used += 1
        return slot

    def _changed(self, wanted: RowShape) -> _Slot | None:
        """Returns a slot that was made or widened for a row, once that is worth it."""
        if self._settled:
            self._without += 1
            if self._without < _ROWS_WORTH_A_GRAPH:
                return None
        for slot in self._slots:
            if (wider := slot.row.shape.widened(wanted)) is not None:
                slot.widen(self._static(wider))
                break
        else:
            if len(self._slots) >= _MAX_SHAPES:
                least = min(self._slots, key=lambda slot: slot.used)
                if not self._settled or least.used >= _ROWS_WORTH_A_GRAPH:
                    return None
                self._slots.remove(least)
            shape = RowShape(wanted.tokens, wanted.trained, 0, 0).widened(wanted) or wanted
            slot = _Slot(self._static(shape))
            self._slots.append(slot)
        self._without = 0
        for other in self._slots:
            other.used = 0
        return slot

    def scores(self, model: nn.Module, batch: PackedBatch) -> Outcome:
        """Returns log-probs and entropies, [U] of the batch, without gradient."""
        row, trained = self._static(self._wanted(batch, trains=False)), len(batch.rows)
        row.fill(batch)
        log_probs, entropy = row.run(self._forward, model)
        return log_probs[:trained], entropy[:trained]

    def forward_backward(
        self, model: nn.Module, number: int, batch: PackedBatch, loss: LossFunction, entropy: str, scale: float
    ) -> None:
        wanted, with_entropy = self._wanted(batch, trains=True), entropy == "gradient"
        slot = None
        if self._graphs:
            slot = self._slot(batch, wanted)
            self._met += 1
        row = slot.row if slot is not None else self._static(wanted)
        row.fill(batch)
        captured = slot.graphs.get(with_entropy) if slot is not None else None
        if captured is None:
            outcome = row.run(self._forward, model)
            gradients = gradients_of(number, batch, loss, entropy, outcome, scale)
            self._backward(lambda: row.run(self._forward, model), outcome, gradients)
            self._ran[with_entropy] = model
            return
        captured.forward.replay()
        outcome = captured.log_probs, captured.entropies
        of_log_probs, of_entropy = gradients_of(number, batch, loss, entropy, outcome, scale)
        captured.of_log_probs.copy_(of_log_probs)
        if of_entropy is not None and captured.of_entropies is not None:
            captured.of_entropies.copy_(of_entropy)
        captured.backward.replay()

    def _capture(self, model: nn.Module, with_entropy: bool) -> None:
        for slot in self._slots:
            if with_entropy in slot.graphs:
                continue
            run = functools.partial(slot.row.run, self._forward, model)
            # A pool ends with the last of its graphs.
            self._pool = self._pool if self._pool and self.num_graphs else torch.cuda.graph_pool_handle()
            try:
                with torch.enable_grad():
                    slot.graphs[with_entropy] = _Captured(run, self._backward, slot.row, with_entropy, self._pool)
            except RuntimeError as error:
                self._graphs = False
                reason = str(error).strip().splitlines()
                log.warning("rows are not replayed as CUDA graphs: %s", reason[0] if reason else type(error).__name__)
                return
            self.captured += 1


class _Captured:
    """The forward and backward pass of a shape as two graphs. Between them runs the loss, which may be a user's."""

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
