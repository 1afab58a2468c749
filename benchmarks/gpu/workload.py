"""Models and samples of the training-step benchmarks: shapes of known models, random weights and tokens."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.types import Sample

# Shapes of SmolLM2-135M, Qwen2.5-0.5B, Qwen3-0.6B, Llama-3.2-1B, Qwen3-1.7B, 4B and 8B; `tiny` is to try the script.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "135m": ("LlamaConfig", dict(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "0.5b": ("Qwen2Config", dict(
        hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, head_dim=64,
        intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True)),
    "0.6b": ("Qwen3Config", dict(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True)),
    "1b": ("LlamaConfig", dict(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True)),
    "1.7b": ("Qwen3Config", dict(
        hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=6144, vocab_size=151936, tie_word_embeddings=True)),
    "4b": ("Qwen3Config", dict(
        hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=9728, vocab_size=151936, tie_word_embeddings=True)),
    "8b": ("Qwen3Config", dict(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        intermediate_size=12288, vocab_size=151936, tie_word_embeddings=False)),
    "tiny": ("Qwen3Config", dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=500, tie_word_embeddings=True)),
}  # fmt: skip


def write_model(directory: Path, shape: str, device: torch.device) -> None:
    import transformers

    if (directory / "config.json").exists():
        return
    kind, values = SHAPES[shape]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**values, max_position_embeddings=8192)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    del model
    release(device)


def make_samples(options: argparse.Namespace, vocabulary: int, kind: str = "equal", seed: int = 0) -> list[Sample]:
    """Groups of 8, with a prompt of its own for every sample but where they are to share one."""
    random = np.random.default_rng(seed)
    if kind in ("groups", "apart"):
        return make_groups(vocabulary, random, options.prompt, [options.response] * options.samples)
    if kind in ("turns", "turns-apart"):
        return make_turns(vocabulary, random, options)
    if kind == "log-normal":
        drawn = random.lognormal(np.log(options.length) - 0.5, 1.0, options.samples)
        return make_groups(vocabulary, random, 64, [int(min(max(2, n), 4 * options.length)) for n in drawn])
    lengths = [options.length] * options.samples
    if kind == "ragged":
        left, lengths = int(0.985 * options.samples * options.length), []
        while left >= 16:
            lengths.append(min(left, int(16 * (options.length / 16) ** random.random())))
            left -= lengths[-1]
    return [
        Sample(
            index=i, group_index=i // 8, tokens=random.integers(3, vocabulary, length).astype(np.int32),
            response_length=length * 3 // 4, loss_mask=np.ones(length * 3 // 4, np.uint8), reward=float(i % 2),
            rollout_log_probs=np.full(length * 3 // 4, -3.0, np.float32),
        )
        for i, length in enumerate(lengths)
    ]  # fmt: skip


def regrouped(samples: list[Sample]) -> list[Sample]:
    """Returns the samples of all ranks numbered anew: each rank brings groups of its own."""
    for i, sample in enumerate(samples):
        sample.index, sample.group_index = i, i // 8
        if sample.rollout_id is not None:
            sample.rollout_id = i // 2
    return samples


def make_groups(vocabulary: int, random: np.random.Generator, prompt: int, responses: Sequence[int]) -> list[Sample]:
    prompts = random.integers(3, vocabulary, (-(-len(responses) // 8), prompt))
    return [
        Sample(
            index=i, group_index=i // 8, response_length=size, loss_mask=np.ones(size, np.uint8), reward=float(i % 2),
            tokens=np.concatenate([prompts[i // 8], random.integers(3, vocabulary, size)]).astype(np.int32),
            rollout_log_probs=np.full(size, -3.0, np.float32),
        )
        for i, size in enumerate(responses)
    ]  # fmt: skip


def make_turns(vocabulary: int, random: np.random.Generator, options: argparse.Namespace) -> list[Sample]:
    """Groups of 8 whose samples have a prompt and four turns in common, of a model and of a tool in turns. Every other
    sample is one that its trajectory fans out into, and has these turns in its prompt."""
    written = np.repeat(np.tile([1, 0], 2), options.turn).astype(np.uint8)
    own, samples = np.ones(options.response, np.uint8), []
    for i in range(options.samples):
        if i % 8 == 0:
            common = random.integers(3, vocabulary, options.prompt + len(written))
        mask = own if i % 2 else np.concatenate([written, own])
        tokens = np.concatenate([common, random.integers(3, vocabulary, options.response)]).astype(np.int32)
        samples.append(
            Sample(
                index=i, group_index=i // 8, rollout_id=i // 2, reward=float(i // 2 % 2), tokens=tokens,
                response_length=len(mask), loss_mask=mask,
                rollout_log_probs=np.where(mask, -3.0, 0.0).astype(np.float32),
            )
        )  # fmt: skip
    return samples


def release(device: torch.device) -> None:
    if "megatron.core.parallel_state" in sys.modules:
        from slime.trainer.backends.megatron.model import parallel

        parallel.destroy()
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
