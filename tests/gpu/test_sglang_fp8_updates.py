"""Weight updates to a real SGLang engine that holds FP8 in blocks, by CUDA IPC and through a directory.

    pytest tests/gpu/test_sglang_fp8_updates.py

The model is a small Qwen3 with random weights, written as published ones in FP8 are. Trainer and engine share a GPU of
Hopper's or Ada's. SLIME_TEST_ATTENTION: see `--sglang-attention-backend`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_needs import ATTENTION, make_samples, needs, train_on_words, write_fp8_qwen3, write_words
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.registry import KINDS
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.trainer.backends.base import Backend
from slime.trainer.backends.build import build_backend
from slime.trainer.batching.packing import pack
from slime.trainer.batching.plan import Planner
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.step.step import TrainStep
from slime.trainer.weight_sync.sender import WeightSender
from slime.types import Sample
from slime.types.clients import Engine, SampleSummary

NUM_GPUS = 1

WORDS, LENGTH = 512, 96
START_SECONDS = 400
pytestmark = needs(NUM_GPUS, "sglang")

Function = Callable[[EngineClient], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not (8, 9) <= torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("SGLang keeps FP8 as it is in the checkpoint on Hopper's and Ada's GPUs only")
    path = tmp_path_factory.mktemp("model")
    write_fp8_qwen3(
        path, vocab_size=WORDS, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=2048, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    write_words(path, WORDS)
    return str(path)


def start(model: str) -> EngineProcess:
    options = SGLangOptions(
        model_path=model, gpus=visible_gpus()[:NUM_GPUS], random_seed=1,
        args={"mem_fraction_static": 0.2, "attention_backend": ATTENTION, "max_total_tokens": 65536},
    )  # fmt: skip
    return start_sglang(options)


class OneEngine:
    """A rollout service of one engine, and what the engine computes."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process

    def call(self, function: Function) -> Any:
        async def inside() -> Any:
            async with EngineClient(self.process.url, self.process.name) as client:
                return await function(client)

        return asyncio.run(inside())

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        self.call(lambda client: client.flush_cache(10.0))
        takes = KINDS["sglang"].weight_transports
        return [Engine(self.process.name, self.process.url, "sglang", True, 0, weight_transports=takes)]

    def begin_joining(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        return []

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None: ...

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None: ...

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None: ...

    def checksum(self) -> str:
        return str(self.call(lambda client: client.check_weights())["per_engine_checksum"])

    def version(self) -> str:
        return str(self.call(lambda client: client.weight_version()))

    def reads(self, texts: list[list[int]]) -> list[np.ndarray]:
        """Log-probs of every token but the first, as a prompt."""
        params = [{"max_new_tokens": 1, "temperature": 0.0}] * len(texts)
        answers = self.call(lambda client: client.generate(texts, params, logprob_start_len=0))
        return [
            np.array([item[0] for item in answer["meta_info"]["input_token_logprobs"][1:]], np.float32)
            for answer in answers
        ]

    def writes(self, prompts: list[list[int]]) -> list[Sample]:
        """Samples that the engine generates, with its log-probs."""
        params = [{"max_new_tokens": LENGTH, "temperature": 1.0, "ignore_eos": True}] * len(prompts)
        answers = self.call(lambda client: client.generate(prompts, params))
        found = []
        for prompt, answer in zip(prompts, answers, strict=True):
            items = answer["meta_info"]["output_token_logprobs"]
            found.append(sample_of(prompt + [item[1] for item in items], np.array([i[0] for i in items], np.float32)))
        return found


def sample_of(tokens: list[int], log_probs: np.ndarray) -> Sample:
    size = len(log_probs)
    return Sample(
        index=0, group_index=0, tokens=np.array(tokens, np.int32), response_length=size, reward=0.0,
        loss_mask=np.ones(size, np.uint8), rollout_log_probs=log_probs,
    )  # fmt: skip


def apart(backend: Backend, samples: list[Sample]) -> float:
    """Mean difference of the trainer's log-probs from those of the samples, per token."""
    count = len(samples)
    batch = pack(samples, range(count), [0.0] * count, [1.0] * count, device=backend.device)
    (found,) = backend.log_probs([batch])
    assert found is not None and batch.rollout_log_probs is not None
    return float((found.cpu() - batch.rollout_log_probs.cpu()).abs().mean())


def train(backend: Backend, settings: TrainerSettings, ranks: Ranks) -> None:
    samples = make_samples(0, WORDS, rollout_log_probs=np.full(192, -6.0, np.float32))
    plan = Planner(settings).plan(0, [SampleSummary.of(sample) for sample in samples])
    TrainStep(settings, backend, ranks).run(plan, functools.partial(map, samples.__getitem__))


def test_an_engine_computes_with_the_weights_of_an_update(model: str, tmp_path: Path) -> None:
    values: dict[str, Any] = dict(
        hf_checkpoint=model, bf16=True, lr=1e-2, use_dynamic_batch_size=True, max_tokens_per_gpu=4096, compile=False,
        update_weight_timeout_seconds=60.0,
    )  # fmt: skip
    by_ipc = TrainerSettings(**values, colocate=True)
    checked = TrainerSettings(**values, colocate=True, check_weight_update_equal=True)
    by_disk = TrainerSettings(
        **values, update_weight_transport="disk", update_weight_disk_dir=str(tmp_path / "shared"),
        update_weight_disk_keep_files=True,
    )  # fmt: skip
    ranks = Ranks(0, 1, "", 1, "cuda")
    backend = build_backend(by_ipc, ranks, torch.device("cuda", 0))
    random = np.random.default_rng(1)
    texts = random.integers(3, WORDS, (8, LENGTH)).tolist()

    with start(model) as process:
        engine = OneEngine(process.wait_ready(START_SECONDS))

        def push(settings: TrainerSettings, version: int) -> str:
            sender = WeightSender(settings, ranks, backend, engine, Path(model))
            started = time.perf_counter()
            sent = sender.push(version)
            print(f"version {version}: {sent} bytes in {time.perf_counter() - started:.3f} s")
            sender.close()
            assert engine.version() == str(version)
            return engine.checksum()

        def reading() -> list[np.ndarray]:
            return engine.reads(texts)

        def from_trainer(log_probs: list[np.ndarray]) -> float:
            return apart(backend, [sample_of(text, found) for text, found in zip(texts, log_probs, strict=True)])

        loaded, published = engine.checksum(), reading()
        assert push(by_ipc, 1) == loaded
        before = from_trainer(published)
        train(backend, by_ipc, ranks)
        stale = from_trainer(published)
        updated = push(by_ipc, 2)
        assert updated != loaded
        sent = reading()
        after, written = from_trainer(sent), apart(backend, engine.writes([text[:16] for text in texts]))
        print(f"from the trainer: {before:.4f}, not updated {stale:.4f}, read {after:.4f}, wrote {written:.4f}")
        # Rounding to FP8 moves log-probs by a few hundredths, the training step moved them much further.
        assert max(before, after, written) < 0.1 < 0.2 < stale
        assert push(by_disk, 3) == updated
        assert push(checked, 4) == updated
    (directory,) = (tmp_path / "shared").rglob("weight_v000003")
    with start(str(directory)) as process:
        again = OneEngine(process.wait_ready(START_SECONDS))
        assert again.checksum() == updated
        worst = max(float(np.abs(a - b).max()) for a, b in zip(sent, again.reads(texts), strict=True))
    print(f"an engine that began with these weights: largest difference {worst:.2g}")
    assert worst < 1e-3


def test_a_run_sends_fp8(model: str, tmp_path: Path) -> None:
    for step in train_on_words(tmp_path, model, WORDS, lr=3e-3):
        assert step["train/train_rollout_logprob_abs_diff"] < 0.1
