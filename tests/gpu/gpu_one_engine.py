"""One SGLang engine that tests start: as a rollout service that a trainer pushes weights to, and what it computes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpu_needs import ATTENTION, make_samples
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.registry import KINDS
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.trainer.backends.base import Backend
from slime.trainer.batching.packing import pack
from slime.trainer.batching.plan import Planner
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.step.step import TrainStep
from slime.types import Sample
from slime.types.clients import Engine, SampleSummary

WORDS, LENGTH = 512, 96
# At its first start on a machine SGLang compiles its kernels for INT4, for more than 400 s.
START_SECONDS = 900

Function = Callable[[EngineClient], Any]


def start(model: str, **args: Any) -> EngineProcess:
    """Starts an engine on the first GPU. args: flags of its server, besides those below."""
    values = {"mem_fraction_static": 0.2, "attention_backend": ATTENTION, "max_total_tokens": 65536} | args
    return start_sglang(SGLangOptions(model_path=model, gpus=visible_gpus()[:1], random_seed=1, args=values))


class OneEngine:
    """A rollout service of one engine, and what the engine computes."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process

    def call(self, function: Function) -> Any:
        async def inside() -> Any:
            async with EngineClient(self.process.url, self.process.name) as client:
                return await function(client)

        return asyncio.run(inside())

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        self.call(lambda client: client.flush_cache(10.0))
        takes = KINDS["sglang"].weight_transports
        return [Engine(self.process.name, self.process.url, "sglang", True, 0, weight_transports=takes)]

    def begin_joining(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        return []

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None: ...

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None: ...

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None: ...

    def checksums(self) -> dict[str, str]:
        """Checksums of the engine's tensors, by name."""
        (rank,) = self.call(lambda client: client.check_weights())["ranks"]
        return dict(rank["checksums"])

    def version(self) -> str:
        return str(self.call(lambda client: client.weight_version()))

    def reads(self, texts: list[list[int]]) -> list[np.ndarray]:
        """Log-probs of every token but the first, as a prompt."""
        params = [{"max_new_tokens": 1, "temperature": 0.0}] * len(texts)
        answers = self.call(lambda client: client.generate(texts, params, logprob_start_len=0))
        return [
            np.array([item[0] for item in answer["meta_info"]["input_token_logprobs"][1:]], np.float32)
            for answer in answers
        ]

    def writes(self, prompts: list[list[int]]) -> list[Sample]:
        """Samples that the engine generates, with its log-probs."""
        params = [{"max_new_tokens": LENGTH, "temperature": 1.0, "ignore_eos": True}] * len(prompts)
        answers = self.call(lambda client: client.generate(prompts, params))
        found = []
        for prompt, answer in zip(prompts, answers, strict=True):
            items = answer["meta_info"]["output_token_logprobs"]
            found.append(sample_of(prompt + [item[1] for item in items], np.array([i[0] for i in items], np.float32)))
        return found


def sample_of(tokens: list[int], log_probs: np.ndarray) -> Sample:
    size = len(log_probs)
    return Sample(
        index=0, group_index=0, tokens=np.array(tokens, np.int32), response_length=size, reward=0.0,
        loss_mask=np.ones(size, np.uint8), rollout_log_probs=log_probs,
    )  # fmt: skip


def apart(backend: Backend, samples: list[Sample]) -> float:
    """Mean difference of the trainer's log-probs from those of the samples, per token."""
    count = len(samples)
    batch = pack(samples, range(count), [0.0] * count, [1.0] * count, device=backend.device)
    (found,) = backend.log_probs([batch])
    assert found is not None and batch.rollout_log_probs is not None
    return float((found.cpu() - batch.rollout_log_probs.cpu()).abs().mean())


def train(backend: Backend, settings: TrainerSettings, ranks: Ranks) -> None:
    samples = make_samples(0, WORDS, rollout_log_probs=np.full(192, -6.0, np.float32))
    plan = Planner(settings).plan(0, [SampleSummary.of(sample) for sample in samples])
    TrainStep(settings, backend, ranks).run(plan, functools.partial(map, samples.__getitem__))
