"""Tokens a second of a GRPO training step, against transformers' forward and backward pass over the same tokens.

    python benchmarks/gpu/train_step.py [--shapes 135m 0.6b] [--backends fsdp megatron] [--output FILE.json]
    python benchmarks/gpu/train_step.py --shapes tiny --samples 8 --length 64 --dtype float32    # no GPU: does it run

step         `TrainStep.run`: samples packed into rows, log-probs, loss, backward pass, clipping, AdamW; weights random
eager        AutoModelForCausalLM with sdpa, rows of equal length without padding, cross-entropy of every token,
             backward pass; no optimizer
compiled     the same under torch.compile

All in one process, one rank, in turns, `--repeats` times after warming up. MFU counts 6 x parameters (without the input
embedding) x tokens plus causal attention, over the rate of a large bf16 matrix product measured before.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.trainer.backends.build import build_backend
from slime.trainer.batching.plan import Planner
from slime.trainer.collective import Ranks
from slime.trainer.settings import TrainerSettings
from slime.trainer.step import TrainStep
from slime.trainer.trainer import pick_device, prepare_process
from slime.types import Sample
from slime.types.clients import SampleSummary

# Of SmolLM2-135M and Qwen3-0.6B; `tiny` is for trying the script.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "135m": ("LlamaConfig", dict(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "0.6b": ("Qwen3Config", dict(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True)),
    "tiny": ("Qwen3Config", dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, vocab_size=500, tie_word_embeddings=True)),
}  # fmt: skip


def main() -> int:
    options = parse()
    settings = TrainerSettings(hf_checkpoint="-")
    prepare_process(settings)
    device = pick_device(0)
    result: dict[str, Any] = {
        "date": date.today().isoformat(), "command": " ".join(sys.argv), "device": device_name(device),
        "python": platform.python_version(), "rows": [],
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "megatron-core")},
    }  # fmt: skip
    result["matmul_flops"] = matmul_rate(device)
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as directory:
            write_model(Path(directory), shape)
            result["rows"] += measure(options, shape, directory, device, result["matmul_flops"])
    print(table(result))
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "0.6b"])
    parser.add_argument("--backends", nargs="*", choices=("fsdp", "megatron"), default=["fsdp", "megatron"])
    parser.add_argument("--peers", nargs="*", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--samples", type=int, default=32, help="samples of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sample, three quarters of it response")
    parser.add_argument("--row", type=int, default=8192, help="tokens of a forward pass")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--chunk", type=int, default=2048, help="--log-probs-chunk-size")
    parser.add_argument("--output", help="JSON file to write")
    return parser.parse_args()


def write_model(directory: Path, shape: str) -> None:
    import transformers

    kind, values = SHAPES[shape]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**values, max_position_embeddings=8192)
    with torch.device("cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)


def make_samples(options: argparse.Namespace, vocabulary: int) -> list[Sample]:
    """Groups of 8 with prompts of their own for every sample, so that nothing is shared between rows."""
    random = np.random.default_rng(0)
    response = options.length * 3 // 4
    return [
        Sample(
            index=i, group_index=i // 8, tokens=random.integers(3, vocabulary, options.length).astype(np.int32),
            response_length=response, loss_mask=np.ones(response, np.uint8), reward=float(i % 2),
            rollout_log_probs=np.full(response, -3.0, np.float32),
        )
        for i in range(options.samples)
    ]  # fmt: skip


def measure(
    options: argparse.Namespace, shape: str, directory: str, device: torch.device, rate: float
) -> list[dict[str, Any]]:
    vocabulary = SHAPES[shape][1]["vocab_size"]
    samples = make_samples(options, vocabulary)
    rows: list[dict[str, Any]] = []
    subjects: dict[str, Callable[[], tuple[Callable[[], None], int]]] = {}
    for name in options.backends:
        subjects[f"step, {name}"] = functools.partial(step_of, options, name, directory, samples, device)
    for name in options.peers:
        subjects[f"transformers, {name}"] = functools.partial(peer, options, name, directory, samples, device)
    tokens = options.samples * options.length
    for name, make in subjects.items():
        run, parameters = make()
        seconds, peak = timed(run, options.repeats, device)
        flops = work(SHAPES[shape][1], parameters, options.samples, options.length)
        rows.append({
            "shape": shape, "name": name, "parameters": parameters, "tokens": tokens, "seconds": seconds,
            "tokens_per_second": [tokens / s for s in sorted(seconds, reverse=True)],
            "mfu": flops / statistics.median(seconds) / rate, "peak_gib": peak / 2**30,
        })  # fmt: skip
        print(f"{shape} {name}: {tokens / statistics.median(seconds):,.0f} tok/s", file=sys.stderr, flush=True)
        del run
        release(device)
    return rows


def step_of(
    options: argparse.Namespace, backend: str, directory: str, samples: list[Sample], device: torch.device
) -> tuple[Callable[[], None], int]:
    settings = TrainerSettings(
        hf_checkpoint=directory, train_backend=backend, bf16=options.dtype == "bfloat16", lr=1e-6,
        use_dynamic_batch_size=True, max_tokens_per_gpu=options.row, log_probs_chunk_size=options.chunk,
    )  # fmt: skip
    ranks = Ranks(0, 1, "", 10, device.type)
    model = build_backend(settings, ranks, device)
    step = TrainStep(settings, model, ranks)
    plan = Planner(settings).plan(0, [summary(sample) for sample in samples])

    def run() -> None:
        step.run(plan, lambda positions: (samples[p] for p in positions))

    return run, model.num_parameters


def summary(sample: Sample) -> SampleSummary:
    known: dict[str, Any] = dict(
        index=sample.index, group_index=sample.group_index, rollout_id=None, total_length=len(sample.tokens),
        response_length=sample.response_length, loss_mask_sum=sample.response_length, reward=sample.reward,
        remove_sample=False,
    )  # fmt: skip
    fields: dict[str, Any] = {name: known.get(name) for name in SampleSummary.__dataclass_fields__}
    return SampleSummary(**fields)


def peer(
    options: argparse.Namespace, kind: str, directory: str, samples: list[Sample], device: torch.device
) -> tuple[Callable[[], None], int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).to(device)
    model.config.use_cache = False
    parameters = sum(p.numel() for p in model.parameters())
    forward: Any = torch.compile(model) if kind == "compiled" else model
    rows = torch.tensor(np.stack([sample.tokens for sample in samples]), dtype=torch.int64, device=device)
    batches = rows.split(max(1, options.row // options.length))

    def run() -> None:
        for batch in batches:
            logits = forward(input_ids=batch, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
            loss.backward()
        model.zero_grad(set_to_none=True)

    return run, parameters


def timed(run: Callable[[], None], repeats: int, device: torch.device) -> tuple[list[float], int]:
    """(seconds of each repeat, bytes of device memory at the most)."""
    for _ in range(3):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def release(device: torch.device) -> None:
    import gc

    if "megatron.core.parallel_state" in sys.modules:
        from slime.trainer.backends.megatron import parallel

        parallel.destroy()
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def work(shape: dict[str, Any], parameters: int, samples: int, length: int) -> float:
    """Floating-point operations of a forward and backward pass over `samples` x `length` tokens."""
    # A tied embedding is the output layer too.
    matrices = parameters if shape["tie_word_embeddings"] else parameters - shape["vocab_size"] * shape["hidden_size"]
    heads = shape["num_attention_heads"] * shape["head_dim"]
    attention = shape["num_hidden_layers"] * 6 * heads * length * length
    return samples * (6.0 * matrices * length + attention)


def matmul_rate(device: torch.device) -> float:
    """Operations a second of a large bf16 matrix product."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(10):
            a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(10 * 2 * size**3 / (time.perf_counter() - started))
    return statistics.median(rates)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['device']}, matrix product {result['matmul_flops'] / 1e12:,.0f} TFLOP/s",
        f"{'':30} {'tok/s min':>11} {'median':>11} {'max':>11} {'MFU':>6} {'GiB':>6}"
        f" {'of eager':>9} {'of compiled':>12}",
    ]
    medians = {(r["shape"], r["name"]): statistics.median(r["tokens_per_second"]) for r in result["rows"]}
    for row in result["rows"]:
        rates = row["tokens_per_second"]
        median = statistics.median(rates)
        ratios = [medians.get((row["shape"], f"transformers, {kind}")) for kind in ("eager", "compiled")]
        shown = [f"{median / peer:.2f}" if peer else "-" for peer in ratios]
        lines.append(
            f"{row['shape'] + ' ' + row['name']:30} {min(rates):>11,.0f} {median:>11,.0f} {max(rates):>11,.0f} "
            f"{row['mfu']:>6.1%} {row['peak_gib']:>6.1f} {shown[0]:>9} {shown[1]:>12}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
