"""Describes which tokens of a packed row see which: runs of queries, each with the keys that its last query sees."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from slime.trainer.process.moving import to_device


@dataclasses.dataclass(frozen=True)
class SharedPrompts:
    """Prompts at the start of a row, and the responses that see them, which follow the last prompt in the prompts'
    order.

    q_limits: [prompts + 1] int32, where the responses of each prompt start, and the end.
    k_limits: [prompts + 1] int32, the same for the prompts.
    max_q, max_k: bounds on their lengths, as in Runs.
    """

    q_limits: Tensor
    k_limits: Tensor
    max_q: int
    max_k: int


class Operands(NamedTuple):
    """Tensors that attention reads. numbers: [6] int64 on the CPU: the longest run of queries and of keys, whether the
    row is padded to a shape, whether prompts are shared, the most responses of a prompt in tokens, and the longest
    prompt."""

    q_limits: Tensor
    k_limits: Tensor
    shared_q_limits: Tensor
    shared_k_limits: Tensor
    numbers: Tensor


class RunShape(NamedTuple):
    """Runs with as many queries and as many keys each, those of a shared prompt included."""

    runs: int
    queries: int
    keys: int


class RunsByShape(NamedTuple):
    """The runs of a row, those of one shape after each other.

    queries [T], keys [sum over runs]: int64, the tokens of the row in that order; back [T]: undoes that of the queries.
    None: the tokens in order.
    """

    shapes: list[RunShape]
    queries: Tensor | None
    keys: Tensor | None
    back: Tensor | None


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of consecutive queries, each with all keys up to the last query's own: both end at the same token.

    q_lengths, k_lengths: of each run; empty if only the limits are known.
    q_limits, k_limits: [runs + 1] int32, where each starts, and the end.
    keys: [sum of k_lengths] int64, the tokens whose keys the runs see; None for all tokens in order.
    max_q, max_k: at least the longest of each.
    shared: prompts that responses see besides their own run; None if there are none.
    one_length: True for the length of rows that compiled layers have kernels of its own for; others share theirs.
    padded: True for rows of few shapes, whose runs are all of their tokens.
    operands: what compiled layers read. Numbers are in a tensor on the CPU, because layers are compiled again for a new
    value of an attribute; and rows have limits of prompts also where none is shared.
    """

    q_lengths: list[int]
    k_lengths: list[int]
    q_limits: Tensor
    k_limits: Tensor
    keys: Tensor | None
    max_q: int
    max_k: int
    shared: SharedPrompts | None = None
    one_length: bool = False
    padded: bool = False
    # Not a field: a copy with other tensors, as FSDP2 makes, has to compute its own.
    operands: ClassVar[Operands]

    def __post_init__(self) -> None:
        numbers = [self.max_q, self.max_k, int(self.padded), 0, 0, 0]
        # Tensors of their own: layers are compiled again where the same one comes twice.
        shared_q, shared_k = torch.zeros_like(self.q_limits[:2]), torch.zeros_like(self.q_limits[:2])
        if self.shared is not None:
            numbers[3:] = 1, self.shared.max_q, self.shared.max_k
            shared_q, shared_k = self.shared.q_limits, self.shared.k_limits
        operands = Operands(self.q_limits, self.k_limits, shared_q, shared_k, torch.tensor(numbers))
        for tensor in (*operands[:4], *(() if self.keys is None else (self.keys,))):
            varies(tensor, 0)
        object.__setattr__(self, "operands", operands)

    @staticmethod
    def apart(lengths: Sequence[int], device: torch.device | str) -> Runs:
        """Makes the runs of consecutive sequences that do not see each other."""
        held = [length for length in lengths if length]
        limits = _limits(held, device)
        longest = max(held, default=1)
        return Runs(held, held, limits, limits, None, longest, longest)

    @staticmethod
    def gathered(lengths: Sequence[int], keys: Sequence[np.ndarray], device: torch.device | str) -> Runs:
        """Makes runs whose keys are gathered. keys: for each run the tokens that it sees, [k] int64."""
        k_lengths = [len(seen) for seen in keys]
        index = to_device(torch.from_numpy(np.concatenate(keys)), device)
        return Runs(
            list(lengths), k_lengths, _limits(lengths, device), _limits(k_lengths, device), index,
            max(lengths), max(k_lengths),
        )  # fmt: skip

    @staticmethod
    def sharing(
        prompts: Sequence[int],
        responses: Sequence[Sequence[int]],
        alone: Sequence[int],
        device: torch.device | str,
    ) -> Runs:
        """Makes the runs of prompts, of their responses in the same order, and of sequences that see only themselves.

        Every argument holds lengths; responses: one list per prompt.
        """
        apart = Runs.apart([*prompts, *itertools.chain.from_iterable(responses), *alone], device)
        of_prompts = [sum(lengths) for lengths in responses]
        shared = SharedPrompts(
            _limits(of_prompts, device, first=sum(prompts)), _limits(prompts, device),
            max(of_prompts), max(prompts),
        )  # fmt: skip
        return dataclasses.replace(apart, shared=shared)

    def prompts(self) -> list[range]:
        """Returns the tokens that each run sees besides itself. Reading the limits waits for the GPU."""
        lengths = self.q_lengths or self.q_limits.diff().tolist()
        if self.shared is None:
            return [range(0)] * len(lengths)
        responses, starts = self.shared.q_limits.tolist(), self.shared.k_limits.tolist()
        found = []
        for start in itertools.accumulate(lengths[:-1], initial=0):
            inside = responses[0] <= start < responses[-1]
            prompt = bisect.bisect_right(responses, start) - 1
            found.append(range(starts[prompt], starts[prompt + 1]) if inside else range(0))
        return found

    @functools.cached_property
    def by_shape(self) -> RunsByShape:
        """Sorts the runs by their shapes. Reading the limits waits for the GPU."""
        lengths = self.q_lengths or self.q_limits.diff().tolist()
        k_lengths = self.k_lengths or self.k_limits.diff().tolist()
        starts, k_starts = (itertools.accumulate(each, initial=0) for each in (lengths, k_lengths))
        found: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
        for start, length, k_start, held, prompt in zip(
            starts, lengths, k_starts, k_lengths, self.prompts(), strict=False
        ):
            if length:
                seen = np.concatenate([np.array(prompt, dtype=np.int64), np.arange(k_start, k_start + held)])
                found.setdefault((length, len(seen)), []).append((np.arange(start, start + length), seen))
        shapes = [RunShape(len(same), *shape) for shape, same in found.items()]
        queries, keys = (
            np.concatenate([run[part] for same in found.values() for run in same] or [np.arange(0)]) for part in (0, 1)
        )
        if self.keys is not None:
            keys = self.keys.cpu().numpy()[keys]
        return RunsByShape(
            shapes, *(_index(each, self.q_limits.device) for each in (queries, keys, np.argsort(queries)))
        )


def _index(tokens: np.ndarray, device: torch.device) -> Tensor | None:
    in_order = np.array_equal(tokens, np.arange(len(tokens)))
    return None if in_order else to_device(torch.from_numpy(tokens), device)


def varies(tensor: Tensor, dim: int) -> Tensor:
    """Returns `tensor`, marked so that torch.compile takes any length of `dim` from the start."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


def notch(number: int) -> int:
    """Rounds up to four numbers between powers of two: 1,024, 1,280, 1,536, 1,792, 2,048."""
    step = 1 << max(0, (number - 1).bit_length() - 3)
    return -(-number // step) * step


def _limits(lengths: Sequence[int], device: torch.device | str, first: int = 0) -> Tensor:
    return to_device(torch.tensor([*itertools.accumulate(lengths, initial=first)], dtype=torch.int32), device)
