"""Prefill and decode on SGLang engines of their own: runs whose requests go through both.

    pytest tests/gpu/runs/test_prefill_decode.py

The model is random and small; keys and values move by nixl. SLIME_TEST_ATTENTION: see `--sglang-attention-backend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpu_needs import ATTENTION, needs, train_on_words, write_words_qwen3
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.kind import DECODE, PREFILL
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang

NUM_GPUS = 2
WORDS = 1024
NIXL = {"disaggregation_transfer_backend": "nixl"}
LONG = {"rollout_max_response_len": 128, "lr": 1e-4}
pytestmark = needs(NUM_GPUS, "sglang", "nixl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_words_qwen3(tmp_path_factory.mktemp("qwen3"), WORDS)


@pytest.fixture
def pair(model: str) -> Iterator[list[EngineProcess]]:
    """Both on one GPU, which the trainer does not use."""
    args = {"mem_fraction_static": 0.3, "attention_backend": ATTENTION, "max_total_tokens": 65536, **NIXL}
    with ExitStack() as stack:
        found = []
        for stage in (PREFILL, DECODE):
            options = SGLangOptions(
                model_path=model, gpus=visible_gpus()[1:2], random_seed=1, stage=stage, increments=True, args=args
            )
            found.append(stack.enter_context(start_sglang(options, name=stage)))
        for process in found:
            process.wait_ready(400)
        yield found


def check(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        assert 0 < step["train/train_rollout_logprob_abs_diff"] < 0.1
        assert step["rollout/response_lengths"] > 100


def test_external_engines_are_a_pair_and_read_the_weights_of_a_directory(
    model: str, pair: list[EngineProcess], tmp_path: Path
) -> None:
    addresses = [process.url.removeprefix("http://") for process in pair]
    disk = {"update_weight_transport": "disk", "update_weight_disk_dir": tmp_path / "weights"}
    outside = {"rollout_external_engine_addrs": addresses, "rollout_num_gpus": 0, "sglang_mem_fraction_static": None}
    outside |= {"sglang_attention_backend": None, "sglang_max_total_tokens": None}
    check(train_on_words(tmp_path, model, WORDS, **LONG, **disk, **outside))


@needs(3, "sglang", "nixl")
def test_engines_of_a_run_are_a_pair_and_get_its_weights(model: str, tmp_path: Path) -> None:
    pairs = {"prefill_num_servers": 1, "rollout_num_gpus": 2} | {f"sglang_{name}": NIXL[name] for name in NIXL}
    check(train_on_words(tmp_path, model, WORDS, **LONG, **pairs))
