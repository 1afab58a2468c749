"""Packs data into rows of the trainer: each token predicts its target, and prompts that data share are computed once.

    N  tokens of a datum     K  response tokens of a row     P  tokens of its prompts but their last

The prompt of a datum is its beginning without a share in the loss. The result includes its log-probs, too, so the row
has them after those of the responses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from slime.launcher.tinker.requests import Datum
from slime.trainer.batching.packing import PackedBatch, pack
from slime.types.sample import Sample

# Tokens of a row, unless a single sequence is longer.
ROW_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Row:
    """A packed row and the data in it. data: positions of the data in the request. places: int64 [N] for each datum,
    the positions of its tokens in the log-probs [K + P] of `batch`."""

    data: list[int]
    batch: PackedBatch
    places: list[np.ndarray]


def make_rows(
    data: Sequence[Datum], prompts: Sequence[int], *, share: bool, gather: bool, device: torch.device
) -> Iterator[Row]:
    """Packs data into rows. prompts: number of tokens at the beginning of each datum without a share in the loss.
    share: whether equal prompts are computed once. gather: see `pack`."""
    for numbers in _fill(data, prompts, share):
        lengths = [_prompt(data[i], prompts[i]) for i in numbers]
        yield _row(numbers, [data[i] for i in numbers], lengths, share, gather, device)


def _prompt(datum: Datum, untrained: int) -> int:
    """Returns the length of the datum's prompt, at least 1: of its `untrained` tokens those that predict each other."""
    follows = datum.targets[:untrained] == np.append(datum.tokens, -1)[1 : untrained + 1]
    return 1 + int(follows.argmin() if not follows.all() else min(untrained, len(datum.tokens) - 1))


def _fill(data: Sequence[Datum], prompts: Sequence[int], share: bool) -> Iterator[list[int]]:
    """Yields the positions of each row's data, in order; a prompt that is in the row already takes no room."""
    row: list[int] = []
    seen: set[bytes] = set()
    filled = 0
    for number, datum in enumerate(data):
        length = _prompt(datum, prompts[number])
        prompt = datum.tokens[:length].tobytes()
        if row and filled + len(datum.tokens) - (length if prompt in seen else 0) > ROW_TOKENS:
            yield row
            row, seen, filled = [], set(), 0
        filled += len(datum.tokens) - (length if prompt in seen else 0)
        row.append(number)
        if share:
            seen.add(prompt)
    yield row


def _row(
    numbers: list[int], data: Sequence[Datum], lengths: Sequence[int], share: bool, gather: bool, device: torch.device
) -> Row:
    # The model does not read the last token of a sample, so a 0 is appended in place of the last target.
    samples = [
        Sample(tokens=np.append(datum.tokens, 0).astype(np.int32), response_length=len(datum.tokens) - length + 1)
        for datum, length in zip(data, lengths, strict=True)
    ]
    unused = [0.0] * len(data)
    batch = pack(samples, range(len(data)), unused, unused, share_prompts=share, gather=gather, device=device)
    predictors = batch.rows.cpu().numpy()
    firsts = np.cumsum([0, *(sample.response_length for sample in samples)])
    rows = [predictors]
    targets = [datum.targets[length - 1 :] for datum, length in zip(data, lengths, strict=True)]
    places: list[np.ndarray] = []
    begins: dict[int, int] = {}  # where a prompt's log-probs begin, by the position of its last token in the row
    total = int(firsts[-1])
    for number, (datum, length) in enumerate(zip(data, lengths, strict=True)):
        last = int(predictors[firsts[number]])
        if last not in begins:
            begins[last] = total
            rows.append(np.arange(last - length + 1, last))
            targets.append(datum.targets[: length - 1])
            total += length - 1
        prompt_places = begins[last] + np.arange(length - 1)
        places.append(np.concatenate([prompt_places, np.arange(firsts[number], firsts[number + 1])]))
    ones = torch.ones(total, device=device)
    whole = dataclasses.replace(
        batch,
        rows=torch.from_numpy(np.concatenate(rows)).to(device),
        targets=torch.from_numpy(np.concatenate(targets)).to(device),
        trained=torch.arange(total, device=device),
        mask=ones,
        weights=ones,
        segments=torch.zeros(total, dtype=torch.int64, device=device),
    )
    return Row(numbers, whole, places)
