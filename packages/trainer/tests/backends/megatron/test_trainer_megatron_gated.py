"""Qwen3-Next and Qwen3.5 with Megatron: the numbers of transformers sample by sample, in every layout of ranks."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_megatron_ranks import GATED_CASES as CASES
from trainer_megatron_ranks import assert_same_step, of_one_rank, of_transformers, run_layouts, written
from trainer_tiny import Runner, alone, make_samples, make_settings, write_gated_model

from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.trainer.backends.build import build_backend, open_checkpoints
from slime.trainer.batching.packing import pack
from slime.trainer.checkpoints.checkpoint import TrainerState
from slime.trainer.trainer import pick_device
from slime.types.errors import InvalidSetting, NotAvailable


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_gated_model(directory / "dense", "Qwen3_5TextConfig")
    write_gated_model(directory / "experts", "Qwen3NextConfig")
    write_gated_model(directory / "images", "Qwen3_5MoeConfig")
    return directory


def megatron(path: Path, **values: Any) -> Runner:
    return Runner(make_settings(str(path), train_backend="megatron", lr=1e-4, **values))


@pytest.mark.parametrize("name", ["dense", "experts", "images"])
def test_log_probs_are_those_of_transformers_for_each_sample(models: Path, name: str):
    backend = megatron(models / name).backend
    # The log says why.
    assert not backend.can_share_prompts
    random = np.random.default_rng(0)
    samples = make_samples()[:3]
    samples[1].tokens = random.integers(2, 32, 80).astype(np.int32)  # type: ignore[assignment]
    for sample in samples:
        sample.loss_mask = None
    batch = pack(samples, range(3), [0.0] * 3, [1.0] * 3, share_prompts=False)
    (found,) = backend.log_probs([batch])
    torch.testing.assert_close(found, of_transformers(models / name, samples), rtol=1e-4, atol=5e-5)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[int, Path]:
    return run_layouts(tmp_path_factory, models, "gated")


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, Any]:
    return {name: of_one_rank(models / name) for name in ("dense", "experts")}


ALL = [(size, case) for size, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("world_size", "case"), ALL, ids=[case for _, case in ALL])
def test_layouts_of_gated_models_equal_one_rank_of_fsdp(
    results: dict[int, Path], expected: dict[str, Any], world_size: int, case: str
):
    assert_same_step(expected[CASES[world_size][case][0]], written(results[world_size], case))


def test_a_checkpoint_of_a_gated_model_is_resumed(models: Path, tmp_path: Path):
    first = megatron(models / "experts")
    first.run(0)
    checkpoints = open_checkpoints(first.settings, first.backend, alone(), models / "experts")
    checkpoints.save(tmp_path / "saved", TrainerState(step=1, updates=first.backend.updates), optimizer=True)
    checkpoints.finish(wait=True)
    wanted = first.weights()
    other = make_settings(str(models / "experts"), train_backend="megatron", lr=1e-4)
    backend = build_backend(other, alone(), pick_device(0), weights=str(tmp_path / "saved"))
    for name, tensor in backend.named_weights():
        assert torch.equal(tensor.cpu(), wanted[name]), name


@pytest.mark.parametrize("together", [False, True])
def test_weights_keep_the_form_of_the_files(models: Path, tmp_path: Path, together: bool):
    shutil.copytree(models / "images", tmp_path / "model")
    tensors = load_file(models / "images" / "model.safetensors")
    if together:
        for layer in range(4):
            prefix = f"model.language_model.layers.{layer}.mlp.experts."
            parts = {
                part: torch.stack([tensors.pop(f"{prefix}{n}.{part}_proj.weight") for n in range(4)])
                for part in ("gate", "up", "down")
            }
            tensors[f"{prefix}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
            tensors[f"{prefix}down_proj"] = parts["down"]
        save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    backend = megatron(tmp_path / "model").backend
    left_out = {name for name in tensors if name.startswith("model.visual.")}
    assert set(backend.untrained_weights()) == left_out
    weights = dict(backend.named_weights())
    assert weights.keys() == tensors.keys() - left_out
    for name, tensor in weights.items():
        assert torch.equal(tensor, SafetensorsDir(tmp_path / "model").load(name)), name


def test_what_gated_models_cannot_have_is_refused_by_name(models: Path):
    with pytest.raises(NotAvailable, match="--enable-mtp-training of a qwen3_next is not supported yet"):
        megatron(models / "experts", enable_mtp_training=True)
    settings = make_settings(str(models / "dense"), train_backend="megatron")
    with pytest.raises(InvalidSetting, match="--num-layers 5: config.json says 4"):
        Runner(settings, megatron={"num_layers": 5})
