"""Every layout of the Megatron backend gives the log-probs, the gradients and the step of one rank of `fsdp`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_megatron_ranks import CASES, of_one_rank, run_layouts, written
from trainer_tiny import write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_model(directory / "dense", layers=4)
    write_model(directory / "tied", tied=True)
    write_model(directory / "experts", experts=4)
    return directory


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[int, Path]:
    return run_layouts(tmp_path_factory, models)


@pytest.fixture(scope="module")
def expected(models: Path) -> Any:
    known: dict[str, Any] = {}

    def of(model: str, values: dict[str, Any]) -> Any:
        key = json.dumps([model, values])
        if key not in known:
            known[key] = of_one_rank(models / model, **values)
        return known[key]

    return of


ALL = [(size, case) for size, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("world_size", "case"), ALL, ids=[case for _, case in ALL])
def test_a_layout_equals_one_rank_of_fsdp(results: dict[int, Path], expected: Any, world_size: int, case: str):
    model, _, values = CASES[world_size][case]
    found, gradients, weights = expected(model, values)
    got, of_layout, updated = written(results[world_size], case)
    assert got["loss"] == pytest.approx(found["loss"], rel=1e-5)
    for position, values_ in found.items():
        if position.isdigit():
            assert got[position] == pytest.approx(values_, abs=1e-5), position
    if not CASES[world_size][case][1].get("use_distributed_optimizer"):
        _assert_gradients(gradients, of_layout)
    where_asked = [name for name in ("train/kl_loss", "rollout/entropy") if name in found["step"]]
    for name in ("train/loss", "train/grad_norm", "train/pg_loss", "train/entropy_loss", *where_asked):
        assert got["step"][name] == pytest.approx(found["step"][name], rel=1e-4, abs=2e-6), name
    for name, weight in weights.items():
        # One step of Adam moves a weight by lr * sign(g): where g is about 0, float32 may not know its sign.
        assert ((updated[name] - weight).abs() > 1e-4).float().mean() < 0.02, name


def _assert_gradients(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    """A distributed optimizer leaves each rank a part of the summed gradient: there the norm and the step tell."""
    assert got.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert float((got[name] - gradient).abs().max()) <= 1e-5 * scale, name
