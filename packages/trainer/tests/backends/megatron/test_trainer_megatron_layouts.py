"""Every layout of the Megatron backend gives the log-probs, the gradients and the step of one rank of `fsdp`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_megatron_ranks import CASES, numbers
from trainer_processes import run_ranks
from trainer_tiny import Runner, make_samples, make_settings, write_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_model(directory / "dense", layers=4)
    write_model(directory / "tied", tied=True)
    write_model(directory / "experts", experts=4)
    return directory


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[int, Path]:
    directories = {size: tmp_path_factory.mktemp(f"ranks{size}") for size in CASES}
    for size, directory in directories.items():
        run_ranks("trainer_megatron_ranks.py", size, directory, str(models))
    return directories


@pytest.fixture(scope="module")
def expected(models: Path) -> Any:
    known: dict[str, Any] = {}

    def of(model: str, values: dict[str, Any]) -> Any:
        key = json.dumps([model, values])
        if key not in known:
            settings = make_settings(str(models / model), max_tokens_per_gpu=60, **values)
            runner = Runner(settings)
            found = numbers(runner)
            gradients = {name: p.grad.clone() for name, p in runner.backend.policy.named_parameters()}
            runner.backend._optimizer.clear_gradients()
            found["step"] = runner.run(0, make_samples(groups=4, size=4, nuclei=settings.samples_from_nuclei))
            known[key] = found, _unfused(gradients), _unfused(runner.weights())
        return known[key]

    return of


def _unfused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts under the names that checkpoints have; transformers stacks them."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                out[f"{prefix}.{expert}.gate_proj.weight"], out[f"{prefix}.{expert}.up_proj.weight"] = gate, up
        elif last == "down_proj":
            out |= {f"{prefix}.{expert}.down_proj.weight": part for expert, part in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


ALL = [(size, case) for size, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("world_size", "case"), ALL, ids=[case for _, case in ALL])
def test_a_layout_equals_one_rank_of_fsdp(results: dict[int, Path], expected: Any, world_size: int, case: str):
    directory = results[world_size]
    errors = [path.read_text() for path in sorted(directory.glob(f"{case}-*.error"))]
    assert not errors, errors[0][-3000:]
    model, _, values = CASES[world_size][case]
    found, gradients, weights = expected(model, values)
    got = json.loads((directory / f"{case}.json").read_text())
    assert got["loss"] == pytest.approx(found["loss"], rel=1e-5)
    for position, values_ in found.items():
        if position.isdigit():
            assert got[position] == pytest.approx(values_, abs=1e-5), position
    if not CASES[world_size][case][1].get("use_distributed_optimizer"):
        _assert_gradients(gradients, load_file(directory / f"{case}-gradients.safetensors"))
    where_asked = [name for name in ("train/kl_loss", "rollout/entropy") if name in found["step"]]
    for name in ("train/loss", "train/grad_norm", "train/pg_loss", "train/entropy_loss", *where_asked):
        assert got["step"][name] == pytest.approx(found["step"][name], rel=1e-4, abs=2e-6), name
    got_weights = load_file(directory / f"{case}.safetensors")
    for name, weight in weights.items():
        # One step of Adam moves a weight by lr * sign(g): where g is about 0, float32 may not know its sign.
        assert ((got_weights[name] - weight).abs() > 1e-4).float().mean() < 0.02, name


def _assert_gradients(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    """A distributed optimizer leaves each rank a part of the summed gradient: there the norm and the step tell."""
    assert got.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        assert float((got[name] - gradient).abs().max()) <= 1e-5 * scale, name
