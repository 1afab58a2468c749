"""Differences of log-probs between SGLang and the trainer, by the modes that each is run in.

    python benchmarks/gpu/log_prob_difference.py --hf-checkpoint DIR [--rollouts 20] [--tokens 256] [--output FILE.json]

DIR: a dense Llama or Qwen3 in bfloat16, with heads of 128 elements. Engines, all on one GPU: as it comes, and with
--enable-deterministic-inference. Trainers: fsdp compiled, fsdp eager, and fsdp with --true-on-policy-mode, which has
the engine's own kernels. A rollout has 32 samples at T=1 after random prompts, in groups of four; between rollouts the
weights stay. Seconds are medians: of a rollout, of a forward pass over it, and of a forward and a backward pass.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo import VERSIONS, hardware, version
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.process import EngineProcess, stop_all
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.trainer.backends.base import Outputs
from slime.trainer.backends.fsdp.backend import FsdpBackend
from slime.trainer.batching.packing import PackedBatch, pack
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.types import Sample

ENGINES: dict[str, dict[str, Any]] = {"default": {}, "deterministic": {"enable_deterministic_inference": True}}
TRAINERS: dict[str, dict[str, Any]] = {
    "fsdp, compiled": {"compile": True},
    "fsdp, eager": {"compile": False},
    "fsdp, true on policy": {"compile": True, "true_on_policy_mode": True},
}
PROMPTS, GROUP = 8, 4


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hf-checkpoint", type=Path, required=True)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=256, help="Tokens of a response")
    parser.add_argument("--attention", default="fa3", help="Value of --sglang-attention-backend")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "date": date.today().isoformat(), "hardware": hardware(), "command": " ".join(["python", *sys.argv]),
        "versions": {name: version(name) for name in VERSIONS}, "rollouts": options.rollouts, "tokens": options.tokens,
        "rows": [],
    }  # fmt: skip
    engines = {
        name: start_sglang(
            SGLangOptions(
                model_path=str(options.hf_checkpoint), gpus=visible_gpus()[:1], random_seed=1,
                args=args | {
                    "attention_backend": options.attention, "mem_fraction_static": 0.9, "max_total_tokens": 32768,
                },
            ),
            name=name,
        )
        for name, args in ENGINES.items()
    }  # fmt: skip
    generated: dict[str, tuple[list[list[Sample]], list[float]]] = {}
    try:
        for engine in engines.values():
            engine.wait_ready(400)
        for name, engine in engines.items():
            generated[name] = asyncio.run(rollouts(options, engine))
    finally:
        stop_all(list(engines.values()), 5)
    for trainer, backend in trainers(str(options.hf_checkpoint)):
        for engine_name, (samples, seconds) in generated.items():
            row = compared(samples, backend) | {
                "engine": engine_name, "trainer": trainer, "engine_seconds": statistics.median(seconds),
            }  # fmt: skip
            result["rows"].append(row)
            print(
                f"engine {engine_name:14} trainer {trainer:20} mean {row['mean']:.3e}  largest {row['max']:.3e}  "
                f"tokens that differ {row['differ']:.1%}  engine {row['engine_seconds']:.3f} s  "
                f"scores {row['seconds']:.3f} s  update {row['update_seconds']:.3f} s", flush=True,
            )  # fmt: skip
            if options.output:
                options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


async def rollouts(options: argparse.Namespace, engine: EngineProcess) -> tuple[list[list[Sample]], list[float]]:
    vocabulary = json.loads((options.hf_checkpoint / "config.json").read_text())["vocab_size"]
    found, seconds = [], []
    async with EngineClient(engine.url, engine.name) as client:
        for number in range(options.rollouts):
            random = np.random.default_rng(number)
            lengths = random.integers(16, 64, PROMPTS)
            prompts = [p for n in lengths for p in [random.integers(3, vocabulary, n).tolist()] * GROUP]
            params = [
                {"temperature": 1.0, "max_new_tokens": options.tokens, "ignore_eos": True, "sampling_seed": i}
                for i in range(len(prompts))
            ]
            if engine.name == "default":
                for each in params:
                    each.pop("sampling_seed")
            began = time.perf_counter()
            answers = await client.generate(prompts, params, return_logprob=True)
            seconds.append(time.perf_counter() - began)
            samples = []
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                sample = Sample(index=i, group_index=i, tokens=prompt, reward=0.0)
                pairs = answer["meta_info"]["output_token_logprobs"]
                sample.append_response_tokens(
                    Namespace(), tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs],
                    meta_info=answer["meta_info"],
                )  # fmt: skip
                samples.append(sample)
            found.append(samples)
    return found, seconds[1:] or seconds


def trainers(model: str) -> Iterator[tuple[str, FsdpBackend]]:
    device = torch.device("cuda", 0)
    for name, values in TRAINERS.items():
        settings = TrainerSettings(hf_checkpoint=model, bf16=True, **values)
        yield name, FsdpBackend(settings, Ranks(0, 1, "", 1, "cuda"), device)
        torch.cuda.empty_cache()


def compared(rollouts: list[list[Sample]], backend: FsdpBackend) -> dict[str, float]:
    """Returns differences of log-probs, and seconds of a forward pass, and of a forward and backward pass."""
    differences: list[Tensor] = []
    of_scores: list[float] = []
    of_updates: list[float] = []
    for samples in rollouts:
        count = len(samples)
        batch = pack(
            samples, range(count), [0.0] * count, [1.0] * count, gather=backend.gathers_keys, device=backend.device
        )
        assert batch.rollout_log_probs is not None
        (found,) = timed(of_scores, functools.partial(backend.log_probs, [batch]))
        timed(of_updates, functools.partial(backend.forward_backward, [batch], mean_log_prob))
        backend.drop_gradients()
        differences.append((found.float() - batch.rollout_log_probs.to(found.device)).abs().cpu())
    every = torch.cat(differences)
    return {
        "mean": float(every.mean()), "max": float(every.max()), "differ": float((every > 0).float().mean()),
        "seconds": statistics.median(of_scores), "update_seconds": statistics.median(of_updates),
    }  # fmt: skip


def mean_log_prob(number: int, batch: PackedBatch, outputs: Outputs) -> Tensor:
    return -outputs.log_probs.sum() / len(batch.mask)


def timed(seconds: list[float], call: Callable[[], Any]) -> Any:
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - began)
    return result


if __name__ == "__main__":
    sys.exit(main())
