"""The data of an iteration as plug-ins see and change it: dictionaries of lists with one entry for each sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slime.trainer.batching.packing import PackedBatch
from slime.types.errors import InvalidField, PluginError, counted
from slime.types.sample import Sample

if TYPE_CHECKING:
    from slime.trainer.step.loss import Targets
    from slime.trainer.step.targets import Work

ADVANTAGES_FLAG = "--custom-advantage-function-path"
# Name in the dictionary -> attribute: tensors [R] of each sample, which a plug-in may replace or change in place.
OF_TARGETS = {
    "advantages": "advantages", "returns": "returns", "log_probs": "old_log_probs", "ref_log_probs": "ref_log_probs",
    "entropy": "entropy", "values": "values", "teacher_log_probs": "teacher_log_probs",
}  # fmt: skip
OF_BATCH = {"loss_masks": "mask", "rollout_log_probs": "rollout_log_probs"}
# Lists beside these, which a plug-in only reads.
ABOUT = ("rewards", "response_lengths", "total_lengths", "sample_positions", "tokens", "sample_indices")


def as_lists(batch: PackedBatch, targets: Targets | None) -> dict[str, Any]:
    """Returns a micro-batch as a dictionary; None in place of a list that was not computed."""

    def split(values: Tensor | None) -> list[Tensor] | None:
        return None if values is None or len(values) != len(batch.mask) else list(values.clone().split(batch.lengths))

    data: dict[str, Any] = {name: split(getattr(targets, field, None)) for name, field in OF_TARGETS.items()}
    data |= {name: split(getattr(batch, field)) for name, field in OF_BATCH.items()}
    return data | {
        "rewards": batch.rewards.tolist(), "response_lengths": batch.lengths, "total_lengths": batch.total_lengths,
        "sample_positions": batch.positions,
    }  # fmt: skip


def set_advantages(
    function: Callable[..., Any],
    args: Any,
    path: str | None,
    batch: PackedBatch,
    targets: Targets,
    samples: Sequence[Sample],
    kl: Tensor,
) -> None:
    """Calls `function(args, rollout_data)` with a micro-batch and reads its advantages, and with a critic its returns.

    samples: of the micro-batch. kl: [K]. Tokens that do not train may have any value; one that is not finite becomes 0.
    Raises PluginError, naming the flag, its `path` and the sample, for another number of values and for trained tokens
    whose value is not finite.
    """
    data = as_lists(batch, targets) | {"kl": list(kl.split(batch.lengths))}
    function(args, data)

    def read(name: str) -> Tensor:
        lists = data.get(name)
        entries = list(lists) if isinstance(lists, Iterable) else None
        if entries is None or len(entries) != len(samples):
            got = f"is {lists!r}" if entries is None else f"has length {len(entries)}"
            raise error(f"rollout_data[{name!r}] {got}", f"an entry for each of {counted(len(samples), 'sample')}")
        return torch.cat([of_sample(name, number, values) for number, values in enumerate(entries)])

    def of_sample(name: str, number: int, values: Any) -> Tensor:
        length, mask = batch.lengths[number], batch.mask.split(batch.lengths)[number]
        sample = f"rollout_data[{name!r}][{number}] (sample {samples[number].index})"
        expected = f"a finite number for each of {counted(length, 'response token')}"
        try:
            found = torch.as_tensor(values).to(mask)
        except (TypeError, ValueError, RuntimeError):
            raise error(f"{sample} is a {type(values).__name__}", expected) from None
        if list(found.shape) != [length]:
            raise error(f"{sample} has shape {list(found.shape)}", expected)
        broken = ~found.isfinite()
        if bool((broken & (mask != 0)).any()):
            token = int((broken & (mask != 0)).nonzero()[0])
            raise error(f"{sample} is {float(found[token])} at response token {token}", expected)
        return found.masked_fill(broken, 0.0)

    def error(problem: str, expected: str) -> PluginError:
        message = f"{ADVANTAGES_FLAG} {path}: {problem}, expected {expected}"
        return PluginError(message, field=ADVANTAGES_FLAG, value=path, expected=expected)

    targets.advantages = read("advantages")
    if targets.values is not None and data.get("returns") is not None:
        targets.returns = read("returns")
    else:
        targets.returns = targets.advantages if targets.values is None else targets.advantages + targets.values


def postprocess(function: Callable[..., Any], args: Any, rollout: int, updates: list[Work]) -> None:
    """Calls `function(args, rollout, rollout_data)` with all samples of this rank's replica, in all updates.

    The lists of OF_TARGETS and OF_BATCH are trained on as the function leaves them. A loss mask can lose tokens and
    gain none; the divisor of a trajectory's mean stays. Numbers of tokens without may be anything. Raises InvalidField
    for lists of another form.
    """
    places = [(work, i) for work in updates for i, batch in enumerate(work.batches) if batch is not None]
    # A replica may have no sample, where there are fewer than replicas: the plug-in finds lists all the same.
    data: dict[str, Any] = {name: [] for name in (*OF_TARGETS, *OF_BATCH, *ABOUT)}
    parts: dict[str, list[Any]] = {}
    for work, i in places:
        batch, targets = work.batches[i], work.target(i)
        assert batch is not None and targets is not None
        samples = [work.samples[position] for position in batch.positions]
        part = as_lists(batch, targets) | {
            "tokens": [torch.as_tensor(sample.array("tokens")) for sample in samples],
            "sample_indices": [sample.index for sample in samples],
        }
        for name, values in part.items():
            parts.setdefault(name, []).append(values)
    for name, lists in parts.items():
        data[name] = None if all(values is None for values in lists) else _without_gaps(lists, places)
    function(args, rollout, data)
    first = 0
    for work, i in places:
        batch, targets = work.batches[i], work.target(i)
        assert batch is not None and targets is not None
        chosen = slice(first, first + batch.num_samples)
        first = chosen.stop
        changed: dict[str, Any] = {field: _joined(name, data, chosen, batch) for name, field in OF_BATCH.items()}
        mask = changed["mask"]
        if mask is None or bool(((mask != 0) & (batch.mask == 0)).any()):
            raise InvalidField(
                "loss_masks", None if mask is None else "a token more", "masks without tokens that were not trained"
            )
        for name, field in OF_TARGETS.items():
            values = _joined(name, data, chosen, batch)
            # A gradient of 0 times NaN is NaN: a token that was masked must not keep the numbers it was masked for.
            setattr(targets, field, values if values is None else values.where(values.isfinite() | (mask != 0), 0.0))
        work.batches[i] = dataclasses.replace(batch, weights=batch.weights * mask, **changed)


def _without_gaps(lists: list[list[Any] | None], places: list[tuple[Work, int]]) -> list[Any]:
    """Returns the entries of all micro-batches; NaN for each token where one has none."""
    found: list[Any] = []
    for values, (work, i) in zip(lists, places, strict=True):
        batch = work.batches[i]
        assert batch is not None
        found += torch.full_like(batch.mask, torch.nan).split(batch.lengths) if values is None else values
    return found


def _joined(name: str, data: dict[str, Any], chosen: slice, batch: PackedBatch) -> Tensor | None:
    if data.get(name) is None:
        return None
    parts = [torch.as_tensor(values).to(batch.mask) for values in data[name][chosen]]
    lengths = [len(part) for part in parts]
    if lengths != batch.lengths:
        raise InvalidField(
            f"rollout_data[{name!r}]", lengths, f"a number for each response token: {batch.lengths} of these samples"
        )
    return torch.cat(parts)
