import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainer_tiny import write_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def reference_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("reference"), seed=1)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(Path(tmp_path_factory.mktemp("tied")), seed=2, tied=True)


@pytest.fixture(scope="module", autouse=True)
def leave_process_groups() -> Iterator[None]:
    """Megatron's groups would stay for the next files, each with three threads."""
    yield
    if parallel := sys.modules.get("slime.trainer.backends.megatron.model.parallel"):
        parallel.destroy()
