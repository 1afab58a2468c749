"""Run by test_trainer_weight_transports: `trainer_weight_ranks.py RANK WORLD_SIZE DIR MODELS`; MODELS has
models, dense and fp8, and beside each the description of an engine over both ranks' GPUs: dense.json, fp8.json."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from trainer_processes import run_cases
from trainer_tiny import Runner, make_settings

from slime.trainer.process.collective import Ranks
from slime.trainer.weight_sync.sender import WeightSender
from slime.types.clients import Engine
from slime.types.errors import SlimeError


class OneEngine:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls: list[str] = []

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        self.calls.append("begin")
        return [self.engine]

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None:
        self.calls.append("onload")

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None:
        self.calls.append("commit")

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None:
        self.calls.append("abort")


def update(
    ranks: Ranks, models: Path, version: int, megatron: dict[str, Any] | None, model: str = "dense"
) -> dict[str, Any]:
    settings = make_settings(
        str(models / model), colocate=True, update_weight_buffer_size=6_000, update_weight_dtype="bfloat16",
        train_backend="megatron" if megatron else "fsdp",
    )  # fmt: skip
    backend = Runner(settings, ranks, megatron=megatron).backend
    rollout = OneEngine(Engine(**json.loads((models / f"{model}.json").read_text())))
    updates = WeightSender(settings, ranks, backend, rollout, models / model)
    try:
        sent, error = updates.push(version), ""
    except SlimeError as failure:
        sent, error = 0, f"{type(failure).__name__}: {failure}"
    updates.close()
    return {"sent": sent, "error": error, "calls": rollout.calls}


def fsdp(ranks: Ranks, models: Path) -> dict[str, Any]:
    return update(ranks, models, 5, None)


def megatron(ranks: Ranks, models: Path) -> dict[str, Any]:
    return update(ranks, models, 6, {"tensor_model_parallel_size": 2})


def fsdp_fp8(ranks: Ranks, models: Path) -> dict[str, Any]:
    return update(ranks, models, 3, None, "fp8")


def megatron_fp8(ranks: Ranks, models: Path) -> dict[str, Any]:
    return update(ranks, models, 4, {"tensor_model_parallel_size": 2}, "fp8")


if __name__ == "__main__":
    # The manager of shared memory keeps what it inherits open for as long as the engine maps something.
    os.dup2(os.open(Path(sys.argv[3]) / f"stderr-{sys.argv[1]}.txt", os.O_WRONLY | os.O_CREAT), 2)
    torch.multiprocessing.set_sharing_strategy("file_system")
    run_cases({case.__name__: case for case in (fsdp_fp8, megatron_fp8, fsdp, megatron)})
