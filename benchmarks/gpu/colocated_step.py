"""Seconds of a whole training step on one GPU that trainer and SGLang share, by phase, through `slime train`.

    python benchmarks/gpu/colocated_step.py --output-dir OUT [--shape 0.6b] [--steps 8] [--offload] [FLAGS]

A step generates 160 samples of 512 new tokens (20 prompts of 64 tokens, 8 samples each), trains on all of them in one
update, and sends the weights. Weights are random, so are the rewards: every response has its full length. FLAGS go to
`slime train`. OUT gets what a run leaves, and step.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shlex
import statistics
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from grpo import VERSIONS, hardware, print_logs, run, version
from workload import SHAPES, write_model

# The phases of a step, in the order of time; "of which" are parts of the phase before them.
PHASES = {
    "rollout": "perf/rollout_time", "engines' memory off": "perf/offload_time", "train step": "",
    "  of which plan": "perf/plan_time", "  memory back": "perf/train_onload_time", "  samples": "perf/train_data_time",
    "  log-probs": "perf/log_probs_time", "  update": "perf/actor_train_time",
    "  memory off": "perf/train_offload_time", "engines' memory on": "perf/onload_time",
    "weight update": "perf/update_weights_time",
}  # fmt: skip
WARM_UP = 3


def main() -> int:
    options, rest = parse()
    out = options.output_dir.resolve()
    out.mkdir(parents=True, exist_ok=True)
    model = options.models / options.shape
    write_model(model, options.shape, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    write_tokenizer(model, SHAPES[options.shape][1]["vocab_size"])
    command = training_command(options, rest, model, out)
    code = run(command, out / "console.log", options.timeout)
    if code:
        print_logs(out)
        return code
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "perf/step_time" in row]
    result: dict[str, Any] = {
        "date": date.today().isoformat(), "hardware": hardware(), "python": platform.python_version(),
        "versions": {name: version(name) for name in VERSIONS}, "command": shlex.join(["python", *sys.argv]),
        "steps": [{name: value for name, value in row.items() if isinstance(value, int | float)} for row in steps],
    }  # fmt: skip
    (out / "step.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(steps[WARM_UP:] or steps))
    for log in sorted((out / "logs").glob("*.log")):
        print(*(line for line in log.read_text(errors="replace").splitlines() if "--offload-train" in line), sep="\n")
    return 0


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument(
        "--models", type=Path, default=Path("/tmp/slime-bench-models"), help="Directory that keeps models"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=20, help="Prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="Samples per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--row", type=int, default=8192, help="Most tokens of a forward pass")
    parser.add_argument("--fraction", type=float, default=0.4, help="Value of --sglang-mem-fraction-static")
    parser.add_argument("--engine", default="sglang", help="Value of --rollout-engine")
    parser.add_argument("--offload", action="store_true", help="Give --offload-train: also where both have room")
    parser.add_argument("--timeout", type=float, default=600.0)
    return parser.parse_known_args()


def training_command(options: argparse.Namespace, rest: list[str], model: Path, out: Path) -> list[str]:
    words = random.Random(0)
    prompts = out / "prompts.jsonl"
    texts = (
        " ".join(f"w{words.randrange(3, 400)}" for _ in range(options.prompt_tokens))
        for _ in range(options.prompts * options.steps)
    )
    prompts.write_text("".join(json.dumps({"prompt": text, "label": "1"}) + "\n" for text in texts))
    flags: dict[str, Any] = {
        "hf-checkpoint": model, "output-dir": out, "prompt-data": prompts, "input-key": "prompt", "label-key": "label",
        "rm-type": "random", "train-backend": "fsdp", "rollout-engine": options.engine, "num-rollout": options.steps,
        "rollout-batch-size": options.prompts, "n-samples-per-prompt": options.samples,
        "rollout-max-response-len": options.new_tokens, "lr": 1e-6, "max-tokens-per-gpu": options.row,
    }  # fmt: skip
    if options.engine == "sglang":
        flags["sglang-mem-fraction-static"] = options.fraction
    switches = ["use-dynamic-batch-size", "colocate", "no-use-tensorboard"]
    switches += ["offload-train"] if options.offload else []
    line = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "slime.launcher.cli", "train", *line, *(f"--{name}" for name in switches), *rest]


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """A word for every token of a model without a text: w3, w4 ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    if (directory / "tokenizer.json").exists():
        return
    # Special tokens are found inside of words, too.
    special = {"unk_token": "<unknown>", "eos_token": "<end>", "pad_token": "<pad>"}
    names = [*special.values(), *(f"w{i}" for i in range(len(special), vocabulary))]
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=special["unk_token"]))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(directory)


def table(steps: list[dict[str, Any]]) -> str:
    lines = [f"{'seconds':<24}{'min':>8}{'median':>8}{'max':>8}"]
    known = [key for name, key in PHASES.items() if key and not name.startswith("  ")]
    for name, key in PHASES.items():
        if key and not any(key in step for step in steps):
            continue
        lines.append(row(name, [step.get(key, 0.0) if key else train_seconds(step) for step in steps]))
    rest = [step["perf/step_time"] - train_seconds(step) - sum(step.get(key, 0.0) for key in known) for step in steps]
    lines += [row("the rest", rest), row("step", [step["perf/step_time"] for step in steps])]
    tokens = statistics.median(step["rollout/trained_tokens"] for step in steps)
    return "\n".join([*lines, f"response tokens of a step: {tokens:,.0f}"])


def train_seconds(step: dict[str, Any]) -> float:
    parts = ("plan_time", "train_onload_time", "train_time", "train_offload_time")
    return sum(step.get(f"perf/{part}", 0.0) for part in parts)


def row(name: str, values: list[float]) -> str:
    return f"{name:<24}{min(values):>8.3f}{statistics.median(values):>8.3f}{max(values):>8.3f}"


if __name__ == "__main__":
    sys.exit(main())
