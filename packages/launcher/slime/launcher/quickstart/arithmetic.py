"""One-digit sums from reasoning-gym, split by expression into a training and a held-out set."""

from __future__ import annotations

import random
from pathlib import Path

from slime.launcher.quickstart.rows import write_rows

HELD_OUT = 64
DRAWS = 6000  # reasoning-gym draws with replacement: this many draws contain each of the 200 expressions


def expressions() -> dict[str, dict]:
    """Returns every two-term expression over one-digit numbers ("7 + 6", "3 - 8"), with its reasoning-gym entry."""
    import reasoning_gym

    drawn = reasoning_gym.create_dataset(
        "chain_sum", size=DRAWS, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    return {entry["metadata"]["expression"]: entry for entry in drawn}


def split(seed: int) -> tuple[list[dict], list[dict]]:
    """Returns (training rows, held-out rows), disjoint in expressions and shuffled by `seed`."""
    rows = [_row(expression, entry) for expression, entry in sorted(expressions().items())]
    random.Random(seed).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def write(directory: Path, seed: int) -> tuple[Path, Path]:
    """Writes train.jsonl and held_out.jsonl; returns their paths."""
    paths = directory / "train.jsonl", directory / "held_out.jsonl"
    for path, rows in zip(paths, split(seed), strict=True):
        write_rows(path, rows)
    return paths


def _row(expression: str, entry: dict) -> dict:
    question = f"What is {expression}? Answer with just the number."
    return {
        "prompt": [{"role": "user", "content": question}],
        "label": entry["answer"],
        "metadata": {"source": "chain_sum", "expression": expression},
    }
