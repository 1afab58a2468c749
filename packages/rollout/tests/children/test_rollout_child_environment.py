"""Environments of real children: what they need, and no credentials."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from slime.rollout.children.environment import child_environment
from slime.rollout.engines.process import EngineProcess
from slime.rollout.rewards.built_in.math.pool import MathWorker

SECRETS = {
    "RAY_AUTH_TOKEN": "hidden-1", "AWS_SECRET_ACCESS_KEY": "hidden-2", "WANDB_API_KEY": "hidden-3",
    "HF_TOKEN": "hidden-4",
    "GITHUB_TOKEN": "hidden-5",
}  # fmt: skip
NEEDED = {
    "CUDA_HOME": "/cuda", "NCCL_DEBUG": "WARN", "SGLANG_X": "x", "HF_HOME": "/hf", "LD_LIBRARY_PATH": "/lib/mine",
    "OMP_NUM_THREADS": "3", "TORCHINDUCTOR_CACHE_DIR": "/c", "TOKENIZERS_PARALLELISM": "false", "https_proxy": "p",
    "SSL_CERT_FILE": "/ca", "XDG_CACHE_HOME": "/cache",
}  # fmt: skip


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SECRETS | NEEDED | {"MINE": "m"}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    engine = EngineProcess(
        "one-0", "embedded", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"], env={"OWN": "o"}
    )
    yield engine
    engine.stop()


def test_an_engine_has_what_it_needs_and_no_credentials(engine: EngineProcess) -> None:
    # Empty for a moment, while the program takes the place of the one that started it.
    while not (found := psutil.Process(engine.pid).environ()):
        pass
    assert not SECRETS.keys() & found.keys() and not set(SECRETS.values()) & set(found.values())
    assert NEEDED.items() <= found.items() and found["OWN"] == "o"
    assert found["PATH"] == os.environ["PATH"] and "MINE" not in found


def test_the_worker_of_math_has_no_credentials() -> None:
    pytest.importorskip("math_verify")
    worker = MathWorker(10.0, 0)
    try:
        assert worker.score("\\boxed{2}", "2") == 1
        assert worker._process is not None
        assert not SECRETS.keys() & psutil.Process(worker._process.pid).environ().keys()
    finally:
        worker.stop()


def test_a_user_names_more_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_ENGINE_ENV", "MINE, HF_TOKEN")
    found = child_environment()
    assert (found["MINE"], found["HF_TOKEN"]) == ("m", "hidden-4") and "WANDB_API_KEY" not in found


def test_a_child_starts_with_it() -> None:
    words = [sys.executable, "-c", "import ssl, json, ctypes; print('started')"]
    assert subprocess.run(words, env=child_environment(), capture_output=True, text=True).stdout == "started\n"
