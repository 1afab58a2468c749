"""GRPO on word problems with a model of 0.5B: right answers to held-out problems, before and after, with several seeds.

    python benchmarks/yardstick/fetch_model.py MODEL_DIR
    python benchmarks/yardstick/gsm_symbolic.py --hf-checkpoint MODEL_DIR --output-dir OUT --colocate \\
        --rollout-engine sglang --sglang-mem-fraction-static 0.4
    python benchmarks/yardstick/gsm_symbolic.py --hf-checkpoint MODEL_DIR --output-dir OUT --rollout-engine embedded \\
        --seeds 0 --num-rollout 1 --rollout-batch-size 2 --held-out 4 --max-tokens 64      # no GPU: does it run

The problems are reasoning_gym's gsm_symbolic, 100 templates of GSM8K with other names and numbers. Those that are
held out come from other seeds and are answered greedily. The recipe is that of the run on GSM8K that slime published
(pull request 1835): 100 rollouts of 20 prompts with 8 samples each. That run went from 43.6 to 50.2 % in 71 minutes on
a GB10. Flags that are not of this script go to `slime train` as they are.

OUT gets a directory for each seed, with what a run leaves; seeds that have finished there are not run again. And:
summary.json, curves.png (mean and range over seeds). Exit code: that of a `slime train` that failed; 3 where the mean
gain is below the published one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import reasoning_gym

PUBLISHED_GAIN, PUBLISHED_MINUTES = 6.6, 71
VERSIONS = ("torch", "transformers", "ray", "sglang", "megatron-core", "reasoning_gym")
HELD_OUT_SEED = 1_000_000_000  # a data set draws its problem i from its seed + i
ASK = "\nReason step by step, and put the final answer in \\boxed{}."


def main() -> int:
    options, rest = parse()
    for seed in options.seeds:
        out = options.output_dir.resolve() / f"seed-{seed}"
        if (out / "yardstick.json").exists():
            continue
        command = training_command(options, rest, out, seed)
        print(shlex.join(command), flush=True)
        started = time.monotonic()
        if code := run(command):
            return code
        noted = json.loads((out / "versions.json").read_text())
        about = {
            "date": date.today().isoformat(), "hardware": hardware(), "seconds": time.monotonic() - started,
            "command": shlex.join(["python", *sys.argv]),
            "versions": {"python": noted["python"]} | {name: noted["packages"].get(name) for name in VERSIONS},
        }  # fmt: skip
        (out / "yardstick.json").write_text(json.dumps(about, indent=1) + "\n")
    runs = {seed: read_run(options.output_dir / f"seed-{seed}") for seed in options.seeds}
    gain = statistics.mean(run["gain"] for run in runs.values())
    summary = {"gain": gain, "published_gain": PUBLISHED_GAIN, "seeds": runs}
    (options.output_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    plot(options.output_dir / "curves.png", runs)
    print(table(runs))
    print(f"mean gain {gain:.1f} points; published: {PUBLISHED_GAIN} points in {PUBLISHED_MINUTES} minutes")
    return 0 if gain >= PUBLISHED_GAIN else 3


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--hf-checkpoint", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num-rollout", type=int, default=100)
    parser.add_argument("--rollout-batch-size", type=int, default=20)
    parser.add_argument("--n-samples-per-prompt", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512, help="Most tokens of an answer")
    parser.add_argument("--held-out", type=int, default=1000, help="Held-out problems")
    parser.add_argument("--eval-interval", type=int, default=20)
    parser.add_argument("--lr", default="3e-6")
    parser.add_argument("--train-backend", choices=("fsdp", "megatron"), default="fsdp")
    return parser.parse_known_args()


def training_command(options: argparse.Namespace, rest: list[str], out: Path, seed: int) -> list[str]:
    inputs = options.output_dir.resolve() / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    train, held_out = inputs / f"train-{seed}.jsonl", inputs / "held_out.jsonl"
    count = options.num_rollout * options.rollout_batch_size
    write_problems(train, count, seed * count)
    write_problems(held_out, options.held_out, HELD_OUT_SEED)
    flags: dict[str, Any] = {
        "hf-checkpoint": options.hf_checkpoint.resolve(), "output-dir": out, "train-backend": options.train_backend,
        "prompt-data": train, "input-key": "prompt", "label-key": "label", "rm-type": "math",
        "num-rollout": options.num_rollout, "rollout-batch-size": options.rollout_batch_size,
        "n-samples-per-prompt": options.n_samples_per_prompt, "rollout-max-response-len": options.max_tokens,
        "eval-interval": options.eval_interval, "eval-temperature": 0, "n-samples-per-eval-prompt": 1,
        "lr": options.lr, "adam-beta2": 0.98, "max-tokens-per-gpu": 8192, "seed": seed, "rollout-seed": seed,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words += ["--eval-prompt-data", "held_out", str(held_out), "--apply-chat-template", "--use-dynamic-batch-size"]
    return [sys.executable, "-m", "slime.launcher.cli", "train", *words, *rest]


def run(command: list[str]) -> int:
    """Returns the exit code. An interruption reaches the command, too, which ends all that it began."""
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                pass


def write_problems(path: Path, count: int, seed: int) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": problem["question"] + ASK}], "label": problem["answer"]}
        for problem in reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=seed)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_run(out: Path) -> dict[str, Any]:
    """Returns the scores of a finished run in percent, its rewards and its seconds."""
    from slime.launcher.metrics.files import is_evaluation, read_metrics

    rows = [row for row in read_metrics(out / "metrics.jsonl") if not is_evaluation(row)]
    scores = json.loads((out / "eval.json").read_text())["sets"]["held_out"]
    before, after = 100 * scores["before"], 100 * scores["after"]
    return json.loads((out / "yardstick.json").read_text()) | {
        "before": before, "after": after, "gain": after - before,
        "held_out": [[point["step"], 100 * point["score"]] for point in scores["history"]],
        "rewards": [row["rollout/raw_reward"] for row in rows],
        "step_seconds": statistics.median(row["perf/step_time"] for row in rows),
        "response_tokens": [row["rollout/response_lengths"] for row in rows if "rollout/response_lengths" in row],
    }  # fmt: skip


def table(runs: dict[int, dict[str, Any]]) -> str:
    lines = [f"{'seed':>4} {'before':>8} {'after':>8} {'gain':>6} {'minutes':>8} {'s/step':>7}"]
    for seed, run in runs.items():
        lines.append(
            f"{seed:>4} {run['before']:>7.1f}% {run['after']:>7.1f}% {run['gain']:>6.1f} {run['seconds'] / 60:>8.1f} "
            f"{run['step_seconds']:>7.2f}"
        )
    return "\n".join(lines)


def plot(path: Path, runs: dict[int, dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    every = {
        "training problems, T = 1": [[(i, 100 * r) for i, r in enumerate(run["rewards"])] for run in runs.values()],
        "held-out problems, greedy": [run["held_out"] for run in runs.values()],
    }
    for (label, curves), color, marker in zip(every.items(), ("#4477aa", "#ee6677"), ("", "s"), strict=True):
        common = sorted(set.intersection(*({step for step, _ in curve} for curve in curves)))
        values = [[dict(curve)[step] for curve in curves] for step in common]
        axes.fill_between(common, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.2, lw=0)
        axes.plot(common, [statistics.mean(v) for v in values], color=color, marker=marker, label=label)
    first = next(iter(runs.values()))
    seeds = "1 seed" if len(runs) == 1 else f"mean and range of {len(runs)} seeds"
    axes.set(xlabel="rollouts", ylabel="right answers in %", title=f"gsm_symbolic, {first['hardware']}, {seeds}")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def hardware() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores"
    return torch.cuda.get_device_name(0)


if __name__ == "__main__":
    sys.exit(main())
