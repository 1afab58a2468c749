"""Bfloat16 weights that a float32 master copy is behind: flat memory, one for matrices and one for vectors.

    N  numbers of a flat piece of memory; every parameter starts at a multiple of 64 of them

The model computes with views of bfloat16 memory, gradients are added up in float32 memory, and AdamW updates the
float32 weights in one kernel, from which one more writes the bfloat16 ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Piece:
    """Parameters of one kind end to end. weights: [N] bfloat16; master: [N] float32, its gradient in `master.grad`."""

    names: list[str]
    weights: Tensor
    master: nn.Parameter
    ranges: list[tuple[int, torch.Size]]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Parts of [N], one for each parameter."""
        return [flat[start : start + math.prod(shape)].view(shape) for start, shape in self.ranges]


class MasterWeights:
    """Takes the place of the memory of all floating-point parameters of `model`, which are float32 before."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]
        trained = [(name, p) for name, p in named if p.requires_grad]
        self.matrices = _flatten([(name, p) for name, p in trained if p.ndim >= 2])
        self.vectors = _flatten([(name, p) for name, p in trained if p.ndim < 2])
        # Weights that do not train are saved as they were read.
        self.fixed = _flatten([(name, p) for name, p in named if not p.requires_grad])
        self.fixed.master.requires_grad_(False)
        self.parameters = [p for _, p in trained if p.ndim >= 2] + [p for _, p in trained if p.ndim < 2]
        for piece in self.trained:
            piece.master.grad = torch.zeros_like(piece.master)
        self.gradients = [view for piece in self.trained for view in piece.views(_gradient(piece))]
        self._masters = {
            name: view
            for piece in self._pieces
            for name, view in zip(piece.names, piece.views(piece.master.data), strict=True)
        }

    @property
    def _pieces(self) -> list[Piece]:
        return [self.matrices, self.vectors, self.fixed]

    @property
    def trained(self) -> list[Piece]:
        return [self.matrices, self.vectors]

    def of(self, name: str) -> Tensor | None:
        """The float32 weights of a parameter; None for what has none."""
        return self._masters.get(name)

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """gradients: of `parameters`, one each."""
        pairs = [(into, g) for into, g in zip(self.gradients, gradients, strict=True) if g is not None]
        torch._foreach_add_([into for into, _ in pairs], [g for _, g in pairs])

    def clear_gradients(self) -> None:
        for piece in self.trained:
            _gradient(piece).zero_()

    @torch.no_grad()
    def write_weights(self) -> None:
        """Copies the updated master weights into those that the model computes with."""
        for piece in self.trained:
            piece.weights.copy_(piece.master)

    def tensors(self) -> Iterator[Tensor]:
        """Tensors that training needs besides the weights."""
        for piece in self._pieces:
            yield piece.master.data


def _gradient(piece: Piece) -> Tensor:
    assert piece.master.grad is not None
    return piece.master.grad


def _flatten(named: list[tuple[str, nn.Parameter]]) -> Piece:
    ranges: list[tuple[int, torch.Size]] = []
    filled = 0
    for _, parameter in named:
        ranges.append((filled, parameter.shape))
        filled += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    device = named[0][1].device if named else torch.device("cpu")
    # Zeros between parameters have no gradient, and no weight decay moves them.
    master = nn.Parameter(torch.zeros(filled, dtype=torch.float32, device=device))
    piece = Piece([name for name, _ in named], torch.zeros(filled, dtype=torch.bfloat16, device=device), master, ranges)
    with torch.no_grad():
        for (_, parameter), whole, own in zip(named, piece.views(master.data), piece.views(piece.weights), strict=True):
            whole.copy_(parameter)
            own.copy_(parameter)
            parameter.data = own
    return piece
