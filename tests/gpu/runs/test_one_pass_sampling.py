"""Sampling in one pass: the kernel draws from the softmax and knows its log-probs, and a real SGLang engine uses it.

    pytest tests/gpu/runs/test_one_pass_sampling.py
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_needs import needs, train_on_words, write_words_qwen3
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.sglang import plugin
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang

NUM_GPUS = 1
START_SECONDS = 400
WORDS = 2048
pytestmark = needs(NUM_GPUS, "sglang", "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_are_drawn_from_the_softmax_and_log_probs_are_its_own(dtype: torch.dtype, temperature: float) -> None:
    from slime.rollout.engines.sglang.one_pass import sample

    torch.manual_seed(1)
    vocabulary, rows = 9973, 1 << 19
    logits = (2 * torch.randn(1, vocabulary, device="cuda")).to(dtype)
    tokens, log_probs = sample(logits.expand(rows, -1), torch.full((rows,), temperature, device="cuda"))
    expected = torch.log_softmax(logits[0].double() / temperature, -1)
    assert (log_probs - expected[tokens.long()]).abs().max() < 1e-5
    counts = torch.bincount(tokens.long(), minlength=vocabulary).double()
    wanted = expected.exp() * rows
    enough = wanted > 20
    statistic = float((((counts - wanted) ** 2) / wanted)[enough].sum())
    cells = int(enough.sum())
    # Chi-square with so many degrees of freedom is all but normal; five deviations.
    assert cells > 1000 and abs(statistic - cells) < 5 * (2 * cells) ** 0.5
    rare = float(counts[~enough].sum()), float(wanted[~enough].sum())
    assert abs(rare[0] - rare[1]) < 5 * rare[1] ** 0.5


def test_a_large_vocabulary_a_row_that_is_masked_and_rows_apart_in_memory() -> None:
    from slime.rollout.engines.sglang.one_pass import sample

    logits = torch.full((300, 262144 + 8), -float("inf"), device="cuda")[:, 8:]
    allowed = torch.randint(262144, (300,), device="cuda")
    logits[torch.arange(300), allowed] = 3.0
    tokens, log_probs = sample(logits, torch.ones(300, device="cuda"))
    assert tokens.tolist() == allowed.tolist() and log_probs.abs().max() == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_words_qwen3(tmp_path_factory.mktemp("qwen3"), WORDS)


def test_an_engine_samples_in_one_pass_and_answers_other_requests_too(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # tests/gpu/setup.sh, or an installation of slime-rollout, makes it found.
    assert plugin.is_found()
    args = {"mem_fraction_static": 0.3, "max_total_tokens": 32768}
    with start_sglang(SGLangOptions(model_path=model, gpus=visible_gpus()[:1], random_seed=1, args=args)) as engine:
        engine.wait_ready(START_SECONDS)
        first = asyncio.run(generate(engine, {}))
        asyncio.run(generate(engine, {"top_k": 5}))
        greedy = asyncio.run(generate(engine, {"temperature": 0}))
    assert "samples in one pass" in caplog.text
    # At T=1 all 64 answers to one prompt differ; the greedy ones are equal.
    assert len({tuple(answer["output_ids"]) for answer in first}) == 64
    assert len({tuple(answer["output_ids"]) for answer in greedy}) == 1


async def generate(engine: Any, params: dict[str, Any]) -> list[dict[str, Any]]:
    prompt = np.random.default_rng(0).integers(3, WORDS, 40).tolist()
    plain = {"temperature": 1.0, "max_new_tokens": 32, "ignore_eos": True} | params
    async with EngineClient(engine.url, engine.name) as client:
        answers: list[dict[str, Any]] = await client.generate([prompt] * 64, [plain] * 64, return_logprob=True)
        return answers


def test_log_probs_of_a_run_are_those_of_the_trainer(model: str, tmp_path: Path) -> None:
    assert plugin.is_found()
    for step in train_on_words(tmp_path, model, WORDS, rollout_temperature=0.8):
        assert step["train/train_rollout_logprob_abs_diff"] < 0.05
