"""Updates of the Megatron backend on two ranks: what stays frozen, what fails, what is swapped in, and precision."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_megatron_updates import FREEZE, FROZEN, NOTHING, ONLY, REFERENCE
from trainer_processes import results_of
from trainer_tiny import Runner, make_samples, make_settings, write_model

# Parts of Megatron's names, in which patterns are searched, that differ from those of Hugging Face.
MEGATRON_NAMES = {
    "model.embed_tokens": "embedding.word_embeddings", "lm_head": "output_layer", "model.norm": "final_layernorm",
    "model.layers": "decoder.layers", "self_attn.q_proj": "self_attention.linear_qkv",
    "self_attn.k_proj": "self_attention.linear_qkv", "self_attn.v_proj": "self_attention.linear_qkv",
    "self_attn": "self_attention", "post_attention_layernorm": "pre_mlp_layernorm",
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_model(directory / "dense")
    write_model(directory / "other", seed=1)
    return directory


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[str, list[Any]]:
    return results_of("trainer_megatron_updates.py", 2, tmp_path_factory.mktemp("ranks"), models)


def trains(hf_name: str, values: dict[str, Any]) -> bool:
    name = hf_name
    for of_hf, of_megatron in MEGATRON_NAMES.items():
        name = name.replace(of_hf, of_megatron)
    if ONLY in values:
        return any(re.search(pattern, name) for pattern in values[ONLY])
    return not any(re.search(pattern, name) for pattern in values[FREEZE])


@pytest.mark.parametrize("case", FROZEN)
def test_what_is_frozen_stays_and_the_rest_moves(results: dict[str, list[Any]], models: Path, case: str):
    names = Runner(make_settings(str(models / "dense"), train_backend="megatron")).backend.weight_sizes()
    expected = sorted(name for name in names if trains(name, FROZEN[case][1]))
    assert 0 < len(expected) < len(names)
    assert results[case][0] == expected


@pytest.mark.parametrize("case", NOTHING)
def test_patterns_that_leave_nothing_to_train_are_refused_on_every_rank(results: dict[str, list[Any]], case: str):
    flag = "--only-train-params-name-list" if "only" in case else "--freeze-params-name-list"
    for error in results[case]:
        assert error.startswith(f"{flag}: {flag} ") and "no parameter is left to train" in error


def test_a_gradient_that_is_not_finite_changes_nothing_and_fails_on_every_rank(results: dict[str, list[Any]]):
    for result in results["not-finite"]:
        assert result["error"].startswith("update 0: the gradient norm is ")
        assert result["same"]
        # Nothing of it is left in the gradients either.
        assert result["norm"] == result["fresh"]


@pytest.mark.parametrize("case", REFERENCE)
def test_a_pass_of_the_reference_leaves_the_policy_as_it_was(results: dict[str, list[Any]], case: str):
    for result in results[case]:
        assert result.pop("second_step") > 0
        assert all(result.values()), result


def test_bfloat16_is_near_float32_and_adds_gradients_up_in_float32(results: dict[str, list[Any]]):
    found = results["precision"][0]
    assert found["bf16"]["weights"] == ["torch.bfloat16"] and found["fp32"]["weights"] == ["torch.float32"]
    assert found["bf16"]["gradients"] == found["fp32"]["gradients"] == ["torch.float32"]
    assert found["bf16"]["grad_norm"] != found["fp32"]["grad_norm"]
    assert found["bf16"]["grad_norm"] == pytest.approx(found["fp32"]["grad_norm"], rel=0.05)
    assert found["bf16"]["entropy_loss"] == pytest.approx(found["fp32"]["entropy_loss"], rel=0.02)


def test_a_reference_comes_from_torch_dist_too(models: Path, tmp_path: Path):
    from slime.converters.convert.hf_to_torch_dist import convert

    convert(models / "other", tmp_path / "other")
    found = [
        Runner(
            make_settings(
                str(models / "dense"), train_backend="megatron", ref_load=str(path), use_kl_loss=True, kl_loss_coef=0.1
            )
        ).run(0, make_samples(groups=4, size=4))
        for path in (models / "other", tmp_path / "other")
    ]
    assert found[0]["train/kl_loss"] == found[1]["train/kl_loss"] != 0
    assert found[0]["train/grad_norm"] == found[1]["train/grad_norm"]


def test_layers_are_called_through_their_compiled_functions(models: Path, monkeypatch: pytest.MonkeyPatch):
    compiled: list[Any] = []

    def stand_in(function: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", stand_in)
    values: dict[str, Any] = {"train_backend": "megatron", "lr": 1e-4}
    runners = [Runner(make_settings(str(models / "dense"), **values, compile=compile)) for compile in (False, True)]
    expected, found = (runner.run(0) for runner in runners)
    assert len(compiled) > 2
    for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
