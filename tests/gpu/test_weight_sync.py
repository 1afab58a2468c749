"""A trainer's weights in a real SGLang engine, by CUDA IPC and by NCCL, held against what was sent.

    SLIME_TEST_MODEL=DIR pytest tests/gpu/test_weight_sync.py

DIR: a Hugging Face directory of a small model. By IPC trainer and engine share a GPU; NCCL needs a second one.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_needs import ATTENTION, MODEL, needs
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.registry import KINDS
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.trainer.backends.build import build_backend
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.weight_sync.sender import WeightSender
from slime.types.clients import Engine
from slime.types.errors import EngineError

NUM_GPUS = 1

START_SECONDS = 400
PROMPT = list(range(1000, 1040))
pytestmark = needs(NUM_GPUS, "sglang", model=True)
Start = Callable[[str], EngineProcess]


@pytest.fixture(scope="module")
def engine_on() -> Iterator[Start]:
    """One engine for each GPU that is asked for."""
    with contextlib.ExitStack() as stack:
        started: dict[str, EngineProcess] = {}

        def start(gpu: str) -> EngineProcess:
            if gpu not in started:
                options = SGLangOptions(
                    model_path=MODEL, gpus=[gpu], memory_saver=True, random_seed=1,
                    args={"mem_fraction_static": 0.3, "attention_backend": ATTENTION},
                )  # fmt: skip
                process = stack.enter_context(start_sglang(options, name=f"sglang-{gpu}"))
                started[gpu] = process.wait_ready(START_SECONDS)
            return started[gpu]

        yield start


class OneEngine:
    """A rollout service of one engine: pauses it, empties its cache, lets it go on."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.aborted = ""

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.process.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith(b"{") else text

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        self.call("/pause_generation", {"mode": "abort"})
        self.call("/flush_cache", {})
        return [
            Engine(
                self.process.name,
                self.process.url,
                "sglang",
                True,
                0,
                weight_transports=KINDS["sglang"].weight_transports,
            )
        ]

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None:
        return None

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None:
        self.call("/continue_generation", {})

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None:
        self.aborted = reason
        self.call("/continue_generation", {})

    def tokens(self) -> tuple[list[int], str]:
        params = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
        answer = self.call("/generate", {"input_ids": PROMPT, "sampling_params": params})
        return answer["output_ids"], answer["meta_info"]["weight_version"]


def weight_updates(
    process: EngineProcess, *, colocate: bool, check: bool = True
) -> tuple[WeightSender, Any, OneEngine]:
    settings = TrainerSettings(
        hf_checkpoint=MODEL, bf16=True, colocate=colocate, check_weight_update_equal=check,
        update_weight_buffer_size=64 << 20, update_weight_timeout_seconds=60.0,
    )  # fmt: skip
    ranks = Ranks(0, 1, "", 1)
    backend = build_backend(settings, ranks, torch.device("cuda", 0))
    rollout = OneEngine(process)
    return WeightSender(settings, ranks, backend, rollout, Path(MODEL)), backend, rollout


def check_updates(process: EngineProcess, *, colocate: bool) -> None:
    updates, backend, rollout = weight_updates(process, colocate=colocate)
    with explained(process):
        updates.push(1)
        before, version = rollout.tokens()
        assert version == "1"
        with torch.no_grad():
            for parameter in backend.policy.parameters():
                parameter.mul_(torch.rand_like(parameter) + 0.5)
        updates.push(2)
        after, version = rollout.tokens()
        assert version == "2" and after != before
    updates.close()


@contextlib.contextmanager
def explained(process: EngineProcess) -> Iterator[None]:
    """A failure with the last lines of the engine."""
    try:
        yield
    except Exception as error:
        time.sleep(1)  # what it still has to say
        error.add_note("last lines of the engine:\n" + "\n".join(process.last_lines))
        raise


def test_by_cuda_ipc_the_engine_holds_what_was_sent(engine_on: Start) -> None:
    check_updates(engine_on(visible_gpus()[0]), colocate=True)


def test_ipc_gives_its_memory_back(engine_on: Start) -> None:
    process = engine_on(visible_gpus()[0])
    updates, _, _ = weight_updates(process, colocate=True, check=False)
    held = []
    with explained(process):
        for version in range(1, 5):
            updates.push(version)
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[0]
    updates.close()


def test_a_tensor_that_differs_is_named(engine_on: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = engine_on(visible_gpus()[0])
    updates, backend, rollout = weight_updates(process, colocate=True)
    true_weights, calls = backend.named_weights, []

    def wrong_the_first_time(**options: Any) -> Iterator[tuple[str, Tensor]]:
        calls.append(options)
        for name, tensor in true_weights(**options):
            wrong = len(calls) == 1 and name == "model.layers.1.mlp.up_proj.weight"
            yield name, tensor + 1 if wrong else tensor

    monkeypatch.setattr(backend, "named_weights", wrong_the_first_time)
    with (
        explained(process),
        pytest.raises(EngineError, match=r"weight version 3: tensor model\.layers\.1\.mlp\.gate_up"),
    ):
        updates.push(3)
    assert "gate_up" in rollout.aborted
    updates.close()


@needs(2)
def test_by_nccl_the_engine_holds_what_was_sent(engine_on: Start) -> None:
    check_updates(engine_on(visible_gpus()[1]), colocate=False)
