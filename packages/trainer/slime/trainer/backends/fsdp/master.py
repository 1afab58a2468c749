"""Bfloat16 weights with a float32 master copy, in flat memory: one for matrices and one for vectors.

    N  numbers of a flat piece of memory; every parameter starts at a multiple of 64 of them
    n  numbers of it that one rank updates: N over the number of ranks

The model computes with views of bfloat16 memory, gradients are added up in float32 memory, and AdamW updates the
float32 weights in one kernel, from which one more writes the bfloat16 ones. Several ranks each have all weights and
gradients, and a part of the float32 weights and of what the optimizer keeps: once an update they add up their
gradients, and tell each other the weights that they updated. Between updates no rank waits for another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Piece:
    """Parameters of one kind end to end.

    weights: [N] bfloat16; gradient: [N] float32, empty where nothing trains; master: [n] float32, this rank's part from
    `first` on, whose gradient is that part of `gradient`.
    """

    names: list[str]
    weights: Tensor
    gradient: Tensor
    master: nn.Parameter
    first: int
    ranges: list[tuple[int, torch.Size]]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Returns parts of [N], one for each parameter."""
        return [flat[start : start + math.prod(shape)].view(shape) for start, shape in self.ranges]

    @property
    def rank_weights(self) -> Tensor:
        """[n] of `weights`."""
        return self.weights[self.first : self.first + len(self.master)]


class MasterWeights:
    """Takes the place of the memory of all float32 parameters of `model`. Others have no master copy: they never train.

    With several ranks every method that says so is collective, in the default group.
    """

    def __init__(self, model: nn.Module, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        named = [(name, p) for name, p in model.named_parameters() if p.dtype == torch.float32]
        device = next(model.parameters()).device
        trained = [(name, p) for name, p in named if p.requires_grad]
        self.matrices = _flatten([(name, p) for name, p in trained if p.ndim >= 2], rank, ranks, device)
        self.vectors = _flatten([(name, p) for name, p in trained if p.ndim < 2], rank, ranks, device)
        # Weights that do not train are saved as they were read, by each rank.
        self.fixed = _flatten([(name, p) for name, p in named if not p.requires_grad], 0, 1, device, trains=False)
        self.parameters = [p for _, p in trained if p.ndim >= 2] + [p for _, p in trained if p.ndim < 2]
        self.gradients = [view for piece in self.trained for view in piece.views(piece.gradient)]
        self._places = {
            name: (piece, start, shape)
            for piece in (*self.trained, self.fixed)
            for name, (start, shape) in zip(piece.names, piece.ranges, strict=True)
        }

    @property
    def trained(self) -> list[Piece]:
        return [self.matrices, self.vectors]

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def of(self, name: str) -> Tensor:
        """Returns the float32 weights of a parameter, whole. Collective."""
        return self.whole(name, lambda piece: piece.master.data)

    def piece_of(self, name: str) -> Piece:
        return self._places[name][0]

    def size(self, name: str) -> int:
        return math.prod(self._places[name][2])

    def whole(self, name: str, part: Callable[[Piece], Tensor]) -> Tensor:
        """Gathers a parameter whole from the parts [n] that `part` gives of this rank's memory. Collective."""
        piece, start, shape = self._places[name]
        flat, end = part(piece), start + math.prod(shape)
        if self.ranks == 1 or piece is self.fixed:
            return flat[start:end].view(shape)
        gathered = flat.new_empty(end - start)
        for owner, low, high in self._owners(piece, start, end):
            # Parts of a parameter lie on as many ranks as it takes, each of which knows its own.
            of_owner = gathered[low - start : high - start]
            if owner == self.rank:
                of_owner.copy_(flat[low - piece.first : high - piece.first])
            dist.broadcast(of_owner, owner)
        return gathered.view(shape)

    def put(self, name: str, part: Callable[[Piece], Tensor], values: Tensor) -> None:
        """Writes this rank's part of the whole `values` of a parameter to `part`'s [n]."""
        piece, start, shape = self._places[name]
        flat, end = part(piece), start + math.prod(shape)
        low, high = max(start, piece.first), min(end, piece.first + len(piece.master))
        if low < high:
            flat[low - piece.first : high - piece.first].copy_(values.reshape(-1)[low - start : high - start])

    def _owners(self, piece: Piece, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        size = len(piece.master)
        for owner in range(start // size, -(-end // size)) if end > start else ():
            yield owner, max(start, owner * size), min(end, (owner + 1) * size)

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Adds up the gradients of `parameters`, one each."""
        pairs = [(into, g) for into, g in zip(self.gradients, gradients, strict=True) if g is not None]
        torch._foreach_add_([into for into, _ in pairs], [g for _, g in pairs])

    def sum_gradients(self) -> None:
        """Sets `master.grad` of every piece to the sum over ranks. Collective; called once per update."""
        for piece in self.trained if self.ranks > 1 else ():
            assert piece.master.grad is not None
            if len(piece.gradient):
                dist.reduce_scatter_tensor(piece.master.grad, piece.gradient)

    def norm(self, rank_norm: Tensor) -> Tensor:
        """Returns the norm over all ranks of gradients whose norm is `rank_norm` on this one. Collective."""
        if self.ranks == 1:
            return rank_norm
        total = rank_norm.square()
        dist.all_reduce(total)
        return total.sqrt()

    def clear_gradients(self) -> None:
        for piece in self.trained:
            piece.gradient.zero_()

    @torch.no_grad()
    def write_weights(self) -> None:
        """Copies the updated master weights into those that the model computes with. Collective."""
        for piece in self.trained:
            piece.rank_weights.copy_(piece.master)
            if self.ranks > 1 and len(piece.weights):
                dist.all_gather_into_tensor(piece.weights, piece.rank_weights)

    def tensors(self) -> Iterator[Tensor]:
        """Yields tensors that training needs besides the weights and gradients."""
        for piece in (*self.trained, self.fixed):
            yield piece.master.data


def _flatten(
    named: list[tuple[str, nn.Parameter]], rank: int, ranks: int, device: torch.device, *, trains: bool = True
) -> Piece:
    ranges: list[tuple[int, torch.Size]] = []
    filled = 0
    for _, parameter in named:
        ranges.append((filled, parameter.shape))
        filled += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    unit = ranks * _ALIGNMENT
    filled = -(-filled // unit) * unit
    size = filled // ranks
    first = rank * size
    # Zeros between parameters have no gradient, and no weight decay moves them.
    master = nn.Parameter(torch.zeros(size, dtype=torch.float32, device=device), requires_grad=trains)
    gradient = torch.zeros(filled if trains else 0, dtype=torch.float32, device=device)
    if trains:
        master.grad = gradient[first : first + size]
    weights = torch.zeros(filled, dtype=torch.bfloat16, device=device)
    piece = Piece([name for name, _ in named], weights, gradient, master, first, ranges)
    with torch.no_grad():
        for (_, parameter), (start, _), view in zip(named, ranges, piece.views(weights), strict=True):
            low, high = max(start, first), min(start + parameter.numel(), first + size)
            if low < high:
                master[low - first : high - first].copy_(parameter.reshape(-1)[low - start : high - start])
            view.copy_(parameter)
            parameter.data = view
    return piece
