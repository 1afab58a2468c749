"""Weight updates to a real SGLang engine that holds INT4 in groups, by CUDA IPC and through a directory.

    pytest tests/gpu/runs/test_sglang_int4_updates.py -rA
    pytest tests/gpu/runs/test_sglang_int4_updates.py -k "update and dense"    # two engines, the shortest experiment

The models are a small Qwen3 whose projections are INT4, and one with experts that are INT4, both with random weights.
SGLang repacks such layers for Marlin when it loads them; the plug-in of slime-rollout, which has to be installed as a
distribution, has it load and repack them again. Trainer and engine share a GPU. SLIME_TEST_ATTENTION: see
`--sglang-attention-backend`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_needs import needs, train_on_words, write_int4_qwen3, write_words
from gpu_one_engine import LENGTH, START_SECONDS, WORDS, OneEngine, apart, sample_of, start, train
from slime.rollout.engines.sglang import plugin
from slime.trainer.backends.base import Backend
from slime.trainer.backends.build import build_backend
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.weight_sync.sender import WeightSender

NUM_GPUS = 1
# Size of groups, and what the config has besides.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (128, {}),
    "experts": (
        32, {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
    ),
}  # fmt: skip
# Difference of log-probs in bfloat16, for a token: a router may send some tokens to other experts.
LARGEST = {"dense": 0.1, "experts": 0.15}
RANKS = Ranks(0, 1, "", 1, "cuda")
pytestmark = needs(NUM_GPUS, "sglang", "compressed_tensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if not (8, 0) <= torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("SGLang computes with INT4 by Marlin from Ampere to Hopper")
    assert plugin.is_found(), "slime-rollout is not installed as a distribution: SGLang does not find its plug-in"
    found = {}
    for name, (group, more) in MODELS.items():
        path = tmp_path_factory.mktemp(name)
        found[name] = write_int4_qwen3(
            path, group, vocab_size=WORDS, hidden_size=512, intermediate_size=1024, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=128, max_position_embeddings=2048,
            tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None, **more,
        )  # fmt: skip
        write_words(path, WORDS)
    return found


def different(first: dict[str, str], second: dict[str, str]) -> list[str]:
    """Names the tensors whose checksums differ."""
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def largest(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))


class Pushes:
    """Weights of one trainer to one engine."""

    def __init__(self, engine: OneEngine, backend: Backend, model: str) -> None:
        self._engine, self._backend, self._model = engine, backend, model

    def push(self, settings: TrainerSettings, version: int) -> dict[str, str]:
        sender = WeightSender(settings, RANKS, self._backend, self._engine, Path(self._model))
        started = time.perf_counter()
        sent = sender.push(version)
        print(f"version {version}: {sent} bytes in {time.perf_counter() - started:.3f} s")
        sender.close()
        assert self._engine.version() == str(version)
        return self._engine.checksums()


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_computes_with_the_weights_of_an_update(models: dict[str, str], name: str, tmp_path: Path) -> None:
    model = models[name]
    values: dict[str, Any] = dict(
        bf16=True, lr=1e-2, use_dynamic_batch_size=True, max_tokens_per_gpu=4096, compile=False,
        # Some layers come in several buckets.
        update_weight_timeout_seconds=60.0, update_weight_buffer_size=1 << 20,
    )  # fmt: skip
    by_ipc = TrainerSettings(hf_checkpoint=model, **values, colocate=True)
    checked = TrainerSettings(hf_checkpoint=model, **values, colocate=True, check_weight_update_equal=True)
    by_disk = TrainerSettings(
        hf_checkpoint=model, **values, update_weight_transport="disk",
        update_weight_disk_dir=str(tmp_path / "shared"), update_weight_disk_keep_files=True,
    )  # fmt: skip
    device = torch.device("cuda", 0)
    backend = build_backend(by_ipc, RANKS, device)
    texts = np.random.default_rng(1).integers(3, WORDS, (8, LENGTH)).tolist()

    def compared(backend: Backend, log_probs: list[np.ndarray]) -> float:
        return apart(backend, [sample_of(text, found) for text, found in zip(texts, log_probs, strict=True)])

    with start(model) as process:
        engine = OneEngine(process.wait_ready(START_SECONDS))
        pushes = Pushes(engine, backend, model)
        loaded, published = engine.checksums(), engine.reads(texts)
        print(f"{len(loaded)} tensors; read twice: largest difference {largest(published, engine.reads(texts)):.2g}")
        first = pushes.push(by_ipc, 1)
        print(f"tensors that differ after an update with the weights of the checkpoint: {different(loaded, first)}")
        same = largest(published, engine.reads(texts))
        before = compared(backend, published)
        train(backend, by_ipc, RANKS)
        stale = compared(backend, published)
        updated = pushes.push(by_ipc, 2)
        sent = engine.reads(texts)
        noise = largest(sent, engine.reads(texts))
        written = engine.writes([text[:16] for text in texts])
        from_disk = different(updated, pushes.push(by_disk, 3))
        from_check = different(updated, pushes.push(checked, 4))
        at_the_end = largest(sent, engine.reads(texts))
    (directory,) = (tmp_path / "shared").rglob("weight_v000003")
    rounded = build_backend(TrainerSettings(hf_checkpoint=str(directory), **values, colocate=True), RANKS, device)
    trained, exact = compared(backend, sent), compared(rounded, sent)
    generated = apart(rounded, written)
    print(f"from the trainer, for a token: {before:.4f}, not updated {stale:.4f}, updated {trained:.4f}")
    print(f"from the trainer with these INT4 weights in bfloat16: read {exact:.4f}, wrote {generated:.4f}")
    print(f"tensors that differ, from disk: {from_disk}, after the check: {from_check}; reading {at_the_end:.2g}")
    with start(str(directory)) as process:
        again = OneEngine(process.wait_ready(START_SECONDS))
        new = different(updated, again.checksums())
        worst = largest(sent, again.reads(texts))
    print(f"an engine that began with these weights: {new} differ; log-probs by {worst:.2g}, by {noise:.2g} read twice")
    assert not different(loaded, first), same
    assert len(different(loaded, updated)) > 8
    assert not from_disk and not from_check and not new
    # Sums in Marlin's kernels for experts may take another order each time.
    assert max(worst, at_the_end, same) <= max(1e-3, 4 * noise)
    assert max(before, exact, generated) < LARGEST[name] < 2 * LARGEST[name] < stale
    assert trained < 2 * LARGEST[name]


@pytest.mark.parametrize("name", MODELS)
def test_a_run_sends_int4(models: dict[str, str], name: str, tmp_path: Path) -> None:
    # The trainer's weights are not rounded, the engine's are: at a larger rate they move apart.
    for step in train_on_words(tmp_path, models[name], WORDS, lr=1e-5):
        assert step["train/train_rollout_logprob_abs_diff"] < LARGEST[name]
