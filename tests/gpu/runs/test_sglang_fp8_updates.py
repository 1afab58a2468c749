"""Weight updates to a real SGLang engine that holds FP8 in blocks, by CUDA IPC and through a directory.

    pytest tests/gpu/runs/test_sglang_fp8_updates.py

The model is a small Qwen3 with random weights, written as published ones in FP8 are. Trainer and engine share a GPU of
Hopper's or Ada's. SLIME_TEST_ATTENTION: see `--sglang-attention-backend`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_needs import needs, train_on_words, write_fp8_qwen3, write_words
from gpu_one_engine import LENGTH, START_SECONDS, WORDS, OneEngine, apart, sample_of, start, train
from slime.trainer.backends.build import build_backend
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.weight_sync.sender import WeightSender

NUM_GPUS = 1

pytestmark = needs(NUM_GPUS, "sglang")


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

        def push(settings: TrainerSettings, version: int) -> dict[str, str]:
            sender = WeightSender(settings, ranks, backend, engine, Path(model))
            started = time.perf_counter()
            sent = sender.push(version)
            print(f"version {version}: {sent} bytes in {time.perf_counter() - started:.3f} s")
            sender.close()
            assert engine.version() == str(version)
            return engine.checksums()

        def reading() -> list[np.ndarray]:
            return engine.reads(texts)

        def from_trainer(log_probs: list[np.ndarray]) -> float:
            return apart(backend, [sample_of(text, found) for text, found in zip(texts, log_probs, strict=True)])

        loaded, published = engine.checksums(), reading()
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
        assert again.checksums() == updated
        worst = max(float(np.abs(a - b).max()) for a, b in zip(sent, again.reads(texts), strict=True))
    print(f"an engine that began with these weights: largest difference {worst:.2g}")
    assert worst < 1e-3


def test_a_run_sends_fp8(model: str, tmp_path: Path) -> None:
    for step in train_on_words(tmp_path, model, WORDS, lr=3e-3):
        assert step["train/train_rollout_logprob_abs_diff"] < 0.1
