"""Output tokens a second of the embedded engine, beside transformers and llama.cpp, on one machine.

    python benchmarks/rollout/engine.py                              # random weights of SmolLM2-135M's shape
    python benchmarks/rollout/engine.py --model DIR --gguf FILE --llama-python VENV/bin/python
    python benchmarks/rollout/engine.py --peers --dtypes float32 --stream-intervals 0 8 64

embedded       the engine as a process of its own, one HTTP request for each sample, `--in-flight` at a time, log-probs
               returned; groups of `--group` samples have a prompt in common
               with --stream-intervals once for each number of tokens between two pieces of an answer; 0: whole answers
transformers   `generate` in this process, batches of `--in-flight` prompts, each batch until its last token
llama.cpp      its HTTP server with as many slots, asked as the embedded engine is, without log-probs; `--llama-python`
               has xllamacpp and gguf installed, and `--gguf` is the same model

All take the same prompts, sample at temperature 1 over the whole vocabulary, and end at `--new-tokens`. They take turns
for `--repeats` rounds; a short one before warms each up. CPU seconds are those of the process that computes; on a busy
machine take `--threads 1`: threads that wait for one another use them up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil

from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.streams import StreamedAnswers

VOCABULARY = 49152
SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=2,
)  # fmt: skip
Prompts = list[list[int]]
Generate = Callable[[Prompts, int], None]


@dataclass(frozen=True)
class Contestant:
    """run: generates so many tokens for each prompt. pid: of the process that computes."""

    name: str
    pid: int
    run: Generate


@dataclass(frozen=True)
class Round:
    """Tokens in a second of wall time, and in a second of CPU time: a busy machine leaves the latter alone."""

    per_second: float
    per_cpu_second: float


def main() -> None:
    options = parse()
    rng = np.random.default_rng(0)
    distinct = rng.integers(10, VOCABULARY, (options.samples // options.group, options.prompt_tokens)).tolist()
    prompts = [prompt for prompt in distinct for _ in range(options.group)]
    with contextlib.ExitStack() as stack:
        directory = options.model or write_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        kinds = [(dtype, interval) for dtype in options.dtypes for interval in options.stream_intervals or [None]]
        contestants = [stack.enter_context(embedded(directory, *kind, options)) for kind in kinds]
        contestants += [generate(directory, dtype, options) for dtype in options.peers]
        if options.llama_python:
            contestants += [stack.enter_context(llama_cpp(kind, options)) for kind in options.llama_types]
        for contestant in contestants:
            contestant.run(prompts[: options.in_flight], 8)
        rounds: dict[str, list[Round]] = {contestant.name: [] for contestant in contestants}
        for _ in range(options.repeats):
            for contestant in contestants:
                start, cpu = time.perf_counter(), cpu_seconds(contestant.pid)
                contestant.run(prompts, options.new_tokens)
                seconds, cpu = time.perf_counter() - start, cpu_seconds(contestant.pid) - cpu
                tokens = len(prompts) * options.new_tokens
                rounds[contestant.name].append(Round(tokens / seconds, tokens / cpu))
                print(contestant.name, rounds[contestant.name][-1], file=sys.stderr)
    report(rounds, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face directory")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="Data type of the embedded engine")
    parser.add_argument("--stream-intervals", nargs="*", type=int, default=[])
    parser.add_argument("--peers", nargs="*", default=["bfloat16", "float32"], help="Data types of transformers")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--llama-python", type=Path)
    parser.add_argument("--llama-types", nargs="+", default=["BF16", "Q8_0"])
    parser.add_argument("--json", type=Path, help="File to write the numbers to as well")
    return parser.parse_args()


def write_model(directory: Path) -> Path:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2").save_pretrained(directory)
    return directory


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def embedded(directory: Path, dtype: str, interval: int | None, options: argparse.Namespace) -> Iterator[Contestant]:
    engine_options = EmbeddedOptions(model_path=str(directory), dtype=dtype, threads=options.threads)
    with start_embedded(engine_options) as engine:
        engine.wait_ready(300)

        def body(prompt: list[int], new_tokens: int, seed: int) -> dict[str, Any]:
            params = {"max_new_tokens": new_tokens, "ignore_eos": True, "sampling_seed": seed}
            return {"input_ids": prompt, "sampling_params": params, "return_logprob": True}

        def run(prompts: Prompts, new_tokens: int) -> None:
            count = lambda answer: len(answer["output_ids"])  # noqa: E731
            asyncio.run(ask(f"{engine.url}/generate", prompts, new_tokens, body, count, options.in_flight))

        def run_in_pieces(prompts: Prompts, new_tokens: int) -> None:
            asyncio.run(ask_in_pieces(engine.url, prompts, new_tokens, interval or 0, options.in_flight))

        if interval is None:
            yield Contestant(f"embedded, {dtype}", engine.pid, run)
        else:
            yield Contestant(f"embedded, {dtype}, pieces of {interval} tokens", engine.pid, run_in_pieces)


@contextlib.contextmanager
def llama_cpp(kind: str, options: argparse.Namespace) -> Iterator[Contestant]:
    context = options.prompt_tokens + options.new_tokens + 8
    command = [options.llama_python, Path(__file__).with_name("llama_server.py"), "--gguf", options.gguf]
    command += ["--type", kind, "--parallel", options.in_flight, "--context", context, "--threads", options.threads]
    with subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        url = server.stdout.readline().strip()

        def body(prompt: list[int], new_tokens: int, seed: int) -> dict[str, Any]:
            sampling = {"temperature": 1.0, "samplers": ["temperature"], "seed": seed, "ignore_eos": True}
            return {"prompt": prompt, "max_tokens": new_tokens, "cache_prompt": True, **sampling}

        def run(prompts: Prompts, new_tokens: int) -> None:
            count = lambda answer: answer["usage"]["completion_tokens"]  # noqa: E731
            asyncio.run(ask(f"{url}/v1/completions", prompts, new_tokens, body, count, options.in_flight))

        yield Contestant(f"llama.cpp, {kind}", server.pid, run)
        server.stdin.close()
        server.kill()


async def ask(
    url: str,
    prompts: Prompts,
    new_tokens: int,
    body: Callable[[list[int], int, int], dict[str, Any]],
    count: Callable[[Any], int],
    in_flight: int,
) -> None:
    """Raises RuntimeError where an answer has another number of tokens."""
    room = asyncio.Semaphore(in_flight)
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def one(seed: int, prompt: list[int]) -> None:
            async with room, session.post(url, json=body(prompt, new_tokens, seed)) as response:
                answer = await response.json(content_type=None)
            if response.status != 200 or count(answer) != new_tokens:
                raise RuntimeError(f"{url}: {response.status} {str(answer)[:300]}")

        await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts)))


async def ask_in_pieces(url: str, prompts: Prompts, new_tokens: int, interval: int, in_flight: int) -> None:
    """Raises RuntimeError where an answer has another number of tokens. interval: 0 for whole answers."""
    room = asyncio.Semaphore(in_flight)
    async with EngineClient(url) as client:

        async def one(seed: int, prompt: list[int]) -> None:
            params: dict[str, Any] = {"max_new_tokens": new_tokens, "ignore_eos": True, "sampling_seed": seed}
            async with room:
                if interval:
                    pieces = StreamedAnswers(1)
                    params["stream_interval"] = interval
                    answer = await client.generate(prompt, params, streamed=pieces, incremental=True)
                else:
                    answer = await client.generate(prompt, params)
            if len(answer["output_ids"]) != new_tokens:
                raise RuntimeError(f"{url}: {str(answer)[:300]}")

        await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts)))


def generate(directory: Path, dtype: str, options: argparse.Namespace) -> Contestant:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def run(prompts: Prompts, new_tokens: int) -> None:
        for start in range(0, len(prompts), options.in_flight):
            ids = torch.tensor(prompts[start : start + options.in_flight])
            with torch.inference_mode():
                output = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0,
                )  # fmt: skip
            assert output.shape[1] == ids.shape[1] + new_tokens

    return Contestant(f"transformers, {dtype}", os.getpid(), run)


def report(rounds: dict[str, list[Round]], options: argparse.Namespace) -> None:
    print(
        f"{options.samples} samples, {options.in_flight} in flight, prompts of {options.prompt_tokens} tokens for "
        f"{options.group} each, {options.new_tokens} new tokens, {options.threads} threads\n"
    )
    print("| | tokens/s, median (least - most) | tokens a CPU second, most |\n|---|---|---|")
    for name, each in rounds.items():
        speeds = [one.per_second for one in each]
        middle, cpu = statistics.median(speeds), max(one.per_cpu_second for one in each)
        print(f"| {name} | {middle:,.0f} ({min(speeds):,.0f} - {max(speeds):,.0f}) | {cpu:,.0f} |")
    if options.json:
        numbers = {name: [vars(one) for one in each] for name, each in rounds.items()}
        settings = {name: str(value) for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": settings, "rounds": numbers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
