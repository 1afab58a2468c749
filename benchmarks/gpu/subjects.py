"""The steps and passes that train_step.py and profile_step.py measure."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from slime.trainer.backends.build import build_backend
from slime.trainer.batching.plan import Planner
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.step.step import TrainStep
from slime.types import Sample
from slime.types.clients import SampleSummary

WARM_UP = 3
# Kinds of samples that are laid out one by one -> those that share.
APART = {"apart": "groups", "turns-apart": "turns"}


class MeasuredSteps:
    """Steps of a trainer, each with its own samples."""

    def __init__(
        self,
        settings: TrainerSettings,
        ranks: Ranks,
        device: torch.device,
        steps: Sequence[Sequence[Sample]],
        megatron: dict[str, Any],
        share: bool,
    ) -> None:
        self.backend = build_backend(settings, ranks, device, megatron=megatron)
        self.backend.can_share_prompts = self.backend.can_share_prompts and share
        self._step = TrainStep(settings, self.backend, ranks)
        self._steps = steps
        self._plans = [Planner(settings).plan(0, [SampleSummary.of(s) for s in samples]) for samples in steps]
        self._settings = settings
        self._done = 0
        self._captured_warm: int | None = None
        self.first: dict[str, float] = {}

    def __call__(self) -> None:
        number = self._done % len(self._steps)
        self._done += 1
        samples = self._steps[number]
        self.metrics = self._step.run(self._plans[number], lambda positions: (samples[p] for p in positions))
        self.first = self.first or self.metrics
        if self._done == WARM_UP:
            self._captured_warm = getattr(self._static_rows, "captured", None)

    @property
    def _static_rows(self) -> Any:
        return getattr(getattr(self.backend, "_passes", None), "rows", None)

    def seen(self) -> dict[str, Any]:
        limit = self._settings.max_tokens_per_gpu or 1
        rows = self._static_rows
        return {
            "full": self.metrics["perf/row_tokens"] / self.metrics["train/micro_batches"] / limit,
            "rows": self.metrics["train/micro_batches"], "row_tokens": self.metrics["perf/row_tokens"],
            "row_shapes": rows and len(rows.shapes), "graphs": rows and rows.num_graphs,
            "shapes": rows and [dataclasses.asdict(shape) for shape in rows.shapes],
            "captured_in_measured_steps": rows and rows.captured - (self._captured_warm or 0),
            "first_step": {name: self.first[f"train/{name}"] for name in ("loss", "grad_norm", "entropy_loss")},
            "metrics": {name: value for name, value in self.metrics.items() if "time" in name or "norm" in name},
        }  # fmt: skip


def step_of(
    options: argparse.Namespace,
    backend: str,
    directory: str,
    steps: Sequence[Sequence[Sample]],
    ranks: Ranks,
    device: torch.device,
    kind: str = "equal",
    *,
    fp8: bool = False,
) -> tuple[MeasuredSteps, int]:
    settings = TrainerSettings(
        hf_checkpoint=directory, train_backend=backend, bf16=options.dtype == "bfloat16", lr=1e-6,
        use_dynamic_batch_size=True, max_tokens_per_gpu=options.row, log_probs_chunk_size=options.chunk,
        compile=False if options.no_compile else None, fsdp_sharding=getattr(options, "sharding", "auto"),
        activation_memory_budget=getattr(options, "budget", 1.0),
    ).on(device.type)  # fmt: skip
    implementation = getattr(options, "transformer_impl", None)
    megatron = {"transformer_impl": implementation} if implementation else {}
    if fp8:
        megatron |= {"fp8": options.fp8_format, "fp8_recipe": options.fp8_recipe}
    step = MeasuredSteps(settings, ranks, device, steps, megatron, share=kind not in APART)
    return step, step.backend.num_parameters


def peer(
    options: argparse.Namespace, kind: str, directory: str, samples: list[Sample], device: torch.device
) -> tuple[Callable[[], None], int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).to(device)
    model.config.use_cache = False
    parameters = sum(p.numel() for p in model.parameters())
    forward: Any = torch.compile(model) if kind == "compiled" else model
    rows = torch.tensor(np.stack([sample.array("tokens") for sample in samples]), dtype=torch.int64, device=device)
    batches = rows.split(max(1, options.row // options.length))

    def run() -> None:
        for batch in batches:
            logits = forward(input_ids=batch, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
            loss.backward()
        model.zero_grad(set_to_none=True)

    return run, parameters
