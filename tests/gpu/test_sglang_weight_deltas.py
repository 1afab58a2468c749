"""Deltas of a trainer's weights in a real SGLang engine: by NCCL, and through a disk and a checkpoint on its host.

    pytest tests/gpu/test_sglang_weight_deltas.py

The model is a small random Qwen3. For the disk trainer and engine share a GPU; by NCCL the engine has one or two of its
own.
"""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_needs import ATTENTION, needs, write_words_qwen3
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.registry import KINDS
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.trainer.backends.build import build_backend
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.weight_sync.sender import WeightSender
from slime.types.clients import Engine

NUM_GPUS = 1

pytestmark = needs(NUM_GPUS, "sglang", "zstandard")


def start(model: str, gpus: list[str]) -> EngineProcess:
    args = {"mem_fraction_static": 0.3, "attention_backend": ATTENTION}
    return start_sglang(SGLangOptions(model_path=model, gpus=gpus, random_seed=1, deltas=True, args=args))


class OneEngine:
    """A rollout service of one engine: pauses it, empties its cache, lets it go on."""

    def __init__(self, process: EngineProcess, tp_size: int = 1) -> None:
        self.process = process
        self.tp_size = tp_size

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.process.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith(b"{") else text

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        self.call("/pause_generation", {"mode": "abort"})
        self.call("/flush_cache", {})
        held = int(self.call("/model_info")["weight_version"])
        kind = KINDS["sglang"]
        return [
            Engine(
                self.process.name,
                self.process.url,
                kind.name,
                True,
                held,
                self.tp_size,
                weight_transports=kind.weight_transports,
                delta_carriers=kind.delta_carriers,
            )  # fmt: skip
        ]

    def begin_joining(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        return []

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None: ...

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None:
        self.call("/continue_generation", {})

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None:
        self.call("/continue_generation", {})


@pytest.mark.parametrize(
    ("transport", "tp_size"),
    [
        ("disk", 1),
        pytest.param("nccl", 1, marks=needs(2, "sglang")),
        pytest.param("nccl", 2, marks=needs(3, "sglang")),
    ],
)
def test_sglang_holds_every_version(tmp_path: Path, transport: str, tp_size: int) -> None:
    model, local = write_words_qwen3(tmp_path / "model", 2048), tmp_path / "local"
    places = {"update_weight_disk_dir": str(tmp_path / "shared"), "update_weight_local_checkpoint_dir": str(local)}
    # The engine's checksums are compared with those of the whole weights after every update.
    settings = TrainerSettings(
        hf_checkpoint=model, bf16=True, update_weight_mode="delta", update_weight_transport=transport,
        check_weight_update_equal=True, update_weight_timeout_seconds=120.0, **(places if transport == "disk" else {}),
    )  # fmt: skip
    ranks = Ranks(0, 1, "", 1)
    backend = build_backend(settings, ranks, torch.device("cuda", 0))
    first = 0 if transport == "disk" else 1
    with start(model, visible_gpus()[first : first + tp_size]) as process:
        rollout = OneEngine(process.wait_ready(400), tp_size)
        updates = WeightSender(settings, ranks, backend, rollout, Path(model))
        for version in range(1, 5):
            if version == 3 and transport == "disk":
                shutil.rmtree(local)
            elif version == 3:
                rollout.call("/weights_checker", {"action": "reset_tensors"})
            with torch.no_grad():
                for parameter in backend.policy.parameters():
                    parameter.view(-1)[:: 1000 + version] *= 1.25
            sent = updates.push(version)
            assert rollout.call("/model_info")["weight_version"] == str(version)
            assert updates.metrics["perf/update_weights_whole_engines"] == (version in (1, 3))
            if version in (2, 4):
                assert 10 * sent < updates.metrics["perf/update_weights_whole_bytes"]
            rollout.call("/generate", {"input_ids": [1000, 1001], "sampling_params": {"max_new_tokens": 4}})
        updates.close()
    assert not (tmp_path / "shared").exists() or list((tmp_path / "shared").iterdir()) == []
