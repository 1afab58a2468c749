"""A model of two layers that learns to write digits backwards: "407>" becomes "704"."""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

from slime.launcher import tiny_model
from slime.launcher.quickstart.rows import write_rows
from slime.types import Sample

DIGITS = 3
HELD_OUT = 64
CHARACTERS = "0123456789>"


def write_data(directory: Path, seed: int) -> tuple[Path, Path]:
    """Writes train.jsonl and held_out.jsonl, disjoint, shuffled by `seed`; returns their paths."""
    numbers = ["".join(digits) for digits in itertools.product("0123456789", repeat=DIGITS)]
    random.Random(seed).shuffle(numbers)
    paths = directory / "train.jsonl", directory / "held_out.jsonl"
    for path, part in zip(paths, (numbers[HELD_OUT:], numbers[:HELD_OUT]), strict=True):
        write_rows(path, ({"prompt": f"{n}>", "label": n[::-1]} for n in part))
    return paths


def write_model(directory: Path, seed: int) -> Path:
    """Writes a randomly initialised model that knows the digits and ">"."""
    return tiny_model.write_model(directory, CHARACTERS, seed)


async def reward(args: argparse.Namespace, sample: Sample, **kwargs: object) -> float:
    """Returns 1 for the answer followed by EOS, otherwise half the fraction of correct positions (EOS included).

    The partial credit is what gives a random model a gradient: it is exactly right once in 28,561 tries.
    """
    answer = [*sample.label, "<eos>"]
    ended = sample.status is Sample.Status.COMPLETED
    response = [*sample.response, *(["<eos>"] if ended else [])]
    if response == answer:
        return 1.0
    right = sum(a == b for a, b in zip(response, answer, strict=False))
    return 0.5 * right / len(answer)
