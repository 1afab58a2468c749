"""The data and the model of the quickstart."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from slime.launcher import tiny_model
from slime.launcher.config import run_config
from slime.launcher.placement.plan import plan_placement
from slime.launcher.platform import probes
from slime.launcher.quickstart import __main__ as quickstart
from slime.launcher.quickstart import arithmetic, reverse
from slime.launcher.quickstart.__main__ import COMMON
from slime.launcher.tiny_model import SPECIAL
from slime.types import Sample


def test_the_expressions_are_those_of_reasoning_gym() -> None:
    import reasoning_gym

    # It draws with replacement: so many draws contain each of them.
    drawn = reasoning_gym.create_dataset(
        "chain_sum", size=6000, seed=0, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    every = {entry["metadata"]["expression"]: int(entry["answer"]) for entry in drawn}
    assert arithmetic.answers(negative=True) == every
    assert arithmetic.answers() == {expression: answer for expression, answer in every.items() if answer >= 0}


def test_the_tiny_model_has_the_permissions_that_the_user_chose(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        model = tiny_model.write_model(tmp_path / "model", "0123456789", seed=0)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in model.iterdir()} == {0o644}


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_expressions_are_disjoint_from_the_training_set(seed: int) -> None:
    train, held_out = arithmetic.split(seed)
    seen, unseen = ({row["metadata"]["expression"] for row in rows} for rows in (train, held_out))
    assert len(held_out) == len(unseen) == 64
    assert len(train) == len(seen) == 155 - 64
    assert not seen & unseen
    assert all(eval(row["metadata"]["expression"]) == int(row["label"]) for row in train + held_out)


def test_the_split_depends_on_the_seed_only() -> None:
    assert arithmetic.split(3) == arithmetic.split(3)
    assert arithmetic.split(3) != arithmetic.split(4)


def test_reversed_numbers_are_disjoint_and_right(tmp_path: Path) -> None:
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in reverse.write_data(tmp_path, 0)]
    train, held_out = ({row["prompt"] for row in part} for part in rows)
    assert len(train) + len(held_out) == 10**reverse.DIGITS
    assert not train & held_out
    assert all(row["label"] == row["prompt"].rstrip(">")[::-1] for part in rows for row in part)


def test_the_tiny_tokenizer_reads_one_character_a_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reverse.write_model(tmp_path, 0))
    ids = tokenizer("407>")["input_ids"]
    assert [reverse.CHARACTERS[i - len(SPECIAL)] for i in ids] == list("407>")
    assert tokenizer.decode([*ids[:3], 1], skip_special_tokens=True) == "407"


@pytest.mark.parametrize(
    "response, status, expected",
    [
        ("321", Sample.Status.COMPLETED, 1.0),
        ("321", Sample.Status.TRUNCATED, 0.375),
        ("32", Sample.Status.COMPLETED, 0.25),
        ("921", Sample.Status.COMPLETED, 0.375),
        ("", Sample.Status.COMPLETED, 0.0),
    ],
)
def test_reward_gives_half_credit_for_right_positions(response: str, status: Sample.Status, expected: float) -> None:
    sample = Sample(response=response, label="321", status=status)
    assert asyncio.run(reverse.reward(None, sample)) == expected


def test_the_quickstart_is_the_same_where_there_is_a_gpu() -> None:
    config = run_config.parse(
        ["--hf-checkpoint", "m", "--num-rollout", "1", "--prompt-data", "p", *COMMON], check=False
    )
    assert config.rollout.rollout_engine == "embedded"
    assert plan_placement(config.launcher, config.rollout, gpus=1).shares_gpus, "one GPU is enough"


def test_flags_that_quickstart_does_not_know_go_to_training() -> None:
    options, rest = quickstart.parse(["--tiny", "--output-dir", "x", "--lr", "1"])
    assert options.tiny and options.output_dir == Path("x")
    assert rest == ["--lr", "1"]


@pytest.mark.parametrize(
    ("multiplies", "gpus", "dtype"),
    [(True, 0, "bfloat16"), (False, 0, "float32"), (False, 1, "bfloat16")],
    ids=["with the instructions", "without", "without, beside a GPU"],
)
def test_the_recipe_computes_in_bfloat16_only_where_that_is_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiplies: bool, gpus: int, dtype: str
) -> None:
    monkeypatch.setattr(probes, "gpus", lambda: [probes.Gpu("0", "H100", 80 << 30, 79 << 30)] * gpus)
    monkeypatch.setattr(probes, "multiplies_bfloat16", lambda: multiplies)
    (tmp_path / "model").mkdir()
    options, _ = quickstart.parse(["--output-dir", str(tmp_path), "--model-dir", str(tmp_path / "model")])
    monkeypatch.setattr(quickstart, "write_smollm2", lambda directory: directory)
    config = run_config.parse([*quickstart.smollm2_recipe(options), *COMMON], check=False)
    trainer = config.trainer.on("cuda" if gpus else "cpu")
    assert bool(trainer.bf16) == (dtype == "bfloat16")
    assert config.rollout.rollout_engine_dtype == trainer.wire_dtype == dtype, "weights arrive as the engine holds them"
