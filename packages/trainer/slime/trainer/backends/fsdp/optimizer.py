"""AdamW over the policy's parameters, or over the flat float32 memory behind bfloat16 ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from slime.trainer.backends.fsdp.master import MasterWeights, Piece
from slime.trainer.backends.snapshots import local
from slime.trainer.settings.trainer import TrainerSettings

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True)
class AdamWStep:
    """Numbers of one update. clip: largest norm of the gradient; 0 turns clipping off."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float


class PolicyOptimizer:
    """Matrices are decayed, vectors (norms, biases) are not. The learning rate is set before every update."""

    def __init__(self, model: nn.Module, settings: TrainerSettings, master: MasterWeights | None) -> None:
        self._master = master
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if master is None:
            matrices = [p for _, p in self._named if p.ndim >= 2]
            vectors = [p for _, p in self._named if p.ndim < 2]
        else:
            matrices, vectors = [master.matrices.master], [master.vectors.master]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay, "decays": True},
            {"params": vectors, "weight_decay": 0.0, "decays": False},
        ]
        betas = (settings.adam_beta1, settings.adam_beta2)
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=settings.lr, betas=betas, eps=settings.adam_eps, fused=True
        )
        self._stepped = matrices + vectors

    def configure(self, step: AdamWStep) -> None:
        """Sets what the next updates are made with; the learning rate and the limit of the norm come with each."""
        for group in self._adamw.param_groups:
            group["betas"], group["eps"] = (step.beta1, step.beta2), step.eps
            group["weight_decay"] = step.weight_decay if group["decays"] else 0.0

    def gradient_norm(self) -> Tensor:
        """Adds up the gradients of all ranks and returns their norm, float32 []. Collective; once an update."""
        for parameter in self._stepped:
            # An update without any gradient still moves weights by its momentum, on every rank alike.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._master is not None:
            self._master.sum_gradients()
        norm = nn.utils.get_total_norm([p.grad for p in self._stepped if p.grad is not None])
        if self._master is not None:
            return self._master.norm(norm)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name of each parameter and this rank's part of its gradient."""
        if self._master is None:
            yield from ((name, local(p.grad)) for name, p in self._named if p.grad is not None)
        else:
            names = [name for piece in self._master.trained for name in piece.names]
            yield from zip(names, self._master.gradients, strict=True)

    def clip(self, limit: float, norm: Tensor) -> None:
        nn.utils.clip_grads_with_norm_(self._stepped, limit, norm)

    def step(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        if self._master is not None:
            self._master.write_weights()

    def clear_gradients(self) -> None:
        if self._master is not None:
            self._master.clear_gradients()
        else:
            self._adamw.zero_grad(set_to_none=True)

    def reset(self) -> None:
        # In place: a fresh state would be the same numbers in other memory.
        with torch.no_grad():
            for state in self._adamw.state.values():
                for value in state.values():
                    value.zero_()

    def device_tensors(self) -> Iterator[tuple[Tensor, bool]]:
        """This rank's parts of what training needs besides the weights, and whether the values matter between steps."""
        for parameter in self._stepped:
            if parameter.grad is not None:
                # All zeros between updates.
                yield local(parameter.grad), False
        for state in self._adamw.state.values():
            yield from ((local(value), True) for value in state.values() if isinstance(value, Tensor))
        if self._master is not None:
            yield from ((tensor, True) for tensor in self._master.tensors())

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yields moments by their names in checkpoints, none before an update. Collective where ranks have parts."""
        master = self._master
        for name, parameter in self._with_state():
            for moment in _MOMENTS:
                if master is None:
                    yield f"{moment}.{name}", self._adamw.state[parameter][moment]
                else:
                    yield f"{moment}.{name}", master.whole(name, functools.partial(self._of_piece, moment))

    def sizes(self) -> dict[str, int]:
        return {f"{moment}.{name}": p.numel() for name, p in self._with_state() for moment in _MOMENTS}

    def _of_piece(self, moment: str, piece: Piece) -> Tensor:
        found: Tensor = self._adamw.state[piece.master][moment]
        return found

    def _with_state(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._named:
            stepped = parameter if self._master is None else self._master.piece_of(name).master
            if self._adamw.state.get(stepped):
                yield name, parameter

    def load(self, read: Callable[[str], Tensor], updates: int) -> None:
        """Restores the moments. read: a moment by the name that it has in `moments`; updates: that they have seen."""
        # AdamW counts updates per parameter, in float32 beside it when fused.
        for parameter in self._stepped:
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(updates), device=local(parameter).device),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }
        with torch.no_grad():
            for name, parameter in self._named:
                for moment in _MOMENTS:
                    values = read(f"{moment}.{name}")
                    if self._master is not None:
                        self._master.put(name, functools.partial(self._of_piece, moment), values)
                    else:
                        state = self._adamw.state[parameter][moment]
                        state.copy_(_like(values, state))


def _like(whole: Tensor, part: Tensor) -> Tensor:
    if not hasattr(part, "device_mesh"):
        return whole.to(part.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(part.device), part.device_mesh, part.placements)
