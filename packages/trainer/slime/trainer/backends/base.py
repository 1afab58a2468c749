"""The interface of backends: a model, its reference and its optimizer, however they are sharded."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from slime.trainer.backends.routing import RoutingReplay
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.checkpoints.adapter import Adapter
from slime.trainer.checkpoints.hf_directory import NamedTensors
from slime.types.errors import SlimeError
from slime.types.models.experts import Experts
from slime.types.models.vision import Vision


class NonFiniteGradient(SlimeError):
    """The gradient norm is infinite or not a number; weights and optimizer were left as they are.

    parameters: names of the parameters with such a gradient on this rank; cause: a sentence for the message.
    """

    def __init__(self, update: int, norm: float, parameters: Sequence[str] = (), cause: str = "") -> None:
        message = f"update {update}: the gradient norm is {norm}" + (f": {cause}" if cause else "")
        super().__init__(message, field="grad_norm", value=norm)
        self.update, self.norm, self.parameters = update, norm, list(parameters)


# Names of weights: those that train, those of the reference model, and those of the model to distil from.
POLICY = ""
REFERENCE = "ref"
TEACHER = "teacher"


# Parts of a rank's memory: the weights, which are sent to engines, and what only training needs besides.
WEIGHTS = "weights"
TRAINING = "training"


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Outputs per response token, [K] float32; 0 where the loss mask is 0."""

    # Empty for a critic.
    log_probs: Tensor
    # None unless it was requested; has a gradient only if that was requested too.
    entropy: Tensor | None
    # [J, V] at the tokens with loss mask 1, before the temperature; None unless requested.
    logits: Tensor | None = None
    # A critic's only output.
    values: Tensor | None = None


# (number of the micro-batch, its rows, the model's outputs for them) -> scalar.
LossFunction = Callable[[int, PackedBatch, Outputs], Tensor]
# One micro-batch; None on a rank that has none left and only takes part in the collective calls of the others.
MaybeBatch = PackedBatch | None


class Backend(abc.ABC):
    """A policy, maybe a reference model, and an optimizer. All ranks call every method, in one order."""

    name: str
    device: torch.device
    num_parameters: int
    vocab_size: int
    hidden_size: int
    # Optimizer updates done, those of the checkpoint that was loaded included.
    updates: int
    # The number of them that the optimizer's moments have seen, by which AdamW corrects their bias: fewer after
    # `reset_optimizer`, or where the checkpoint had no moments.
    moment_updates: int = 0
    # True if the attention of this model can lay a prompt out once for several responses.
    can_share_prompts: bool
    # True if its attention needs a copy of the keys of such a prompt for each response.
    gathers_keys: bool = False
    # The ranks that hold one copy of the model together are a replica; replicas train on different samples.
    replica: int
    replicas: int
    # True on one rank of each replica; sums over ranks count the values of those.
    leads_replica: bool
    # True if samples without a gradient of the policy's loss change the update: routers balance their load, and
    # multi-token-prediction layers learn, by every token that they see.
    needs_every_sample: bool = False
    # The shape of the engine's choice of experts, where it is replayed.
    replayed_experts: Experts | None = None
    # Replays the experts of the policy; None where each pass chooses by itself.
    routing: RoutingReplay | None = None
    # Joins the images of samples for the model; None if it reads text alone.
    vision: Vision | None = None
    # A replica's number of micro-batches has to be a multiple of this.
    micro_batch_multiple: int = 1
    # Rows have to be packed to a multiple of this.
    row_multiple: int = 1

    @abc.abstractmethod
    def scores(self, batches: Sequence[MaybeBatch], *, of: str = POLICY, entropy: bool = False) -> list[Outputs | None]:
        """Computes outputs without gradient, on every rank of the replica; None in, None out.

        of: POLICY, REFERENCE, TEACHER or a name given to `keep`. Raises WrongState where there are no such weights.
        """

    def log_probs(self, batches: Sequence[MaybeBatch], *, reference: bool = False) -> list[Tensor | None]:
        """[K] each, without gradient, of the policy or the reference model, on every rank of the replica."""
        found = self.scores(batches, of=REFERENCE if reference else POLICY)
        return [None if outputs is None else outputs.log_probs for outputs in found]

    @abc.abstractmethod
    def keep(self, name: str) -> None:
        """Remembers the policy in host memory as `name`, for `scores`; REFERENCE replaces the reference model."""

    @abc.abstractmethod
    def drop(self, name: str) -> None:
        """Forgets what `keep` remembered."""

    @abc.abstractmethod
    def reset_optimizer(self) -> None:
        """Resets moments and their step count to those of a new optimizer; `updates` stays."""

    @abc.abstractmethod
    def device_tensors(self, part: str) -> Iterator[tuple[Tensor, bool]]:
        """Yields the tensors of the part WEIGHTS or TRAINING of this rank's memory, each with whether its values matter
        now.

        Called between steps only. A tensor may be in both, and several may share their memory.
        """

    @property
    def only_updates_read_training(self) -> bool:
        """True if only `optimizer_step` and `reset_optimizer` read those values of TRAINING that matter."""
        return False

    def memory_stays(self, stays: bool) -> None:
        """Called when it changes whether the memory of `device_tensors` stays in place between steps."""
        return None

    def begin_update(self, step: int, update: int) -> None:
        """Called before the forward passes of update number `update` of step `step`."""
        return None

    @abc.abstractmethod
    def forward_backward(
        self, batches: Sequence[MaybeBatch], loss: LossFunction, *, entropy: str = "none", logits: bool = False
    ) -> None:
        """Adds the gradient of the sum of `loss(i, batches[i], outputs)` to the gradients, summed over replicas.

        `loss` is called on the ranks that have the outputs; the rank that leads the replica is one of them.
        entropy: "none", "value" (no gradient) or "gradient".
        logits: whether the outputs have them, with a gradient. Raises NotAvailable where no rank has them whole.
        """

    def model_losses(self) -> dict[str, float]:
        """Returns the losses that the model added by itself in the last `forward_backward`, by name, the same on every
        rank."""
        return {}

    @abc.abstractmethod
    def optimizer_step(self) -> tuple[float, float]:
        """Returns (gradient norm before clipping, learning rate used); clears the gradients and advances the schedule.

        Raises NonFiniteGradient, on every rank alike.
        """

    @abc.abstractmethod
    def named_weights(self, *, dtype: torch.dtype | None = None, everywhere: bool = False) -> NamedTensors:
        """Yields every weight once, whole, by its Hugging Face name, one at a time; a tied one by its first name.

        Tensors are on the device of the model. Floating-point ones have `dtype`, also on their way between ranks, or
        without it float32 or the type that the model keeps. Unless `everywhere`, ranks other than the first may get an
        empty tensor in place of a weight.
        """

    def parts_of_weights(self, dtype: torch.dtype | None = None) -> tuple[str, ...]:
        """Returns the parts of the memory that `named_weights(dtype=dtype)` reads."""
        return (WEIGHTS,)

    def weights_stay(self, dtype: torch.dtype) -> bool:
        """Tells whether `named_weights(dtype=dtype, everywhere=True)` gives parts of memory that stays until the next
        update, not copies."""
        return False

    def adapter(self) -> Adapter | None:
        """Returns the LoRA adapter that `named_weights` merges; None where all weights train. Collective like that."""
        return None

    def untrained_weights(self) -> list[str]:
        """Names tensors that a checkpoint of the model may have and this one does not: layers that do not train."""
        return []

    @abc.abstractmethod
    def weight_sizes(self) -> dict[str, int]:
        """Returns the number of elements of every weight, in the order of `named_weights`."""
