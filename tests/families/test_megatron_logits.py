"""Our Megatron models are transformers' models: logits, gradients, and the weights they give back, in every layout."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_reference
from hf_reference import ALONE, GRADIENT_LAYOUTS, LAYOUTS
from tiny_families import NAMES

SCRIPT = Path(__file__).with_name("family_ranks.py")
TOLERANCE = 1e-5


def run(world_size: int, directory: Path, layouts: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    arguments = [str(world_size), str(directory), ",".join(layouts)]
    # Left by a run that failed before.
    (directory / f"rendezvous-{world_size}").unlink(missing_ok=True)
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), *arguments], stderr=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=280)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns what `family_ranks` wrote, once for all pytest-xdist workers, which share the directory above theirs."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    directory, done = root / "families", root / "families-done"
    with (root / "families-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            for name in NAMES:
                hf_reference.write(name, directory / name)
            run(1, directory, list(ALONE))
            run(2, directory, [layout for layout in LAYOUTS if layout not in ALONE])
            done.touch()
    return directory


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[str, dict[tuple[str, int], dict[str, Any]]]:
    """Returns deviations by family, layout and rank, without layouts that the family cannot have."""
    found: dict[str, dict[tuple[str, int], dict[str, Any]]] = {name: {} for name in NAMES}
    for layout in LAYOUTS:
        for rank in range(1 if layout in ALONE else 2):
            for name, result in json.loads((directory / f"{layout}-{rank}.json").read_text()).items():
                assert "error" not in result, f"{name}, {layout}: {result['error']}"
                if result != {"applies": False}:
                    found[name][layout, rank] = result
    return found


@pytest.mark.parametrize("family", NAMES)
def test_logits_are_those_of_transformers(results: Any, family: str):
    # Only the last stage of a pipeline has some.
    errors = {where: result["logits"] for where, result in results[family].items() if result["logits"] is not None}
    assert {layout for layout, _ in errors} == {layout for layout, _ in results[family]}
    assert {where: error for where, error in errors.items() if not error < TOLERANCE} == {}


@pytest.mark.parametrize("family", NAMES)
def test_gradients_are_those_of_transformers(results: Any, family: str):
    for layout, rank in results[family]:
        if layout in GRADIENT_LAYOUTS and rank == 0:
            assert results[family][layout, rank]["gradients"] == {}, layout


@pytest.mark.parametrize("family", NAMES)
def test_weights_come_back_bit_for_bit(results: Any, family: str):
    for (layout, rank), result in results[family].items():
        assert result["fp32"] == [] and result["bf16"] == [], (layout, rank)


@pytest.mark.parametrize("family", NAMES)
def test_every_layout_is_compared(results: Any, family: str):
    lacks = set(LAYOUTS) - {layout for layout, _ in results[family]}
    # Without experts there are none to place; with them tensor parallelism needs sequence parallelism.
    assert lacks in ({"ep", "sp_ep"}, {"tp"})
