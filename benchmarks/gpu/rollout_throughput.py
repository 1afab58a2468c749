"""Output tokens a second through the whole rollout path, against a bare HTTP client on the same engine.

    python benchmarks/gpu/rollout_throughput.py --hf-checkpoint DIR [--sglang-mem-fraction-static 0.7 ...]
    python benchmarks/gpu/rollout_throughput.py --hf-checkpoint DIR --engine-url http://127.0.0.1:30000
    python benchmarks/gpu/rollout_throughput.py --hf-checkpoint DIR --canned        # no GPU: our side's ceiling

rollout path   RolloutClient.generate: gRPC to the service, groups leased from slime-buffer (another process),
               tokenised, generated, scored, completed into the buffer, metrics computed
bare client    aiohttp, one prompt a request, the answer's JSON parsed and its tokens counted, nothing else

Both send the same prompts with the same sampling parameters and end of sequence ignored, in turns, `--repeats` times
for each number of samples in flight; before, a short round warms both up. CPU seconds are those of this process, in
which the rollout service and the bare client run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp

from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.keys import engine_headers
from slime.rollout.engines.process import stop_all
from slime.rollout.engines.sglang.flags import SGLANG_FLAGS
from slime.rollout.launch import close_state, open_state, start_engines
from slime.rollout.service import RolloutService
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.clients import BufferClient, RolloutClient
from slime.types.rpc import RpcSettings, Server
from slime.types.rpc.garbage import spare_long_lived
from slime.types.rpc.token_files import write_private
from slime.types.settings import Parser
from slime.v1 import rollout_pb2_grpc

WORDS = "the of and to in is that it was for on are as with his they at be this from have or by one had not".split()
DEADLINE = 3600.0


@dataclass
class TimedRun:
    """One measurement. seconds: of wall time; cpu: of this process."""

    tokens: int
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def main() -> None:
    options, settings = read_options()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url, engine = options.engine_url.rstrip("/"), "at --engine-url"
        if options.canned:
            url, engine = stack.enter_context(canned(directory, options)), "canned answers"
        elif not url:
            engines = start_engines(settings)
            stack.callback(stop_all, engines)
            url, engine = engines[0].url, engines[0].kind
            options.api_key_file = str(directory / "key")
            write_private(Path(options.api_key_file), engines[0].api_key or "")
        rows = [measure(options, url, directory, in_flight) for in_flight in options.in_flight]
    report = {
        "benchmark": "rollout_throughput",
        "date": str(date.today()),
        "command": " ".join(["python", *sys.argv]),
        "hardware": hardware(),
        "versions": versions(),
        "new_tokens": options.new_tokens,
        "prompt_words": options.prompt_words,
        "group": options.group,
        "engine": engine,
        "rows": rows,
    }
    print_table(report)
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=2) + "\n")


def read_options() -> tuple[argparse.Namespace, RolloutSettings]:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--hf-checkpoint", required=True, help="Directory of the tokenizer, and of the model where an engine is started"
    )
    parser.add_argument("--engine-url", default="", help="Address of an engine that runs already")
    parser.add_argument("--api-key-file", help="File with the key of that engine")
    parser.add_argument("--canned", action="store_true", help="Measure against an engine that answers at once")
    parser.add_argument(
        "--canned-delay-ms", type=float, default=0.0, help="Time that this engine waits with each answer"
    )
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256, 1024])
    parser.add_argument(
        "--rounds", type=int, default=2, help="Samples of a measurement, in multiples of those in flight"
    )
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompt-words", type=int, default=60)
    parser.add_argument("--group", type=int, default=8, help="Samples per prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", default="", help="JSON file to write")
    SGLANG_FLAGS.add_flags(parser)
    options = parser.parse_strict()
    given = getattr(options, "sglang_args", {})
    one = 1 if visible_gpus() else None
    return options, RolloutSettings(hf_checkpoint=options.hf_checkpoint, rollout_num_gpus=one, sglang_args=given)


@contextlib.contextmanager
def canned(directory: Path, options: argparse.Namespace) -> Iterator[str]:
    """The URL of an engine that answers at once."""
    port = directory / "port"
    script = Path(__file__).with_name("canned_engine.py")
    flags = ["--tokens", str(options.new_tokens), "--delay-ms", str(options.canned_delay_ms)]
    with process([sys.executable, str(script), str(port), *flags]):
        wait_for(port.exists, "the canned engine")
        yield f"http://127.0.0.1:{port.read_text()}"


@contextlib.contextmanager
def process(argv: list[str], **kwargs: Any) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(argv, text=True, **kwargs)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(30)


def wait_for(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not start in 60 s")
        time.sleep(0.02)


def measure(options: argparse.Namespace, url: str, directory: Path, in_flight: int) -> dict[str, Any]:
    samples = max(options.group, in_flight * options.rounds) // options.group * options.group
    groups = samples // options.group
    rounds = options.repeats + 1
    prompts = make_prompts(directory / f"prompts-{in_flight}.jsonl", groups * rounds, options.prompt_words)
    address = url.split("://")[1]
    settings = RolloutSettings(
        hf_checkpoint=options.hf_checkpoint,
        rollout_external_engine_addrs=[address],
        rollout_engine_api_key_file=options.api_key_file,
        rollout_max_response_len=options.new_tokens,
        n_samples_per_prompt=options.group,
        rollout_batch_size=groups,
        sglang_server_concurrency=in_flight,
        rm_type="integer",
    )
    bare: list[TimedRun] = []
    ours: list[TimedRun] = []
    with running_buffer(prompts, options.group) as buffer_address:
        state = open_state(settings)
        state.sampling_params["ignore_eos"] = True
        spare_long_lived(collect_rarely=True)
        service = RolloutService(settings, state, buffer_address, RpcSettings())
        server = Server(
            [(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, service)],
            RpcSettings(),
            service_names=["slime.v1.RolloutService"],
        )
        try:
            with BufferClient(buffer_address) as buffer, RolloutClient(server.start()) as client:
                client.writer = buffer.open_run("benchmark")
                ids = token_ids(state, prompts, groups)
                for number in range(rounds):
                    ours.append(timed(through_the_rollout, client, number, groups))
                    batch = [ids[number * groups + i // options.group] for i in range(samples)]
                    bare.append(timed(by_hand, url, batch, state.sampling_params, in_flight))
        finally:
            server.stop(0)
            close_state(state)
    # The first round of each opened connections, filled caches, compiled.
    return row(in_flight, samples, bare[1:], ours[1:])


def row(in_flight: int, samples: int, bare: list[TimedRun], ours: list[TimedRun]) -> dict[str, Any]:
    ratios = [o.rate / b.rate for o, b in zip(ours, bare, strict=True)]
    return {
        "in_flight": in_flight,
        "samples": samples,
        "bare": spread([r.rate for r in bare]),
        "rollout": spread([r.rate for r in ours]),
        "ratio": spread(ratios),
        "bare_tokens_per_cpu_second": spread([r.tokens / r.cpu for r in bare]),
        "rollout_tokens_per_cpu_second": spread([r.tokens / r.cpu for r in ours]),
    }


def spread(values: list[float]) -> list[float]:
    """Least, median, most."""
    ordered = sorted(values)
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def timed(function: Callable[..., int], *args: Any) -> TimedRun:
    started, cpu = time.perf_counter(), time.process_time()
    tokens = function(*args)
    return TimedRun(tokens, time.perf_counter() - started, time.process_time() - cpu)


def through_the_rollout(client: RolloutClient, number: int, groups: int) -> int:
    result = client.generate(number, groups, timeout=DEADLINE)
    return round(result.metrics["perf/tokens_per_second"] * result.metrics["perf/rollout_time"])


def by_hand(url: str, prompts: list[list[int]], params: dict[str, Any], in_flight: int) -> int:
    return asyncio.run(_by_hand(url, prompts, params, in_flight))


async def _by_hand(url: str, prompts: list[list[int]], params: dict[str, Any], in_flight: int) -> int:
    gate = asyncio.Semaphore(in_flight)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=DEADLINE)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=engine_headers(url)) as session:

        async def one(prompt: list[int]) -> int:
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            async with gate, session.post(url + "/generate", json=body) as response:
                response.raise_for_status()
                return len((await response.json())["meta_info"]["output_token_logprobs"])

        return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def make_prompts(file: Path, count: int, words: int) -> Path:
    rng = random.Random(0)
    lines = [json.dumps({"input": " ".join(rng.choices(WORDS, k=words)), "label": "1"}) for _ in range(count)]
    file.write_text("\n".join(lines) + "\n")
    return file


def token_ids(state: Any, prompts: Path, groups: int) -> list[list[int]]:
    texts = [json.loads(line)["input"] for line in prompts.read_text().splitlines()]
    return [list(state.tokenizer.encode(text, add_special_tokens=False)) for text in texts]


@contextlib.contextmanager
def running_buffer(prompts: Path, group: int) -> Iterator[str]:
    flags = ["--prompt-data", str(prompts), "--label-key", "label", "--n-samples-per-prompt", str(group)]
    argv = [sys.executable, "-m", "slime.buffer.cli", "serve", *flags]
    with process(argv, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line.startswith("listening on "):
            raise RuntimeError(f"slime-buffer did not start: {line!r}")
        yield line.split()[-1]


def hardware() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        names = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")
        return {"gpu": [name for name in names if name], "cpus": os.cpu_count(), "machine": platform.machine()}
    return {"gpu": [], "cpus": os.cpu_count(), "machine": platform.machine()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("sglang", "torch", "aiohttp", "orjson", "grpcio", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def print_table(report: dict[str, Any]) -> None:
    print(f"{report['date']}  {report['hardware']}  {report['versions']}")
    print(f"engine: {report['engine']}, {report['new_tokens']} new tokens, groups of {report['group']}")
    print("least - median - most")
    heads = f"{'bare tok/s':^26} {'rollout tok/s':^26} {'ratio':^20} {'tok per CPU second':^22}"
    print(f"{'in flight':>9} {'samples':>8}  {heads}")
    for entry in report["rows"]:
        bare, ours = (" - ".join(f"{value:,.0f}" for value in entry[key]) for key in ("bare", "rollout"))
        ratio = " - ".join(f"{value:.2f}" for value in entry["ratio"])
        cpu = f"{entry['bare_tokens_per_cpu_second'][1]:,.0f} / {entry['rollout_tokens_per_cpu_second'][1]:,.0f}"
        print(f"{entry['in_flight']:>9} {entry['samples']:>8}  {bare:^26} {ours:^26} {ratio:^20} {cpu:^22}")


if __name__ == "__main__":
    main()
