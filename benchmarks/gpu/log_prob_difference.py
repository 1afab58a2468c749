"""Differences of log-probs between SGLang and the trainer, by the modes that each is run in.

    python benchmarks/gpu/log_prob_difference.py --hf-checkpoint DIR [--rollouts 20] [--output FILE.json]

DIR: a Llama model in bfloat16. Engines, all on one GPU: as it comes, and with --enable-deterministic-inference.
Trainers: fsdp compiled, fsdp eager, and a forward pass made of the engine's own kernels (batch-invariant matrix
products, its attention, norms and activation), which the trainer does not have. A rollout has 32 samples of 64 tokens
at T=1 after random prompts; between rollouts the weights stay. Seconds of an engine are those of its rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from grpo import VERSIONS, hardware, version
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.process import EngineProcess, stop_all
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.trainer.backends.build import build_backend
from slime.trainer.batching.packing import PackedBatch, pack
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.types import Sample

ENGINES: dict[str, dict[str, Any]] = {"default": {}, "deterministic": {"enable_deterministic_inference": True}}
PROMPTS, GROUP, TOKENS = 8, 4, 64
LogProbs = Callable[[list[Sample], PackedBatch], Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hf-checkpoint", type=Path, required=True)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--attention", default="fa3", help="Value of --sglang-attention-backend")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "date": date.today().isoformat(), "hardware": hardware(), "command": " ".join(["python", *sys.argv]),
        "versions": {name: version(name) for name in VERSIONS}, "rollouts": options.rollouts, "rows": [],
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
    for trainer, log_probs in trainers(str(options.hf_checkpoint)):
        for engine_name, (samples, seconds) in generated.items():
            row = compared(samples, log_probs) | {
                "engine": engine_name, "trainer": trainer, "engine_seconds": statistics.median(seconds),
            }  # fmt: skip
            result["rows"].append(row)
            print(
                f"engine {engine_name:14} trainer {trainer:16} mean {row['mean']:.3e}  largest {row['max']:.3e}  "
                f"tokens that differ {row['differ']:.1%}  engine {row['engine_seconds']:.3f} s  "
                f"trainer {row['seconds']:.3f} s", flush=True,
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
                {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True, "sampling_seed": i}
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


def trainers(model: str) -> Any:
    """Yields the name of each, and its log-probs of a rollout."""
    device = torch.device("cuda", 0)
    for name, compiled in (("fsdp, compiled", True), ("fsdp, eager", False)):
        settings = TrainerSettings(hf_checkpoint=model, bf16=True, compile=compiled)
        backend = build_backend(settings, Ranks(0, 1, "", 1, "cuda"), device)

        def of_backend(samples: list[Sample], batch: PackedBatch, backend: Any = backend) -> Tensor:
            (found,) = backend.log_probs([batch])
            return found

        yield name, of_backend
        del backend
        torch.cuda.empty_cache()
    yield "engine's kernels", EngineKernels(model)


def compared(rollouts: list[list[Sample]], log_probs: LogProbs) -> dict[str, float]:
    differences, seconds = [], []
    for samples in rollouts:
        count = len(samples)
        batch = pack(samples, range(count), [0.0] * count, [1.0] * count, device=torch.device("cuda", 0))
        assert batch.rollout_log_probs is not None
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = log_probs(samples, batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        differences.append((found.float() - batch.rollout_log_probs.to(found.device)).abs().cpu())
    every = torch.cat(differences)
    return {
        "mean": float(every.mean()), "max": float(every.max()), "differ": float((every > 0).float().mean()),
        "seconds": statistics.median(seconds),
    }  # fmt: skip


class EngineKernels:
    """The forward pass of a Llama model as SGLang's deterministic mode computes it, without gradient."""

    def __init__(self, model: str) -> None:
        from sglang.srt.batch_invariant_ops import enable_batch_invariant_mode  # pants: no-infer-dep
        from transformers import AutoModelForCausalLM

        policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda()
        self._policy, config = policy, policy.config
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._size = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
        with torch.device("cuda"):
            steps = torch.arange(0, self._size, 2, dtype=torch.float) / self._size
            angles = torch.arange(8192, dtype=torch.float)[:, None] * (1.0 / theta**steps)
            self._cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        enable_batch_invariant_mode()

    @torch.no_grad()
    def __call__(self, samples: list[Sample], batch: PackedBatch) -> Tensor:
        arrays = [sample.array("tokens") for sample in samples]
        tokens = torch.as_tensor(np.concatenate(arrays)).long().cuda()
        positions = torch.cat([torch.arange(len(array)) for array in arrays]).cuda()
        bounds = torch.tensor([0, *np.cumsum([len(array) for array in arrays])], dtype=torch.int32, device="cuda")
        logits = self._logits(tokens, positions, bounds, max(map(len, arrays)))
        found = []
        for sample, start in zip(samples, bounds.tolist()[:-1], strict=True):
            first = start + len(sample.array("tokens")) - sample.response_length
            last = first + sample.response_length
            rows = torch.log_softmax(logits[first - 1 : last - 1].float(), dim=-1)
            found.append(rows.gather(1, tokens[first:last, None])[:, 0])
        return torch.cat(found)

    def _logits(self, tokens: Tensor, positions: Tensor, bounds: Tensor, longest: int) -> Tensor:
        from sgl_kernel.flash_attn import flash_attn_varlen_func  # pants: no-infer-dep
        from sglang.kernels.ops.activation.activation import silu_and_mul  # pants: no-infer-dep
        from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace  # pants: no-infer-dep

        model = self._policy.model
        x, residual = model.embed_tokens(tokens), None
        for layer in model.layers:
            x, residual = _norm(layer.input_layernorm, x, residual)
            attention = layer.self_attn
            q, k, v = (
                functional.linear(x, projection.weight).view(len(x), -1, self._size)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            apply_rope_with_cos_sin_cache_inplace(
                q=q, k=k, cos_sin_cache=self._cos_sin, positions=positions, is_neox=True
            )
            mixed = flash_attn_varlen_func(
                q, k, v, bounds, bounds, longest, longest, softmax_scale=self._size**-0.5, causal=True, num_splits=1
            )
            mixed = mixed[0] if isinstance(mixed, tuple) else mixed
            x = functional.linear(mixed.reshape(len(x), -1), attention.o_proj.weight)
            x, residual = _norm(layer.post_attention_layernorm, x, residual)
            both = torch.cat([functional.linear(x, p.weight) for p in (layer.mlp.gate_proj, layer.mlp.up_proj)], -1)
            activated = torch.empty_like(both[:, : both.shape[1] // 2].contiguous())
            silu_and_mul(both, activated)
            x = functional.linear(activated, layer.mlp.down_proj.weight)
        x, _ = _norm(model.norm, x, residual)
        return functional.linear(x, self._policy.lm_head.weight)


def _norm(module: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(normed, residual), as SGLang adds the residual in float32 and keeps it in bfloat16."""
    from sglang.srt.batch_invariant_ops.batch_invariant_ops import rms_norm_batch_invariant  # pants: no-infer-dep

    if residual is None:
        return rms_norm_batch_invariant(x, module.weight, module.variance_epsilon), x
    added = x.float() + residual.float()
    scaled = added * torch.rsqrt(added.pow(2).mean(dim=-1, keepdim=True) + module.variance_epsilon)
    return (scaled * module.weight).to(x.dtype), added.to(x.dtype)


if __name__ == "__main__":
    sys.exit(main())
