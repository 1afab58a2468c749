"""Run by test_trainer_megatron_sharing in two processes; see `trainer_processes.run_cases`."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from trainer_processes import run_cases
from trainer_tiny import make_samples

from slime.trainer.algorithms.logprobs import token_entropy, token_log_probs
from slime.trainer.backends.megatron.model.vocabulary import real_columns
from slime.trainer.process.collective import Ranks
from slime.trainer.step.sharing import ReplicaReader
from slime.types import Sample
from slime.types.errors import InvalidField, SlimeError

ROWS = 7
# (tokens, padded vocabulary): even, with a rank that has some padding, and with one that has padding alone.
VOCABULARIES = ((10, 10), (11, 16), (6, 16))


def vocabulary(ranks: Ranks, models: Path) -> list[dict[str, Any]]:
    """The largest differences to float64 over the whole vocabulary, of values and of gradients."""
    return [
        {"case": [*sizes, temperature, chunk]} | _differences(ranks, *sizes, temperature, chunk)
        for sizes, temperature, chunk in itertools.product(VOCABULARIES, (1.0, 0.7), (-1, 3))
    ]


def _differences(ranks: Ranks, tokens: int, padded: int, temperature: float, chunk: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(tokens)
    logits = 20 * torch.randn(ROWS, padded, generator=generator)
    # The values of padding must not matter, however large they are.
    logits[:, tokens:] = 1e4
    targets = torch.randint(tokens, (ROWS,), generator=generator)
    weights = torch.randn(2, ROWS, generator=generator)

    exact = logits[:, :tokens].double().requires_grad_()
    log_softmax = (exact / temperature).log_softmax(-1)
    expected = [log_softmax.gather(-1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)]
    (weights[0] * expected[0] + weights[1] * expected[1]).sum().backward()
    gradient = torch.zeros(ROWS, padded, dtype=torch.float64)
    gradient[:, :tokens] = exact.grad

    share = padded // ranks.world_size
    own = slice(share * ranks.rank, share * (ranks.rank + 1))
    part = logits[:, own].clone().requires_grad_()
    columns, shard = real_columns(part, tokens, dist.group.WORLD)
    found = [
        token_log_probs(columns, targets, temperature, chunk, shard),
        token_entropy(columns, temperature, chunk, shard),
    ]
    (weights[0] * found[0] + weights[1] * found[1]).sum().backward()
    return {
        "log_probs": float((found[0] - expected[0]).abs().max()),
        "entropy": float((found[1] - expected[1]).abs().max()),
        "gradient": float((part.grad - gradient[:, own]).abs().max()),
    }


def _reader(ranks: Ranks, replicas: int, *, each_reads: bool = False) -> ReplicaReader:
    """A reader for one replica whose last rank leads it, or for a replica on each rank."""
    one = replicas == 1
    leads = ranks.rank == ranks.world_size - 1 if one else True
    backend = SimpleNamespace(replicas=replicas, replica=0 if one else ranks.rank, leads_replica=leads)
    return ReplicaReader(ranks, backend, each_reads=each_reads)


def reading(ranks: Ranks, models: Path) -> dict[str, Any]:
    """Counts how often this rank read, and checks its samples, for one replica, for two, and for nothing to read.

    "1 each": of one replica whose ranks read by themselves.
    """
    samples = make_samples()
    found: dict[str, Any] = {}
    for name, replicas in (("1", 1), ("1 each", 1), (str(ranks.world_size), ranks.world_size)):
        reader = _reader(ranks, replicas, each_reads="each" in name)
        calls: list[list[int]] = []

        def read(positions: Any, calls: list[Any] = calls) -> Any:
            calls.append(list(positions))
            return (samples[p] for p in positions)

        wanted = [5, 0, 7] if replicas == 1 else [ranks.rank]
        got = reader.read(read, wanted)
        none = reader.read(read, [])
        found[name] = [calls, all(map(_equal, got, (samples[p] for p in wanted))), len(got), len(none)]
    return found


def _equal(one: Sample, other: Sample) -> bool:
    return (
        np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.loss_mask, other.loss_mask)
        and np.array_equal(one.rollout_log_probs, other.rollout_log_probs)
        and (one.reward, one.index, one.response_length) == (other.reward, other.index, other.response_length)
    )


def failing(ranks: Ranks, models: Path) -> list[Any]:
    """The error of a rank that cannot read, and what is read after it."""
    reader = _reader(ranks, 1)

    def read(positions: Any) -> Any:
        yield make_samples()[0]
        raise InvalidField("positions", list(positions), "positions of the step")

    try:
        reader.read(read, [0, 99])
        error = ""
    except SlimeError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return [error, len(reader.read(lambda positions: iter(make_samples()[:2]), [0, 1]))]


if __name__ == "__main__":
    run_cases({"vocabulary": vocabulary, "reading": reading, "failing": failing})
