"""Checkpoints resume bit for bit, and are whole or absent."""

import errno
import functools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from trainer_tiny import Runner, alone, make_settings, write_biased_model, write_fp8_model, write_model
from transformers import AutoModelForCausalLM

from slime.converters.files import safetensors_dir
from slime.trainer.backends.build import open_checkpoints
from slime.trainer.checkpoints import checkpoint
from slime.trainer.trainer import Trainer
from slime.types import directories
from slime.types.clients import BufferClient
from slime.types.errors import InvalidFile, MissingFile, NotAvailable, OutOfSpace


def save(runner: Runner, path: Path, step: int) -> None:
    state = checkpoint.TrainerState(step=step, updates=runner.backend.updates, weight_version=step + 1)
    checkpoint.save_checkpoint(path, runner.backend, alone(), state, Path(runner.settings.hf_checkpoint))


@pytest.mark.parametrize("tied", [False, True])
def test_a_resumed_run_is_the_same_run(model: str, tied_model: str, tmp_path: Path, tied: bool):
    settings = make_settings(tied_model if tied else model, lr_warmup_iters=3, num_steps_per_rollout=2)
    straight = Runner(settings)
    for step in range(2):
        straight.run(step)
    path = tmp_path / "step_1"
    save(straight, path, 1)
    state = checkpoint.read_state(str(path))
    assert (state.step, state.updates, state.weight_version, state.has_optimizer) == (1, 4, 2, True)
    resumed = Runner(settings, weights=str(path))
    resumed.backend.load_optimizer_state(checkpoint.read_optimizer(str(path)), state.updates)
    a, b = straight.run(2), resumed.run(2)
    assert {k: v for k, v in a.items() if k.startswith("train/")} == {
        k: v for k, v in b.items() if k.startswith("train/")
    }
    for name, weight in straight.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_moments_that_began_in_the_middle_of_a_run_resume_bit_for_bit(model: str, tmp_path: Path, backend: str):
    """AdamW divides by 1 - beta ** n, where n counts the updates of its moments, not those of the run."""
    settings = make_settings(model, train_backend=backend)

    def save_to(runner: Runner, number: int, *, optimizer: bool) -> None:
        checkpoints = open_checkpoints(settings, runner.backend, alone(), Path(model))
        state = checkpoint.TrainerState(step=number, updates=runner.backend.updates)
        checkpoints.save(tmp_path / f"iter_{number:07d}", state, optimizer=optimizer)
        checkpoints.finish(wait=True)

    def resumed(number: int) -> Runner:
        path = str(tmp_path / f"iter_{number:07d}")
        runner = Runner(settings, weights=path)
        checkpoints = open_checkpoints(settings, runner.backend, alone(), Path(model))
        checkpoints.load(path, checkpoint.read_state(path))
        return runner

    first = Runner(settings)
    for step in range(2):
        first.run(step)
    save_to(first, 1, optimizer=False)
    straight = resumed(1)
    # Its moments have seen no update yet, so there are none to save; the checkpoint loads all the same.
    save_to(straight, 2, optimizer=True)
    assert resumed(2).backend.updates == 2
    straight.run(2)
    save_to(straight, 3, optimizer=True)
    again = resumed(3)
    assert (again.backend.updates, again.backend.moment_updates) == (3, 1)
    straight.run(3)
    again.run(3)
    for name, weight in straight.weights().items():
        assert torch.equal(again.weights()[name], weight), name


def test_a_checkpoint_of_an_earlier_version_counts_the_updates_of_the_run(model: str, tmp_path: Path):
    runner = Runner(make_settings(model))
    runner.run()
    save(runner, tmp_path / "c", 0)
    file = tmp_path / "c" / "trainer.json"
    data = json.loads(file.read_text())
    del data["moment_updates"]
    file.write_text(json.dumps(data))
    resumed = Runner(runner.settings, weights=str(tmp_path / "c"))
    checkpoints = open_checkpoints(runner.settings, resumed.backend, alone(), Path(model))
    checkpoints.load(str(tmp_path / "c"), checkpoint.read_state(str(tmp_path / "c")))
    assert resumed.backend.moment_updates == 1


