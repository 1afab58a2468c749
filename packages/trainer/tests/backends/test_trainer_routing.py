"""Experts that the engine, or the pass of old log-probs, chose are those of every pass that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from trainer_processes import results_of
from trainer_routing import CASES, EXPERTS, LAYERS, TOP_K, samples, weight_of
from trainer_tiny import Runner, make_samples, make_settings, write_model

from slime.trainer.backends.routing import LayerRouting, RoutingReplay
from slime.trainer.batching.packing import check_experts, pack
from slime.types.errors import InvalidField, InvalidSetting, NotAvailable

PARTS = ("gate.weight", "q_proj.weight", "input_layernorm.weight", "embed_tokens.weight")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_model(directory / "experts", experts=EXPERTS)
    write_model(directory / "deep", experts=EXPERTS, layers=4)
    write_model(directory / "dense")
    return directory


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[str, Any]:
    """By case, with the log-probs of all ranks together."""
    found: dict[str, list[Any]] = {}
    for size in (1, 2):
        found |= results_of("trainer_routing.py", size, tmp_path_factory.mktemp(f"ranks{size}"), models)
    return {name: _together(of_ranks) for name, of_ranks in found.items()}


def _together(of_ranks: list[Any]) -> Any:
    if not isinstance(of_ranks[0], dict):
        return of_ranks[0]
    return {key: _together([r[key] for r in of_ranks if key in r]) for key in set().union(*of_ranks)}


def reference(directory: Path, *, forced: bool) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Log-probs of each sample alone, in float64, and the gradient of their weighted sum.

    forced: whether layers use the experts of the samples. p = softmax(W h), weights of the chosen p_i / sum of p_i.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    told: list[torch.Tensor | None] = [None] * len(model.model.layers)
    for number, layer in enumerate(model.model.layers):

        def route(hidden: torch.Tensor, gate: Any = layer.mlp.gate, number: int = number) -> Any:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            p = F.softmax(logits, dim=-1)
            chosen = p.topk(TOP_K).indices
            experts = told[number]
            if experts is not None:
                for token, row in enumerate(experts.tolist()):
                    if row[0] >= 0:
                        chosen[token] = torch.tensor(row)
            weights = p.gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        layer.mlp.gate.forward = route
    found = {}
    total: Any = 0.0
    for position, sample in enumerate(samples(len(model.model.layers))):
        tokens = torch.as_tensor(np.asarray(sample.tokens), dtype=torch.int64)
        if forced:
            assert sample.rollout_routed_experts is not None
            told[:] = torch.as_tensor(sample.rollout_routed_experts, dtype=torch.int64).unbind(1)
        logits = model(tokens[None, :-1], use_cache=False).logits[0]
        log_probs = F.log_softmax(logits, -1).gather(1, tokens[1:, None])[-sample.response_length :, 0]
        found[str(position)] = log_probs.tolist()
        total = total + weight_of(position) * log_probs.sum()
    total.backward()
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def forced(models: Path) -> dict[str, Any]:
    return {name: reference(models / name, forced=True) for name in ("experts", "deep")}


def differences(found: dict[str, list[float]], expected: dict[str, list[float]]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.abs(np.subtract(found[key], expected[key])).max()) for key in expected)


@pytest.mark.parametrize("case", CASES)
def test_every_pass_uses_the_experts_that_the_engine_chose(
    results: dict[str, Any], forced: dict[str, Any], models: Path, case: str
) -> None:
    name = "deep" if case == "megatron-virtual" else "experts"
    log_probs, gradients = forced[name]
    free, _ = reference(models / name, forced=False)
    assert differences(free, log_probs) > 0.05
    assert differences(results[case]["scored"], log_probs) < 1e-4
    assert differences(results[case]["trained"], log_probs) < 1e-4
    assert differences(results[case]["compared"], free) < 1e-4
    got = load_file(models / f"{case}.safetensors")
    names = [n for n in gradients if n in got and n.endswith(PARTS)]
    assert {part for part in PARTS if any(n.endswith(part) for n in names)} == set(PARTS)
    # Routers learn: their scores are their own.
    assert all(float(gradients[n].abs().max()) > 1e-4 for n in names if "gate" in n)
    for n in names:
        scale = float(gradients[n].abs().max())
        assert float((got[n].double() - gradients[n]).abs().max()) < 1e-4 * max(scale, 1.0), n


@pytest.mark.parametrize("case", CASES)
def test_training_uses_the_experts_of_the_pass_of_old_log_probs(results: dict[str, Any], case: str) -> None:
    free, replayed = results[f"{case}+recorded"]["free"], results[f"{case}+recorded"]["replayed"]
    assert differences(free["before"], replayed["before"]) < 1e-5
    assert differences(free["after"], replayed["after"]) > 0.01


def test_a_layer_that_was_told_what_it_chooses_anyway_returns_the_same_bits() -> None:
    layer = LayerRouting(0)
    scores = torch.randn(7, EXPERTS, generator=torch.Generator().manual_seed(0))
    free = layer.choose(scores, lambda: scores.topk(TOP_K))
    assert layer.chosen is not None
    layer.replayed = layer.chosen
    told = layer.choose(scores, lambda: scores.topk(TOP_K))
    assert all(torch.equal(a, b) for a, b in zip(free, told, strict=True))


@pytest.mark.parametrize("from_rollout", [True, False])
def test_routers_that_do_not_ask_are_refused(from_rollout: bool) -> None:
    layers = [LayerRouting(0), LayerRouting(1)]
    replay, batch = RoutingReplay(layers, from_rollout=from_rollout), pack(samples()[:1], [0], [0.0], [1.0])
    for begin in (replay.scores, replay.trains) if from_rollout else (replay.scores,):
        begin()
        replay.begin(batch, torch.zeros(6, LAYERS, TOP_K, dtype=torch.int64))
        with pytest.raises(NotAvailable, match="cannot be replayed"):
            replay.end(batch)


def test_experts_take_two_bytes_each_where_all_rows_of_a_step_are_on_the_device() -> None:
    laid = pack(samples()[:2], [0, 1], [0.0] * 2, [1.0] * 2, experts=(LAYERS, TOP_K)).experts
    assert laid is not None and laid.dtype == torch.int16


def test_experts_of_another_form_are_named() -> None:
    sample = samples()[0]
    check_experts(sample, LAYERS, TOP_K, EXPERTS)
    for experts, value in ((EXPERTS - 1, EXPERTS - 1), (EXPERTS, None)):
        changed = samples()[0]
        if value is None:
            changed.rollout_routed_experts = None
        with pytest.raises(InvalidField, match="rollout_routed_experts"):
            check_experts(changed, LAYERS, TOP_K, experts)
    with pytest.raises(InvalidField, match=r"\[6, 3, 2\]"):
        check_experts(sample, 3, TOP_K, EXPERTS)
    removed = samples()[0]
    removed.rollout_routed_experts, removed.remove_sample = None, True
    check_experts(removed, LAYERS, TOP_K, EXPERTS)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_experts_are_kept_for_one_iteration_where_only_the_critic_trains(models: Path, backend: str) -> None:
    values: dict[str, Any] = {"advantage_estimator": "ppo", "num_critic_only_steps": 3, "train_backend": backend}
    runner = Runner(make_settings(str(models / "experts"), use_routing_replay=True, max_tokens_per_gpu=20, **values))
    replay = runner.backend.routing
    assert replay is not None
    recorded = replay._recorded
    rows, most = set(), 0
    for step in range(4):
        metrics = runner.run(step, make_samples(step)[step:])
        rows |= set(recorded)
        assert ("train/pg_loss" in metrics) == (step == 3)
        kept = [position for _, *positions in recorded for position in positions]
        assert len(set(kept)) == len(kept)
        assert bool(kept) == (step < 3)
        most = max(most, len(recorded))
    # Rows differ from iteration to iteration.
    assert len(rows) > most


@pytest.mark.parametrize("flag", ["use_routing_replay", "use_rollout_routing_replay"])
def test_a_dense_model_has_nothing_to_replay(models: Path, flag: str) -> None:
    with pytest.raises(NotAvailable, match=flag.replace("_", "-")):
        Runner(make_settings(str(models / "dense"), **{flag: True}))


@pytest.mark.parametrize(
    "values",
    [
        {"use_rollout_routing_replay": True},
        {"keep_old_actor": True},
        {"use_rollout_logprobs": True},
        {"log_probs_max_tokens_per_gpu": 64},
        {"compute_advantages_and_returns": False, "loss_type": "custom_loss", "custom_loss_function_path": "m.f"},
    ],
)
def test_what_is_not_scored_as_it_trains_is_refused(models: Path, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="use-routing-replay"):
        make_settings(str(models / "experts"), use_routing_replay=True, **values)
