"""Prefill and decode on SGLang engines of their own: runs whose requests go through both.

    pytest tests/gpu/runs/test_prefill_decode.py

The model is random and small; keys and values move by nixl, and by mooncake over TCP where engines release their
memory. SLIME_TEST_ATTENTION: see `--sglang-attention-backend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_needs import ATTENTION, needs, train_on_words, write_words_qwen3
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.kind import DECODE, PREFILL
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang

NUM_GPUS = 2
WORDS = 1024
NIXL = {"disaggregation_transfer_backend": "nixl"}
MOONCAKE = {"disaggregation_transfer_backend": "mooncake"}
LONG: dict[str, Any] = {"rollout_max_response_len": 128, "lr": 1e-4}
# Long enough for an engine to die while it generates.
LONGER = LONG | {"rollout_max_response_len": 2048, "num_rollout": 4}
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
    disk: dict[str, Any] = {"update_weight_transport": "disk", "update_weight_disk_dir": tmp_path / "weights"}
    outside: dict[str, Any] = {"rollout_external_engine_addrs": addresses, "rollout_num_gpus": 0, "sglang_mem_fraction_static": None}
    outside |= {"sglang_attention_backend": None, "sglang_max_total_tokens": None}
    check(train_on_words(tmp_path, model, WORDS, **LONG, **disk, **outside))


def in_pairs(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"prefill_num_servers": 1, **{f"sglang_{name}": value for name, value in values.items()}, **more}


@needs(3, "sglang", "nixl")
def test_engines_of_a_run_are_a_pair_and_get_its_weights(model: str, tmp_path: Path) -> None:
    check(train_on_words(tmp_path, model, WORDS, **LONG, **in_pairs(NIXL, rollout_num_gpus=2)))


def test_a_pair_keeps_its_memory_beside_a_trainer_on_the_same_gpus(model: str, tmp_path: Path) -> None:
    """Prefill beside rank 0, decode beside rank 1: each engine reads the weights from the rank on its GPU."""
    pair = in_pairs(NIXL, actor_num_gpus_per_node=2)
    check(train_on_words(tmp_path, model, WORDS, "no_offload_rollout", **LONG, **pair))


@needs(NUM_GPUS, "sglang", "mooncake")
def test_both_engines_of_a_pair_release_their_memory_to_the_trainer(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    pair = in_pairs(MOONCAKE, actor_num_gpus_per_node=2)
    check(train_on_words(tmp_path, model, WORDS, "offload_rollout", "offload_train", **LONG, **pair))


@pytest.mark.parametrize("stage", [PREFILL, DECODE])
def test_a_run_goes_on_when_an_engine_of_its_only_pair_is_killed(model: str, tmp_path: Path, stage: str) -> None:
    """It gets the weights that the other one has before requests go on."""
    pair = in_pairs(NIXL, actor_num_gpus_per_node=2)
    switches = ("no_offload_rollout", "use_fault_tolerance")
    steps = train_on_words(tmp_path, model, WORDS, *switches, meanwhile=lambda _: kill(model, stage), **LONGER, **pair)
    check(steps)
    assert sum(step.get("rollout/engine_restarts", 0) for step in steps) == 1


def kill(model: str, stage: str) -> None:
    """Kills the server that does this part of the requests for a model."""
    words = {f"--model-path={model}", f"--disaggregation-mode={stage}"}
    (server,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if words <= set(process.info["cmdline"] or ()) and "slime.rollout.engines.sglang" not in process.info["cmdline"]
    )
    server.kill()
