"""Run by test_trainer_agreement in two processes: the loss raises on the second rank, between collective calls."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trainer_processes import run_cases
from trainer_tiny import Runner, make_settings

from slime.trainer.process.collective import Ranks
from slime.types.errors import PluginError


def leaving(ranks: Ranks, models: Path) -> list[Any]:
    """Returns the error, the seconds until it came, and whether another call is an error at once."""

    def loss(args: Any, batch: dict[str, Any], sum_of_sample_mean: Any) -> Any:
        if ranks.rank == 1:
            raise PluginError("no loss for these samples") if sys.argv[4].endswith("plugin") else MemoryError("full")
        return sum_of_sample_mean(-torch.cat(batch["policy_log_probs"])), {}

    def custom(args: Any, batch: dict[str, Any], sum_of_sample_mean: Any) -> Any:
        return loss(args, batch, sum_of_sample_mean)

    sys.modules["loss_of_ranks"] = SimpleNamespace(custom=custom)  # type: ignore[assignment]
    values = {"loss_type": "custom_loss", "custom_loss_function_path": "loss_of_ranks.custom"}
    runner = Runner(make_settings(str(models), **values), ranks)
    ranks.gather(0)
    started = time.monotonic()
    try:
        runner.run()
        found = "no error"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    return [found, time.monotonic() - started, ranks.left]


if __name__ == "__main__":
    run_cases({"leaving": leaving})
