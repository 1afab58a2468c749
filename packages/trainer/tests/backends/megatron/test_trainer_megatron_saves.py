"""A checkpoint of the Megatron backend resumes bit for bit at its own layout, and near enough at any other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_megatron_saves import LAYOUTS
from trainer_processes import run_ranks
from trainer_tiny import alone, make_settings, write_model

from slime.converters.families import read_config
from slime.converters.torch_dist.reader import TorchDist
from slime.trainer.backends.build import build_backend, open_checkpoints
from slime.trainer.checkpoints import checkpoint
from slime.trainer.trainer import pick_device
from slime.types.errors import InvalidFile, InvalidSetting


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_model(directory / "dense", layers=4)
    write_model(directory / "experts", experts=4)
    return directory


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    directory = tmp_path_factory.mktemp("saves")
    run_ranks("trainer_megatron_saves.py", 2, directory, str(models))
    errors = [path.read_text() for path in sorted(directory.glob("*.error"))]
    assert not errors, errors[0][-3000:]
    return directory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_the_same_run(saves: Path, layout: str):
    results = json.loads((saves / f"{layout}.json").read_text())
    assert results[layout] == results["straight"]
    assert results[f"{layout}-differing"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumes_at_another_layout(saves: Path, layout: str):
    results = json.loads((saves / f"{layout}.json").read_text())
    others = [name for name in LAYOUTS if name != layout and f"{name}-apart" in results]
    assert others
    # Results in bfloat16 depend on how the work is cut.
    bf16 = "bf16" in layout
    for name in others:
        norm = results["straight"]["train/grad_norm"]
        assert results[name]["train/grad_norm"] == pytest.approx(norm, rel=0.05 if bf16 else 1e-5), name
        assert results[f"{name}-apart"] <= (0.3 if bf16 else 0.02), name


def test_a_checkpoint_carries_what_turns_it_into_a_hugging_face_model(saves: Path, models: Path):
    path = saves / "tensor" / "iter_0000001"
    assert (path.parent / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []
    found = TorchDist(path.parent)
    assert found.hf_dir is not None and read_config(found.hf_dir)["num_hidden_layers"] == 4
    assert found.args()["num_layers"] == 4
    state = checkpoint.read_state(str(path.parent))
    assert (state.step, state.has_optimizer) == (1, True)


def backend_of(models: Path, **values: Any) -> Any:
    settings = make_settings(str(models / "dense"), train_backend="megatron", **values)
    return build_backend(settings, alone(), pick_device(0), weights=settings.load)


def test_one_rank_has_the_weights_that_two_saved(saves: Path, models: Path):
    backend = backend_of(models, load=str(saves / "tensor" / "iter_0000001"))
    got = dict(backend.named_weights())
    saved = TorchDist(saves / "tensor")
    key = "embedding.word_embeddings.weight"
    assert torch.equal(got["model.embed_tokens.weight"], saved.load(key)[: backend.vocab_size])
    assert got.keys() == load_file(saves / "tensor.safetensors").keys()


def test_what_is_damaged_is_named(saves: Path, models: Path, tmp_path: Path):
    import shutil

    path = tmp_path / "iter_0000001"
    shutil.copytree(saves / "tensor" / "iter_0000001", path)
    file = path / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(InvalidFile, match="__1_0.distcp"):
        backend_of(models, load=str(path))


def test_a_failed_save_leaves_nothing(saves: Path, models: Path, tmp_path: Path):
    backend = backend_of(models)
    checkpoints = open_checkpoints(backend.settings, backend, alone(), models / "nowhere")
    with pytest.raises(InvalidSetting, match="nowhere"):
        checkpoints.save(tmp_path / "iter_0000000", checkpoint.TrainerState(step=0))
        checkpoints.finish(wait=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_is_complete_where_the_file_that_names_the_newest_cannot_be_written(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, asynchronous: bool
):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.mkdir()
    backend = backend_of(models, async_save=asynchronous)
    checkpoints = open_checkpoints(backend.settings, backend, alone(), models / "dense")
    path = tmp_path / "iter_0000004"
    checkpoints.save(path, checkpoint.TrainerState(step=4))
    assert checkpoints.finish(wait=True) == 4
    assert checkpoint.read_state(str(path)).step == 4
    assert got_weights(models, path) == got_weights(models, None)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{path} is complete" in warning and str(tracker) in warning
    # Once there is room, the next checkpoint is named again.
    tracker.rmdir()
    checkpoints.save(tmp_path / "iter_0000005", checkpoint.TrainerState(step=5))
    assert checkpoints.finish(wait=True) == 5
    assert tracker.read_text() == "5"


def got_weights(models: Path, load: Path | None) -> dict[str, list[float]]:
    backend = backend_of(models, **({} if load is None else {"load": str(load)}))
    return {name: weight.flatten().tolist() for name, weight in backend.named_weights()}
