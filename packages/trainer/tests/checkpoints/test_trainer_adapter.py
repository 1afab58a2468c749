"""A model exported with LoRA: merged weights, and below them the adapter as peft writes it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_stack import Stack
from trainer_tiny import Runner, make_samples, make_settings, write_gated_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

RANK = 4


@pytest.fixture(scope="module")
def exported(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model"
    stack = Stack(model, lora_rank=RANK, lora_alpha=6.0)
    try:
        stack.client.train_step(0, 3, timeout=60)
        stack.client.export_model(str(path), timeout=60)
    finally:
        stack.close()
    return path


def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.tensor([make_samples()[0].tokens], dtype=torch.int64)
    with torch.no_grad():
        return model(input_ids=tokens).logits


def test_an_exported_model_has_the_merged_weights_and_the_adapter_below(exported: Path, model: str):
    merged, base = load_file(exported / "model.safetensors"), load_file(Path(model) / "model.safetensors")
    adapter = load_file(exported / "adapter" / "adapter_model.safetensors")
    config = json.loads((exported / "adapter" / "adapter_config.json").read_text())
    # Engines of other users read it.
    assert {file.stat().st_mode & 0o777 for file in (exported / "adapter").iterdir()} == {0o644}
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", RANK, 6)
    assert config["base_model_name_or_path"] == model
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    layers = {name.removesuffix(".weight") for name in base if "_proj" in name}
    assert adapter.keys() == {f"base_model.model.{name}.lora_{part}.weight" for name in layers for part in "AB"}
    assert merged.keys() == base.keys()
    for name, weight in base.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        update = 0
        if f"{layer}.lora_A.weight" in adapter:
            b, a = adapter[f"{layer}.lora_B.weight"], adapter[f"{layer}.lora_A.weight"]
            assert a.shape == (RANK, weight.shape[1]) and b.shape == (weight.shape[0], RANK) and b.abs().max() > 0
            update = 6 / RANK * b @ a
        torch.testing.assert_close(merged[name], weight + update)


def write_nested(path: Path, model: str) -> Path:
    """An adapter of two updates, written by a trainer of the text model inside `model`."""
    runner = Runner(make_settings(model, lora_rank=RANK, lora_alpha=6.0))
    for step in range(2):
        runner.run(step)
    adapter = runner.backend.adapter()
    assert adapter is not None
    path.mkdir()
    adapter.write(path)
    return path


def test_an_adapter_has_the_names_of_the_files_that_the_model_came_from(tmp_path: Path):
    model = write_gated_model(tmp_path / "m", "Qwen3_5Config")
    path = write_nested(tmp_path / "adapter", model)
    tensors = load_file(path / "adapter_model.safetensors")
    targets = json.loads((path / "adapter_config.json").read_text())["target_modules"]
    # The class that the directory names, which engines and peft load.
    base = AutoModelForImageTextToText.from_pretrained(model)
    expected = {}
    for name, module in base.named_modules():
        if isinstance(module, torch.nn.Linear) and any(f".{name}".endswith(f".{target}") for target in targets):
            expected[f"base_model.model.{name}.lora_A.weight"] = (RANK, module.in_features)
            expected[f"base_model.model.{name}.lora_B.weight"] = (module.out_features, RANK)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert any(".language_model.layers.0.linear_attn.in_proj_qkv." in name for name in tensors)
    # Resumed from these names, and from those that peft gives an adapter of the text model alone.
    again = Runner(make_settings(model, lora_rank=RANK, lora_alpha=6.0), weights=str(path))
    assert all(torch.equal(t, tensors[f"base_model.model.{n}"]) for n, t in again.backend.adapter().weights)
    plain = {name.replace(".language_model.", "."): tensor for name, tensor in tensors.items()}
    save_file(plain, path / "adapter_model.safetensors")
    again = Runner(make_settings(model, lora_rank=RANK, lora_alpha=6.0), weights=str(path))
    assert all(torch.equal(t, tensors[f"base_model.model.{n}"]) for n, t in again.backend.adapter().weights)


def test_peft_loads_the_adapter_of_a_nested_text_model(tmp_path: Path):
    peft = pytest.importorskip("peft")
    model = write_gated_model(tmp_path / "m", "Qwen3_5Config")
    path = write_nested(tmp_path / "adapter", model)
    base, tensors = AutoModelForImageTextToText.from_pretrained(model), load_file(path / "adapter_model.safetensors")
    loaded = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, path))
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_peft_loads_the_adapter_and_computes_the_merged_model(exported: Path, model: str):
    """Skipped without peft; the test above checks names and shapes."""
    peft = pytest.importorskip("peft")
    merged, base = AutoModelForCausalLM.from_pretrained(exported), AutoModelForCausalLM.from_pretrained(model)
    plain = logits(base)
    loaded = peft.PeftModel.from_pretrained(base, exported / "adapter")
    assert loaded.peft_config["default"].r == RANK
    torch.testing.assert_close(logits(loaded), logits(merged), atol=1e-4, rtol=1e-4)
    assert (logits(loaded) - plain).abs().max() > 1e-2
    own = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(r=RANK, target_modules="all-linear")
    )
    saved = load_file(exported / "adapter" / "adapter_model.safetensors")
    assert {n: t.shape for n, t in peft.get_peft_model_state_dict(own).items()} == {
        n: t.shape for n, t in saved.items()
    }
