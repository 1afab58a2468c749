"""Deltas of a trainer's weights in a real SGLang engine, through a shared disk and a checkpoint on the engine's host.

    SLIME_TEST_MODEL=DIR pytest tests/gpu/test_sglang_weight_deltas.py

DIR: a Hugging Face directory of a small model. Trainer and engine share a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

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

MODEL = os.environ.get("SLIME_TEST_MODEL", "")
ATTENTION = os.environ.get("SLIME_TEST_ATTENTION", "fa3")
MISSING = (
    f"{NUM_GPUS} GPU(s) needed, {len(visible_gpus())} visible"
    if len(visible_gpus()) < NUM_GPUS
    else "SGLang is not installed"
    if importlib.util.find_spec("sglang") is None
    else "zstandard is not installed"
    if importlib.util.find_spec("zstandard") is None
    else "SLIME_TEST_MODEL names no model"
    if not MODEL
    else ""
)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    options = SGLangOptions(
        model_path=MODEL, gpus=[visible_gpus()[0]], random_seed=1, deltas=True,
        args={"mem_fraction_static": 0.3, "attention_backend": ATTENTION},
    )  # fmt: skip
    with start_sglang(options) as process:
        yield process.wait_ready(400)


class OneEngine:
    """A rollout service of one engine: pauses it, empties its cache, lets it go on."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process

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
        takes = {"weight_transports": kind.weight_transports, "delta_carriers": kind.delta_carriers}
        return [Engine(self.process.name, self.process.url, kind.name, True, held, **takes)]

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None: ...

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None:
        self.call("/continue_generation", {})

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None:
        self.call("/continue_generation", {})


def test_sglang_holds_every_version(engine: EngineProcess, tmp_path: Path) -> None:
    local = tmp_path / "local"
    # The engine's checksums are compared with those of the whole weights after every update.
    settings = TrainerSettings(
        hf_checkpoint=MODEL, bf16=True, update_weight_mode="delta", update_weight_transport="disk",
        update_weight_disk_dir=str(tmp_path / "shared"), update_weight_local_checkpoint_dir=str(local),
        check_weight_update_equal=True, update_weight_timeout_seconds=120.0,
    )  # fmt: skip
    ranks = Ranks(0, 1, "", 1)
    backend = build_backend(settings, ranks, torch.device("cuda", 0))
    rollout = OneEngine(engine)
    updates = WeightSender(settings, ranks, backend, rollout, Path(MODEL))
    for version in range(1, 5):
        if version == 3:
            shutil.rmtree(local)
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
    assert list((tmp_path / "shared").iterdir()) == []
