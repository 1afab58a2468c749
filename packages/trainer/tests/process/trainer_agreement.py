"""Run by test_trainer_agreement in two processes; see `trainer_processes.run_cases`. One rank fails in each case."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trainer_processes import run_cases
from trainer_tiny import Runner, make_samples, make_settings

from slime.trainer.process.collective import Ranks
from slime.trainer.step.sharing import share
from slime.types.errors import SlimeError


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


CASES = {
    "unencodable": unencodable,
    "advantages": advantages,
}

if __name__ == "__main__":
    run_cases(CASES)