def test_a_checkpoint_is_a_hugging_face_directory_without_pickles(tied_model: str, tmp_path: Path):
    runner = Runner(make_settings(tied_model))
    runner.run()
    path = tmp_path / "new" / "step_0"
    save(runner, path, 0)
    assert sorted(os.listdir(path)) == [
        "config.json", "generation_config.json", "model.safetensors", "optimizer",
        "slime-files.json", "tokenizer_config.json", "trainer.json",
    ]  # fmt: skip
    assert os.listdir(path.parent) == ["step_0"]
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert loaded.dtype == torch.float32
    for name, weight in runner.weights().items():
        assert torch.equal(loaded.get_parameter(name), weight)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_experts_are_saved_as_the_files_of_the_model_have_them(family: str, tmp_path: Path):
    start = tmp_path / "model"
    source = write_biased_model(start) if family == "glm4_moe" else write_model(start, experts=4)
    settings = make_settings(source)
    straight = Runner(settings)
    given = load_file(start / "model.safetensors")
    assert all(torch.equal(weight, given[name]) for name, weight in straight.weights().items())
    straight.run()
    path = tmp_path / "step_0"
    save(straight, path, 0)
    saved = load_file(path / "model.safetensors")
    assert {name: weight.shape for name, weight in saved.items()} == {name: w.shape for name, w in given.items()}
    assert straight.backend.weight_sizes() == {name: weight.numel() for name, weight in saved.items()}
    resumed = Runner(settings, weights=str(path))
    resumed.backend.load_optimizer_state(checkpoint.read_optimizer(str(path)), straight.backend.updates)
    assert straight.run(1)["train/grad_norm"] == resumed.run(1)["train/grad_norm"]
    for name, weight in straight.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name


@pytest.mark.parametrize("bf16", [False, True])
def test_a_checkpoint_with_lora_is_the_adapter_and_its_moments(model: str, tmp_path: Path, bf16: bool):
    settings = make_settings(model, lora_rank=4, bf16=bf16, lr_warmup_iters=3, num_steps_per_rollout=2)
    straight = Runner(settings)
    straight.run(0)
    path = tmp_path / "step_0"
    save(straight, path, 0)
    assert sorted(os.listdir(path)) == [
        "adapter_config.json", "adapter_model.safetensors", "config.json", "generation_config.json", "optimizer",
        "slime-files.json", "tokenizer_config.json", "trainer.json",
    ]  # fmt: skip
    state = checkpoint.read_state(str(path))
    resumed = Runner(settings, weights=str(path))
    checkpoint.HuggingFaceCheckpoints(resumed.backend, alone(), Path(model)).load(str(path), state)
    for step in (1, 2):
        a, b = straight.run(step), resumed.run(step)
        assert {k: v for k, v in a.items() if k.startswith("train/")} == {
            k: v for k, v in b.items() if k.startswith("train/")
        }
    for name, weight in straight.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name


def test_a_tensor_without_a_form_of_its_own_in_the_files_is_refused(model: str, monkeypatch: pytest.MonkeyPatch):
    from transformers import core_model_loading

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", lambda _, tensors: {})
    with pytest.raises(NotAvailable, match="weight of a qwen3 model has no form of its own in the model.s files"):
        Runner(make_settings(model))


def test_saving_again_replaces(model: str, tmp_path: Path):
    runner = Runner(make_settings(model))
    save(runner, tmp_path / "c", 0)
    runner.run()
    save(runner, tmp_path / "c", 1)
    assert checkpoint.read_state(str(tmp_path / "c")).step == 1
    assert os.listdir(tmp_path) == ["c"]


def test_shards_have_an_index(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "write", functools.partial(safetensors_dir.write, shard_bytes=20_000))
    runner = Runner(make_settings(model))
    sizes = runner.backend.weight_sizes()
    total = checkpoint.write_model(tmp_path / "m", runner.backend.named_weights(), sizes, torch.bfloat16, Path(model))
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total == 2 * sum(sizes.values())
    assert set(index["weight_map"]) == set(sizes)
    assert len(set(index["weight_map"].values())) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert loaded.dtype == torch.bfloat16


