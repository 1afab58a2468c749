"""What a step needs of a model, wherever and however sharded it lives."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from slime.trainer.batching.packing import PackedBatch
from slime.types.errors import SlimeError


class NonFiniteGradient(SlimeError):
    """The gradient norm is infinite or not a number; the weights were left as they are."""


NamedTensors = Iterator[tuple[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Per response token, [K] float32; 0 where the loss mask is."""

    log_probs: Tensor
    # None unless asked for; carries a gradient only where that was asked for.
    entropy: Tensor | None


LossFunction = Callable[[PackedBatch, Outputs], Tensor]


class Backend(abc.ABC):
    """A policy, maybe a reference model, and an optimizer. All ranks call every method, in one order."""

    name: str
    device: torch.device
    num_parameters: int
    vocab_size: int
    hidden_size: int
    # Optimizer updates done, those of the checkpoint that was loaded included.
    updates: int
    # Whether the attention of this model can lay a prompt out once for several responses.
    can_share_prompts: bool

    @abc.abstractmethod
    def log_probs(self, batch: PackedBatch | None, *, reference: bool = False) -> Tensor | None:
        """[K] without gradient, of the policy or the reference model. None in, None out: this rank has no samples."""

    @abc.abstractmethod
    def forward_backward(self, batch: PackedBatch | None, loss: LossFunction, *, entropy: str = "none") -> None:
        """Adds the gradient of `loss(batch, outputs)` (a scalar) to what is there; those of ranks are added up.

        entropy: "none", "value" (no gradient) or "gradient".
        """

    @abc.abstractmethod
    def optimizer_step(self) -> tuple[float, float]:
        """(gradient norm before clipping, learning rate used); clears the gradients and advances the schedule.

        Raises NonFiniteGradient, on every rank alike.
        """

    @abc.abstractmethod
    def named_weights(self) -> NamedTensors:
        """Every weight once, whole, float32, by its Hugging Face name, one at a time; a tied one by its first name."""

    @abc.abstractmethod
    def weight_sizes(self) -> dict[str, int]:
        """Number of elements of every weight, in the order of `named_weights`."""

    @abc.abstractmethod
    def optimizer_state(self) -> NamedTensors:
        """Whole optimizer tensors, "exp_avg.NAME" and so on, one at a time; nothing before the first update."""

    @abc.abstractmethod
    def optimizer_sizes(self) -> dict[str, int]:
        """Number of elements of what `optimizer_state` gives, in its order."""

    @abc.abstractmethod
    def load_optimizer_state(self, read: Callable[[str], Tensor], updates: int) -> None:
        """Restores what `optimizer_state` gave; `read` finds a tensor by name. updates: those done so far."""
