"""One-digit sums and differences, split by expression into a training and a held-out set."""

from __future__ import annotations

import random
from pathlib import Path

from slime.launcher.quickstart.rows import write_rows

HELD_OUT = 64


def answers(*, negative: bool = False) -> dict[str, int]:
    """Returns the answer of every two-term expression over one-digit numbers ("7 + 6", "8 - 3").

    negative: with those below 0, of which SmolLM2 gives hardly any, so that its groups teach nothing. Then they equal
    those of reasoning-gym's chain_sum, which is not used because it takes seconds to import.
    """
    digits = range(10)
    sums = {f"{a} + {b}": a + b for a in digits for b in digits}
    return sums | {f"{a} - {b}": a - b for a in digits for b in digits if negative or a >= b}


def split(seed: int, *, negative: bool = False) -> tuple[list[dict], list[dict]]:
    """Returns (training rows, held-out rows), disjoint in expressions and shuffled by `seed`."""
    rows = [_row(expression, answer) for expression, answer in sorted(answers(negative=negative).items())]
    random.Random(seed).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def write(directory: Path, seed: int, *, negative: bool = False) -> tuple[Path, Path]:
    """Writes train.jsonl and held_out.jsonl; returns their paths."""
    paths = directory / "train.jsonl", directory / "held_out.jsonl"
    for path, rows in zip(paths, split(seed, negative=negative), strict=True):
        write_rows(path, rows)
    return paths


def _row(expression: str, answer: int) -> dict:
    question = f"What is {expression}? Answer with just the number."
    return {
        "prompt": [{"role": "user", "content": question}],
        "label": str(answer),
        "metadata": {"source": "chain_sum", "expression": expression},
    }
