"""Run by test_trainer_agreement in two processes; see `trainer_processes.run_cases`. At most one fails in each case."""

import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from trainer_processes import run_cases
from trainer_tiny import Runner, make_samples, make_settings

from slime.trainer.checkpoints import checkpoint
from slime.trainer.process.collective import FRAME_BYTES, Ranks
from slime.trainer.step.sharing import share
from slime.types.errors import SlimeError

# A cut that leaves the header whole, and takes the last tensors.
CUT_BYTES = 512


def outcome(ranks: Ranks, work: Callable[[], Any]) -> list[Any]:
    """[the error of this rank, what the ranks say afterwards], which shows that they are in step."""
    try:
        work()
        found = "no error"
    except (SlimeError, RuntimeError) as error:
        found = f"{type(error).__name__}: {error}"
    return [found, ranks.gather(ranks.rank)]


def unencodable(ranks: Ranks, models: Path) -> list[Any]:
    """The first rank alone has samples to share, made by a plug-in."""
    samples = make_samples()[:2] if ranks.rank == 0 else []
    for sample in samples:
        sample.multimodal_train_inputs = {"pixel_values": object()}
    return outcome(ranks, lambda: share(samples, ranks, 0, ranks.control))


def advantages(ranks: Ranks, models: Path) -> list[Any]:
    """The function sets a wrong number of advantages on the second rank."""

    def function(args: Any, rollout_data: dict[str, Any]) -> None:
        masks = rollout_data["loss_masks"]
        rollout_data["advantages"] = [torch.ones_like(mask[ranks.rank :]) for mask in masks]

    sys.modules["advantages_of_ranks"] = SimpleNamespace(function=function)  # type: ignore[assignment]
    path = "advantages_of_ranks.function"
    runner = Runner(make_settings(str(models / "dense"), custom_advantage_function_path=path), ranks)
    return outcome(ranks, runner.run)


def _cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - CUT_BYTES)


def _adapters(name: str, ranks: Ranks, models: Path) -> tuple[Runner, Path]:
    """A run in bfloat16, whose export reads the frozen weights from the returned file, on the first rank."""
    base = models / name
    if ranks.rank == 0:
        shutil.copytree(models / "dense", base)
    ranks.together(lambda: None)
    settings = make_settings(str(base), lora_rank=4, bf16=True, fsdp_sharding="parameters")
    runner = Runner(settings, ranks)
    # Loaded weights may still be views of the file. A rank may still have to open it.
    ranks.together(lambda: None)
    replacement = base / "model.safetensors"
    if ranks.rank == 0:
        content = replacement.read_bytes()
        replacement.unlink()
        replacement.write_bytes(content)
    ranks.together(lambda: None)
    return runner, replacement


def export_of_a_cut_model(ranks: Ranks, models: Path) -> list[Any]:
    runner, file = _adapters("cut", ranks, models)
    if ranks.rank == 0:
        _cut(file)
    return _exported(runner, models / "exported")


def export_of_a_model_that_is_cut_meanwhile(ranks: Ranks, models: Path) -> list[Any]:
    runner, file = _adapters("meanwhile", ranks, models)
    weights = runner.backend.named_weights()

    def read() -> None:
        for number, _ in enumerate(weights):
            if number == 0:
                _cut(file)

    return outcome(ranks, lambda: ranks.on_first(read, weights))


def export(ranks: Ranks, models: Path) -> list[Any]:
    runner, file = _adapters("whole", ranks, models)
    found = _exported(runner, models / "exported")
    if ranks.rank == 0:
        # Nothing has trained yet: the export is the model.
        expected, got = load_file(file), load_file(models / "exported" / "model.safetensors")
        found.append(all(torch.equal(got[name], tensor) for name, tensor in expected.items()))
    return found


def _exported(runner: Runner, path: Path) -> list[Any]:
    """Writes the merged weights, then the adapter, as `Trainer.export_model` does."""
    backend, source, ranks = runner.backend, Path(runner.settings.hf_checkpoint), runner.ranks
    weights, sizes, adapter = backend.named_weights(), backend.weight_sizes(), backend.adapter()
    assert adapter is not None

    def write() -> None:
        checkpoint.write_model(path, weights, sizes, torch.float32, source, adapter=adapter)

    return outcome(ranks, lambda: ranks.on_first(write, weights, adapter.weights))


def long_and_short_values(ranks: Ranks, models: Path) -> list[Any]:
    """Returns the sizes of values that arrived wrong, or not in the fewest exchanges."""
    limit = FRAME_BYTES - len('""')
    wrong = []
    for sizes in itertools.product((0, limit - 1, limit, limit + 1, 3 * limit), repeat=2):
        expected = [str(rank) * size for rank, size in enumerate(sizes)]
        with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as exchange:
            found = ranks.gather(expected[ranks.rank])
        if found != expected or exchange.call_count != (1 if max(sizes) <= limit else 2):
            wrong.append([*sizes, exchange.call_count])
    return [wrong, ranks.gather(ranks.rank)]


CASES = {
    "long-and-short": long_and_short_values,
    "unencodable": unencodable,
    "advantages": advantages,
    "export-cut": export_of_a_cut_model,
    "export-cut-meanwhile": export_of_a_model_that_is_cut_meanwhile,
    "export": export,
}

if __name__ == "__main__":
    run_cases(CASES)
