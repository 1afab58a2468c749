"""MiniMax-M2, whose norms span heads, and GLM-5, whose queries choose keys, with Megatron and fsdp: the numbers of
transformers, in every layout of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_megatron_ranks import FAMILY_CASES as CASES
from trainer_megatron_ranks import of_one_rank, of_transformers, run_layouts, written
from trainer_tiny import Runner, alone, make_samples, make_settings, write_minimax_model, write_sparse_model

from slime.converters.convert import hf_to_torch_dist
from slime.converters.torch_dist.reader import TorchDist
from slime.trainer.backends.build import build_backend, open_checkpoints
from slime.trainer.batching.packing import pack
from slime.trainer.checkpoints.checkpoint import TrainerState
from slime.trainer.trainer import pick_device
from slime.types.errors import InvalidSetting

BIAS = "e_score_correction_bias"
INDEXER = ".indexer."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_minimax_model(directory / "minimax")
    write_minimax_model(directory / "one-key", num_key_value_heads=1)
    write_sparse_model(directory / "sparse", num_hidden_layers=4)
    return directory


def megatron(path: Path, **values: Any) -> Runner:
    return Runner(make_settings(str(path), train_backend="megatron", lr=1e-4, **values))


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("name", ["minimax", "sparse"])
def test_log_probs_and_weights_are_those_of_transformers(models: Path, name: str, backend: str):
    path = models / name
    runner = Runner(make_settings(str(path), train_backend=backend))
    samples = make_samples()[:4]
    for sample in samples:
        sample.loss_mask = None
    (found,) = runner.backend.log_probs([pack(samples, range(4), [0.0] * 4, [1.0] * 4, share_prompts=False)])
    torch.testing.assert_close(found, of_transformers(path, samples), rtol=1e-5, atol=1e-5)
    files, weights = load_file(path / "model.safetensors"), runner.weights()
    assert weights.keys() == files.keys() and all(torch.equal(weights[name], files[name]) for name in files)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[int, Path]:
    return run_layouts(tmp_path_factory, models, "families")


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, Any]:
    return {name: of_one_rank(models / name) for name in ("minimax", "one-key", "sparse")}


ALL = [(size, case) for size, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("world_size", "case"), ALL, ids=[case for _, case in ALL])
def test_layouts_equal_one_rank_of_fsdp(results: dict[int, Path], expected: dict[str, Any], world_size: int, case: str):
    found, gradients, weights = expected[CASES[world_size][case][0]]
    got, of_layout, updated = written(results[world_size], case)
    assert got["loss"] == pytest.approx(found["loss"], rel=1e-4)
    for position, values in found.items():
        if position.isdigit():
            assert got[position] == pytest.approx(values, abs=2e-5), position
    for name in ("train/grad_norm", "train/entropy_loss"):
        assert got["step"][name] == pytest.approx(found["step"][name], rel=1e-4), name
    of_layout = {name: tensor for name, tensor in of_layout.items() if BIAS not in name and INDEXER not in name}
    assert of_layout.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (of_layout[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name
    for name, weight in weights.items():
        torch.testing.assert_close(updated[name], weight, rtol=1e-4, atol=2e-4, msg=name)


@pytest.mark.parametrize("patterns", [None, ["embedding"]])
def test_the_indexers_of_sparse_attention_do_not_train(models: Path, tmp_path: Path, patterns: list[str] | None):
    path = models / "sparse"
    before = load_file(path / "model.safetensors")
    first = megatron(path, weight_decay=0.1, freeze_params_name_list=patterns)
    first.run(0)
    wanted = first.weights()
    same = {name for name in before if torch.equal(wanted[name], before[name])}
    frozen = {name for name in before if INDEXER in name or (patterns and "embed_tokens" in name)}
    assert {name for name in same if BIAS not in name} == frozen
    checkpoints = open_checkpoints(first.settings, first.backend, alone(), path)
    checkpoints.save(tmp_path / "saved", TrainerState(step=1, updates=first.backend.updates), optimizer=True)
    checkpoints.finish(wait=True)
    backend = build_backend(first.settings, alone(), pick_device(0), weights=str(tmp_path / "saved"))
    for name, tensor in backend.named_weights():
        assert torch.equal(tensor.cpu(), wanted[name]), name


def test_an_indexer_needs_latent_attention():
    from slime.trainer.backends.megatron.model.config import transformer_config

    args = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "dsa_indexer_topk": 5}
    with pytest.raises(InvalidSetting, match="dsa_indexer_topk 5 requires multi_latent_attention"):
        transformer_config(args, params_dtype=torch.float32)


def test_a_checkpoint_has_the_names_of_the_original_too_and_is_resumed(models: Path, tmp_path: Path):
    path = models / "minimax"
    first = megatron(path)
    first.run(0)
    checkpoints = open_checkpoints(first.settings, first.backend, alone(), path)
    checkpoints.save(tmp_path / "saved", TrainerState(step=1, updates=first.backend.updates), optimizer=True)
    checkpoints.finish(wait=True)
    wanted = first.weights()
    settings = make_settings(str(path), train_backend="megatron", lr=1e-4)
    backend = build_backend(settings, alone(), pick_device(0), weights=str(tmp_path / "saved"))
    for name, tensor in backend.named_weights():
        assert torch.equal(tensor.cpu(), wanted[name]), name
    for directory in (tmp_path / "saved", hf_to_torch_dist.convert(path, tmp_path / "converted")):
        tensors = TorchDist(directory).tensors
        for of in ("q", "k"):
            ours = tensors[f"decoder.layers.self_attention.{of}_layernorm.weight"]
            assert tensors[f"decoder.layers.self_attention.{of}_norm.weight"].shape == ours.shape


def test_biases_of_routers_move_where_a_rate_is_given(models: Path):
    path, rate = str(models / "minimax"), {"moe_router_bias_update_rate": 0.1}
    before = load_file(models / "minimax" / "model.safetensors")
    for arguments in ({}, rate):
        runner = Runner(make_settings(path, train_backend="megatron"), megatron=arguments)
        runner.run(0)
        after = {name: tensor for name, tensor in runner.weights().items() if BIAS in name}
        assert after and all(torch.equal(tensor, before[name]) is not bool(arguments) for name, tensor in after.items())


def test_both_backends_replay_the_experts_of_the_engine(models: Path):
    from trainer_routing import samples

    found: dict[bool, list[torch.Tensor]] = {}
    for backend in ("fsdp", "megatron"):
        for replays in (False, True):
            values = {"train_backend": backend, "use_rollout_routing_replay": replays}
            of_backend = Runner(make_settings(str(models / "minimax"), **values)).backend
            experts = of_backend.replayed_experts and of_backend.replayed_experts[:2]
            batch = pack(samples(), range(8), [0.0] * 8, [1.0] * 8, share_prompts=False, experts=experts)
            found.setdefault(replays, []).append(of_backend.log_probs([batch])[0])
    for own, other in found.values():
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[True][0], found[False][0], atol=1e-3)


def test_norms_across_heads_need_norms(models: Path):
    from slime.trainer.backends.megatron.model.config import transformer_config

    args = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "qk_layernorm_across_heads": True}
    with pytest.raises(InvalidSetting, match="qk_layernorm_across_heads requires qk_layernorm"):
        transformer_config(args, params_dtype=torch.float32)
