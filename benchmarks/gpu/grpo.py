"""GRPO on one-digit sums, from a first score below a half to a held-out one above it, through `slime train`.

    python benchmarks/gpu/grpo.py --hf-checkpoint DIR --output-dir OUT --train-backend fsdp --colocate \\
        --rollout-engine sglang --sglang-mem-fraction-static 0.5
    python benchmarks/gpu/grpo.py --hf-checkpoint DIR --output-dir OUT --rollout-engine embedded --num-rollout 2 \\
        --rollout-batch-size 2 --n-samples-per-prompt 2 --held-out 4      # no GPU: does it run

Flags that are not of this script go to `slime train` as they are. DIR: SmolLM2-135M-Instruct, or a model like it.
Prompts are reasoning_gym's chain_sum with two terms of one digit; training prompts repeat over epochs, held-out
expressions are disjoint from them. Held-out prompts are evaluated before, after, and every `--eval-interval` rollouts:
`greedy`, and `sampled` at T = 1.

OUT gets what a run leaves, and: summary.json (rewards, held-out scores, seconds by phase as medians, log-prob
difference between engine and trainer before the first update), curves.png, console.log. A failed run prints the last
lines of each log. Exit code: that of `slime train`; 3 where a held-out score did not rise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

NEEDED = ("ray", "grpc", "rich", "matplotlib", "reasoning_gym", "transformers", "torch", "yaml", "psutil")
VERSIONS = ("torch", "transformers", "ray", "sglang", "megatron-core", "reasoning-gym")
PHASES = {
    "rollout": "perf/rollout_time", "offload": "perf/offload_time", "trainer on": "perf/train_onload_time",
    "train": "perf/train_time", "trainer off": "perf/train_offload_time",
    "onload": "perf/onload_time", "sync": "perf/update_weights_time", "save": "perf/save_time",
}  # fmt: skip
DIFFERENCE = "train/train_rollout_logprob_abs_diff"
WARM_UP = 2  # steps that compile, and that medians leave out
STOP_SECONDS = 120.0


def main() -> int:
    options, rest = parse()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        return 2
    out = options.output_dir.resolve()
    out.mkdir(parents=True, exist_ok=True)
    command = training_command(options, rest, out)
    started = time.monotonic()
    code = run(command, out / "console.log", options.timeout)
    if code:
        print(f"slime train ended with {code} after {time.monotonic() - started:.0f} s; last lines of its logs:")
        print_logs(out)
        return code
    result = {
        "date": date.today().isoformat(), "hardware": hardware(), "python": platform.python_version(),
        "versions": {name: version(name) for name in VERSIONS}, "command": shlex.join(["python", *sys.argv]),
        "seconds": time.monotonic() - started,
    }  # fmt: skip
    from slime.launcher.metrics.files import is_evaluation, read_metrics

    rows = [row for row in read_metrics(out / "metrics.jsonl") if not is_evaluation(row)]
    sets = json.loads((out / "eval.json").read_text())["sets"]
    result |= summarise(rows, sets)
    (out / "summary.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(out / "curves.png", rows, sets, f"{options.train_backend}, {result['hardware']}, {result['date']}")
    print(table(result))
    print(f"{out / 'summary.json'}  {out / 'curves.png'}")
    return 0 if result["held_out_rises"] else 3


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--hf-checkpoint", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--train-backend", choices=("fsdp", "megatron"), default="fsdp")
    parser.add_argument("--loop", choices=("train", "train-async"), default="train")
    parser.add_argument("--num-rollout", type=int, default=60)
    parser.add_argument("--rollout-batch-size", type=int, default=32)
    parser.add_argument("--n-samples-per-prompt", type=int, default=8)
    parser.add_argument("--lr", default="1e-5")
    parser.add_argument(
        "--dtype", choices=("bf16", "float32"), default="bf16", help="Data type that the trainer computes in"
    )
    parser.add_argument("--held-out", type=int, help="Most held-out prompts")
    parser.add_argument("--eval-samples", type=int, default=8, help="Responses per held-out prompt at temperature 1")
    parser.add_argument("--eval-interval", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=3600.0, help="Seconds for the whole run")
    return parser.parse_known_args()


def training_command(options: argparse.Namespace, rest: list[str], out: Path) -> list[str]:
    from slime.launcher.quickstart import arithmetic

    # With negative answers, as in the runs of docs/benchmarks.
    train, held_out = arithmetic.write(out / "inputs", options.seed, negative=True)
    prompts = f"{held_out}@[0:{options.held_out}]" if options.held_out else str(held_out)
    sampled = {"name": "sampled", "path": prompts, "temperature": 1, "n_samples_per_eval_prompt": options.eval_samples}
    greedy = {"name": "greedy", "path": prompts, "temperature": 0, "n_samples_per_eval_prompt": 1}
    eval_config = out / "inputs" / "eval.yaml"
    eval_config.write_text(json.dumps({"eval": {"datasets": [sampled, greedy]}}) + "\n")  # JSON is YAML
    flags: dict[str, Any] = {
        "hf-checkpoint": options.hf_checkpoint, "output-dir": out, "prompt-data": train, "eval-config": eval_config,
        "input-key": "prompt", "label-key": "label", "rm-type": "integer", "train-backend": options.train_backend,
        "num-rollout": options.num_rollout, "rollout-batch-size": options.rollout_batch_size,
        "n-samples-per-prompt": options.n_samples_per_prompt, "eval-interval": options.eval_interval,
        "rollout-max-response-len": 16, "lr": options.lr, "adam-beta2": 0.95, "weight-decay": 0,
        "max-tokens-per-gpu": 16384, "seed": options.seed, "rollout-seed": options.seed,
    }  # fmt: skip
    switches = ["apply-chat-template", "rollout-shuffle", "rollout-skip-special-tokens", "use-dynamic-batch-size"]
    switches += ["bf16"] if options.dtype == "bf16" else []
    switches += ["no-use-tensorboard"] if importlib.util.find_spec("tensorboard") is None else []
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [
        sys.executable,
        "-m",
        "slime.launcher.cli",
        options.loop,
        *words,
        *(f"--{name}" for name in switches),
        *rest,
    ]


def run(command: list[str], log: Path, timeout: float) -> int:
    """The exit code; 124 at the timeout. What it prints goes to `log` and is shown."""
    environment = os.environ | {"COLUMNS": "160", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    )
    assert process.stdout is not None
    late = threading.Event()

    def expire() -> None:
        late.set()
        process.send_signal(signal.SIGINT)

    timers = [threading.Timer(timeout, expire), threading.Timer(timeout + STOP_SECONDS, process.kill)]
    try:
        for timer in timers:
            timer.start()
        with log.open("w") as file:
            for line in process.stdout:
                file.write(line)
                print(line, end="", flush=True)
        code = process.wait()
    except KeyboardInterrupt:
        code = process.wait(STOP_SECONDS)  # it had the signal as well
    finally:
        for timer in timers:
            timer.cancel()
    return 124 if late.is_set() else code


def print_logs(out: Path, count: int = 30) -> None:
    for path in sorted((out / "logs").glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-count:]
        print(f"--- {path.name}", *(line[:300] for line in lines), sep="\n")


def summarise(rows: list[dict[str, Any]], sets: dict[str, Any]) -> dict[str, Any]:
    rewards = [row["rollout/raw_reward"] for row in rows]
    ends = min(3, len(rows))
    timed = rows[WARM_UP:] or rows
    seconds = {name: [row.get(key) or 0.0 for row in timed] for name, key in PHASES.items()}
    seconds["ours"] = [
        row["perf/step_time"] - sum(values[i] for values in seconds.values()) for i, row in enumerate(timed)
    ]
    seconds["step"] = [row["perf/step_time"] for row in timed]
    held_out = {name: {"before": s["before"], "after": s["after"]} for name, s in sets.items()}
    return {
        "reward": {
            "first": statistics.mean(rewards[:ends]), "last": statistics.mean(rewards[-ends:]), "steps": ends,
            "all": rewards,
        },
        "held_out": held_out,
        "held_out_rises": all(score["after"] > score["before"] for score in held_out.values()),
        "first_score_in_range": 0.05 <= rewards[0] <= 0.5,
        "phase_seconds": {
            name: {"min": min(v), "median": statistics.median(v), "max": max(v)} for name, v in seconds.items()
        },
        # A fully asynchronous loop generates beside its steps.
        "tokens_per_second": statistics.median(
            row.get("perf/tokens_per_second") or row["rollout/trained_tokens"] / row["perf/step_time"] for row in timed
        ),
        "logprob_abs_diff_before_first_update": rows[0].get(DIFFERENCE),
        "logprob_abs_diff_median": statistics.median([row[DIFFERENCE] for row in rows if DIFFERENCE in row] or [0.0]),
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    reward = result["reward"]
    lines = [f"reward of rollouts   {reward['first']:.3f} -> {reward['last']:.3f}   (means of {reward['steps']})"]
    lines += [f"held out, {n:<10} {s['before']:.3f} -> {s['after']:.3f}" for n, s in result["held_out"].items()]
    difference = result["logprob_abs_diff_before_first_update"]
    shown = "no group whose rewards differ" if difference is None else f"{difference:.5f}"
    lines += [
        f"first score within 0.05 to 0.5: {result['first_score_in_range']}",
        f"mean |log-prob difference|, engine to trainer, before the first update: {shown}",
        f"{'seconds':<12}{'min':>9}{'median':>9}{'max':>9}",
    ]
    for name, value in result["phase_seconds"].items():
        lines.append(f"{name:<12}{value['min']:>9.3f}{value['median']:>9.3f}{value['max']:>9.3f}")
    return "\n".join(lines)


def plot(path: Path, rows: list[dict[str, Any]], sets: dict[str, Any], title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), dpi=120)
    steps = [row["step"] for row in rows]
    left.plot(steps, [row["rollout/raw_reward"] for row in rows], color="#4477aa", alpha=0.6, label="rollouts")
    for (name, scores), color in zip(sorted(sets.items()), ("#ee6677", "#228833"), strict=False):
        points = [(point["step"], point["score"]) for point in scores["history"]]
        left.plot(*zip(*points, strict=True), color=color, marker="s", linestyle="--", label=f"held out, {name}")
    left.set(xlabel="updates", ylabel="share of right answers", ylim=(0, 1), title=title)
    left.legend(frameon=False)
    differences = [(row["step"], row[DIFFERENCE]) for row in rows if DIFFERENCE in row]
    if differences:
        right.plot(*zip(*differences, strict=True), color="#aa3377")
    right.set(xlabel="updates", title="mean |log-prob difference|, engine to trainer")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def hardware() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"


if __name__ == "__main__":
    sys.exit(main())
