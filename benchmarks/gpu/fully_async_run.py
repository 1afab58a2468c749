"""Tokens a second of `slime train-async --fully-async` against `slime train`, on two GPUs: an engine and a trainer.

    python benchmarks/gpu/fully_async_run.py --hf-checkpoint DIR --output-dir OUT [--staleness 4] [FLAGS of slime train]
    python benchmarks/gpu/fully_async_run.py --hf-checkpoint DIR --output-dir OUT --rollout-engine embedded --steps 3 \\
        --groups 2 --samples 2 --mean 4 --longest 16        # no GPU: does it run

Responses have log-normal lengths, the same in every run, with the end of sequence ignored: each is generated for as
many tokens as the number of its sample says. Tokens a second are those that were trained on, by the time of the steps
behind the first `--warm-up` ones, in which layers are compiled and an asynchronous run fills its buffer; `all` is over
every step. late: steps behind those whose training took three times the median, as one that compiles does. A run that
outlasts `--timeout` is ended with all of its processes. OUT gets a directory for each run, and summary.json.

Whether the reward suffers is another question:

    python benchmarks/gpu/grpo.py --hf-checkpoint DIR --output-dir OUT/sync
    python benchmarks/gpu/grpo.py --hf-checkpoint DIR --output-dir OUT/async --loop train-async --fully-async \\
        --max-staleness 4 --use-tis
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

STOP_SECONDS = 60.0
GENERATE = """
import json, os
from slime.rollout.sglang_rollout import generate as generate_tokens

LENGTHS = json.loads(open(os.path.join(os.path.dirname(__file__), "lengths.json")).read())

async def generate(args, sample, sampling_params):
    length = LENGTHS[sample.index % len(LENGTHS)]
    return await generate_tokens(args, sample, sampling_params | {"max_new_tokens": length, "ignore_eos": True})
"""


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--hf-checkpoint", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--synchronous-steps", type=int, help="Steps of the synchronous run (default: --steps)")
    parser.add_argument("--warm-up", type=int, default=6, help="First steps that are not measured")
    parser.add_argument("--groups", type=int, default=16, help="Groups per step")
    parser.add_argument("--samples", type=int, default=8, help="Samples per group")
    parser.add_argument("--mean", type=float, default=512.0, help="Mean length of a response in tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="Standard deviation of the logarithm of the lengths")
    parser.add_argument("--longest", type=int, default=8192, help="Longest response in tokens")
    parser.add_argument("--staleness", type=int, nargs="+", default=[4])
    parser.add_argument("--no-one-step-off", action="store_true", help="Leave out the run that is one step off")
    parser.add_argument("--policy", choices=("wait", "drop", "keep"), default="wait")
    parser.add_argument("--timeout", type=float, default=1800.0, help="Seconds for each run")
    return parser.parse_known_args()


def write_inputs(options: argparse.Namespace) -> list[str]:
    """Writes prompts, lengths and the function that generates by them; returns the flags that all runs share."""
    inputs = options.output_dir.resolve() / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    count = options.steps * options.groups * options.samples
    drawn = np.random.default_rng(0).lognormal(np.log(options.mean) - options.sigma**2 / 2, options.sigma, count)
    (inputs / "lengths.json").write_text(json.dumps([int(min(max(1, n), options.longest)) for n in drawn]))
    (inputs / "generate.py").write_text(GENERATE)
    rows = [{"prompt": f"Write about the number {n}.", "label": "1"} for n in range(options.groups * options.steps)]
    (inputs / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags: dict[str, Any] = {
        "hf-checkpoint": options.hf_checkpoint.resolve(), "prompt-data": inputs / "prompts.jsonl",
        "input-key": "prompt", "label-key": "label", "rm-type": "random",
        "custom-generate-function-path": f"{inputs / 'generate.py'}:generate", "rollout-batch-size": options.groups,
        "n-samples-per-prompt": options.samples, "rollout-max-response-len": options.longest, "lr": "1e-6",
        "max-tokens-per-gpu": 16384,
    }  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))] + ["--use-dynamic-batch-size"]


def measure(name: str, loop: str, flags: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Runs once; exits with the code of a run that fails."""
    out = options.output_dir.resolve() / name
    steps = options.synchronous_steps or options.steps if loop == "train" else options.steps
    command = [sys.executable, "-m", "slime.launcher.cli", loop, "--output-dir", str(out), "--overwrite", *flags]
    command += ["--num-rollout", str(steps)]
    print(shlex.join(command), flush=True)
    code = run(command, options.timeout)
    if code:
        sys.exit(code)
    from slime.launcher.metrics.files import is_evaluation, read_metrics

    every = [row for row in read_metrics(out / "metrics.jsonl") if not is_evaluation(row)]
    rows = every[min(options.warm_up, len(every) - 1) :]
    keys = ("rollout/staleness", "rollout/staleness/max", "rollout/dropped_stale", "perf/rollout_wait_time",
            "perf/engine_wait_time", "perf/train_time", "perf/update_weights_time")  # fmt: skip
    means = {key: float(np.mean([row[key] for row in rows])) for key in keys if all(key in row for row in rows)}
    train_seconds = [row["perf/train_time"] for row in rows]
    late = sum(seconds > 3 * float(np.median(train_seconds)) for seconds in train_seconds)
    return {
        "tokens_per_second": rate(rows), "all": rate(every), "measured_steps": len(rows), "late": late,
        "step_seconds": float(np.mean([row["perf/step_time"] for row in rows])),
        "train_seconds": [round(row["perf/train_time"], 3) for row in every],
    } | means  # fmt: skip


def rate(rows: list[dict[str, Any]]) -> float:
    """Trained tokens a second."""
    tokens, seconds = (sum(row[key] for row in rows) for key in ("rollout/trained_tokens", "perf/step_time"))
    return float(tokens / seconds)


def run(command: list[str], timeout: float) -> int:
    """Returns the exit code; 124 after `timeout`, when all processes of the run are ended."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        # The launcher ends Ray and the engines, which are in groups of their own.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    options, rest = parse()
    shared = [*write_inputs(options), *rest]
    results = {"synchronous": measure("synchronous", "train", shared, options)}
    if not options.no_one_step_off:
        results["one_step_off"] = measure("one_step_off", "train-async", [*shared, "--use-tis"], options)
    for staleness in options.staleness:
        flags = ["--fully-async", "--max-staleness", str(staleness), "--staleness-policy", options.policy, "--use-tis"]
        results[f"staleness_{staleness}"] = measure(f"staleness_{staleness}", "train-async", shared + flags, options)
    base = results["synchronous"]
    for result in results.values():
        result["ratio"] = result["tokens_per_second"] / base["tokens_per_second"]
        result["ratio_of_all"] = result["all"] / base["all"]
    summary = {"date": date.today().isoformat(), "command": shlex.join(["python", *sys.argv]), "results": results}
    (options.output_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