def test_a_full_disk_leaves_what_was_there(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    runner = Runner(make_settings(model))
    save(runner, tmp_path / "c", 0)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.raises(OutOfSpace, match="no space left"):
        save(runner, tmp_path / "c", 1)
    assert os.listdir(tmp_path) == ["c"]
    assert checkpoint.read_state(str(tmp_path / "c")).step == 0
    monkeypatch.setattr(directories.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(OutOfSpace, match="10 are free"):
        save(runner, tmp_path / "d", 1)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a model"])
def test_a_checkpoint_of_megatron_is_refused_by_fsdp(model: str, tmp_path: Path, inner: bool, beside: bool):
    """Beside a model, fsdp would resume from the checkpoint's step with the weights of the model."""
    root = Path(shutil.copytree(model, tmp_path / "save")) if beside else tmp_path / "save"
    path = root / "iter_0000004"
    path.mkdir(parents=True)
    (root / checkpoint.TRACKER).write_text("4")
    (path / ".metadata").touch()
    checkpoint.write_state(path, checkpoint.TrainerState(step=4, updates=5), None)
    load = str(path if inner else root)
    assert checkpoint.read_state(load, "megatron").step == 4
    with pytest.raises(InvalidFile, match=f"--load: {load} holds a torch_dist checkpoint.*slime-convert to-hf"):
        Trainer(make_settings(model, load=load), alone(), BufferClient("127.0.0.1:1"), lambda: None)


def test_what_cannot_be_resumed_is_named(model: str, tmp_path: Path):
    with pytest.raises(MissingFile, match=r"no trainer\.json"):
        checkpoint.read_state(str(tmp_path))
    assert checkpoint.read_state(model) == checkpoint.TrainerState(has_optimizer=False)
    (tmp_path / "trainer.json").write_text('{"format": 9}')
    with pytest.raises(InvalidFile, match="format 9, expected 1"):
        checkpoint.read_state(str(tmp_path))
    (tmp_path / "trainer.json").write_text('{"format": 1}')
    with pytest.raises(InvalidFile, match="'step'"):
        checkpoint.read_state(str(tmp_path))
    runner = Runner(make_settings(model))
    runner.run()
    save(runner, tmp_path / "c", 0)
    with pytest.raises(InvalidFile, match=r"no tensor exp_avg\.x"):
        checkpoint.read_optimizer(str(tmp_path / "c"))("exp_avg.x")


def test_optimizer_tensors_are_whole(model: str, tmp_path: Path):
    runner = Runner(make_settings(model))
    runner.run()
    save(runner, tmp_path / "c", 0)
    with safe_open(tmp_path / "c" / "optimizer" / "model.safetensors", framework="pt") as tensors:
        names = set(tensors.keys())
    assert names == {f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in runner.weights()}


def test_untrained_weights_of_an_fp8_model_are_written_without_factors(tmp_path: Path):
    """A layer that predicts a further token is in the files of many models in FP8, and the backend leaves it out."""
    source = write_fp8_model(tmp_path / "fp8")
    stored = load_file(source / "model.safetensors")
    trained = next(name for name in stored if name.endswith("q_proj.weight"))
    extra = {name.replace("model.layers.0", "mtp"): stored[name].clone() for name in (trained, f"{trained}_scale_inv")}
    save_file(stored | extra, source / "model.safetensors", metadata={"format": "pt"})
    runner = Runner(make_settings(str(source)))
    weights, sizes, target = runner.backend.named_weights(), runner.backend.weight_sizes(), tmp_path / "out"
    size = checkpoint.write_model(target, weights, sizes, torch.bfloat16, source, [*extra])
    written = load_file(target / "model.safetensors")
    assert sorted(written) == sorted([*sizes, trained.replace("model.layers.0", "mtp")])
    assert torch.equal(written[trained.replace("model.layers.0", "mtp")], written[trained])
    assert size == sum(tensor.nbytes for tensor in written.values())
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
