"""An environment with the six wheels, made once, and what commands in it need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clean_environment import ROOT, CleanEnvironment, clean_environment, collect_wheels, run


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    """The six wheels in a virtual environment that sees nothing of this checkout."""
    directory = tmp_path_factory.mktemp("installed")
    environment = CleanEnvironment(directory / "venv", collect_wheels(tmp_path_factory.mktemp("wheels")), "3.11")
    environment.install("slime-launcher", "slime-buffer", "pytest", "httpx")
    return environment


@pytest.fixture(scope="session")
def inputs(installed: CleanEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model and its data: model/, train.jsonl, held_out.jsonl."""
    directory = tmp_path_factory.mktemp("inputs")
    installed.run(
        "import pathlib, sys\n"
        "from slime.launcher.quickstart import reverse\n"
        "directory = pathlib.Path(sys.argv[1])\n"
        "reverse.write_data(directory, 0)\n"
        "reverse.write_model(directory / 'model', 0)\n",
        str(directory),
    )
    return directory


@pytest.fixture
def train(installed: CleanEnvironment, inputs: Path, tmp_path: Path) -> Callable[..., str]:
    """train(flags...): runs `python train.py` for two iterations on the tiny model and returns what it printed."""

    def start(*flags: str | Path, program: str = "train.py") -> str:
        return run(
            installed.python, ROOT / "scripts" / program,
            "--hf-checkpoint", inputs / "model", "--prompt-data", inputs / "train.jsonl",
            "--input-key", "prompt", "--label-key", "label", "--rollout-engine", "embedded", "--ray-num-cpus", "2",
            "--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
            "--rollout-max-response-len", "5", "--lr", "1e-3", "--output-dir", tmp_path / "run", *flags,
            cwd=tmp_path, env=clean_environment(),
        ).stdout  # fmt: skip

    return start
