"""The Megatron backend made of Transformer Engine's layers, held against the one made of our own and transformers.

    pytest tests/gpu/test_transformer_engine.py

Models are random and small, weights bfloat16; the reference is transformers in float32 on the same weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gpu_needs import needs
from slime.trainer.backends.build import build_backend, open_checkpoints
from slime.trainer.batching.packing import PackedBatch, pack
from slime.trainer.checkpoints import checkpoint
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.types import Sample

NUM_GPUS = 1

pytestmark = needs(NUM_GPUS, "transformer_engine")

VOCAB = 512
# (prompt, response) of each sample, by micro-batch.
LENGTHS = (((5, 30), (17, 1), (64, 90), (1, 7)), ((130, 60), (3, 33)))
LOCAL = {"transformer_impl": "local"}
GROUPED = {"moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_router_fusion": True}

Weights = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Model:
    """A configuration of transformers; megatron: what is asked of the backend."""

    config: str
    changes: dict[str, Any]
    megatron: dict[str, Any] = dataclasses.field(default_factory=dict)


_LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 128, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "rope_interleave": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
# Every expert is chosen: which ones are is decided by the last bits of a router's input.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
MODELS = {
    "qwen3": Model("Qwen3Config", {"head_dim": 128}),
    "qwen3-tied": Model("Qwen3Config", {"head_dim": 64, "tie_word_embeddings": True}),
    "llama": Model("LlamaConfig", {"head_dim": 64}),
    "experts": Model("Qwen3MoeConfig", {"head_dim": 64, **_EXPERTS}),
    "grouped-experts": Model("Qwen3MoeConfig", {"head_dim": 64, **_EXPERTS}, GROUPED),
    "latent": Model("DeepseekV3Config", _LATENT, {"moe_grouped_gemm": True}),
    "interleaved": Model("Glm4Config", {"head_dim": 64, "partial_rotary_factor": 0.5, "attention_bias": True}),
}


@dataclasses.dataclass(frozen=True)
class Numbers:
    """log_probs: [K] of all micro-batches; gradients: by Hugging Face name; all float32 on the CPU."""

    log_probs: Tensor
    gradients: Weights


def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def path(name: str) -> str:
        return write_model(MODELS[name], root / name)

    return path


def write_model(model: Model, path: Path) -> str:
    import transformers

    torch.manual_seed(0)
    values = {
        "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.06,
        "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    } | model.changes  # fmt: skip
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, model.config)(**values))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    made.to(torch.bfloat16).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return str(path)


def samples() -> list[list[Sample]]:
    random = np.random.default_rng(0)
    groups = []
    for group in LENGTHS:
        made = []
        for prompt, response in group:
            mask = (random.random(response) < 0.9).astype(np.uint8)
            tokens = random.integers(2, VOCAB, prompt + response).astype(np.int32)
            made.append(Sample(index=0, tokens=tokens, response_length=response, loss_mask=mask, reward=0.0))
        groups.append(made)
    return groups


def batches() -> list[PackedBatch]:
    made = []
    for group in samples():
        numbers = [0.0] * len(group)
        made.append(pack(group, range(len(group)), numbers, numbers, share_prompts=False, device=device()))
    return made


def coefficients() -> list[Tensor]:
    """[K] a micro-batch: what the loss multiplies log-probs with."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(sum(r for _, r in group), generator=generator).to(device()) for group in LENGTHS]


def backend_of(path: str, megatron: dict[str, Any], load: str | None = None) -> tuple[Any, Any]:
    """The backend, and its checkpoints; with what `load` has of the optimizer."""
    settings = TrainerSettings(
        hf_checkpoint=path, train_backend="megatron", bf16=True, lr=1e-2, weight_decay=0.0, load=load
    )
    ranks = Ranks(0, 1, "", 1)
    backend = build_backend(settings, ranks, device(), weights=load, megatron=megatron)
    checkpoints = open_checkpoints(settings, backend, ranks, Path(path))
    if load is not None:
        checkpoints.load(load, checkpoint.read_state(load))
    return backend, checkpoints


@pytest.fixture(autouse=True)
def without_groups() -> Any:
    yield
    from slime.trainer.backends.megatron.model import parallel

    parallel.destroy()


def add_gradients(backend: Any) -> None:
    factors = coefficients()
    backend.forward_backward(batches(), lambda number, _, outputs: (outputs.log_probs * factors[number]).sum())


def on_cpu(named: Any) -> Weights:
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in named}


def numbers_of(backend: Any) -> Numbers:
    log_probs = torch.cat(backend.log_probs(batches())).float().cpu()
    add_gradients(backend)
    return Numbers(log_probs, on_cpu(backend.named_gradients()))


def reference(path: str) -> Numbers:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    model.to(device()).eval()
    found = []
    for group, factors in zip(samples(), coefficients(), strict=True):
        of_group = []
        for sample in group:
            tokens = torch.tensor(sample.tokens, dtype=torch.int64, device=device())
            every = model(input_ids=tokens[None]).logits[0].float().log_softmax(-1)
            chosen = every[:-1].gather(-1, tokens[1:, None])[:, 0][-sample.response_length :]
            of_group.append(chosen * torch.as_tensor(sample.loss_mask, dtype=torch.float32, device=device()))
        (torch.cat(of_group) * factors).sum().backward()
        found += [values.detach().cpu() for values in of_group]
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return Numbers(torch.cat(found), dict(item for pair in gradients.items() for item in apart(*pair)))


def apart(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """By the names in a checkpoint: transformers stacks experts, gate above up projection."""
    prefix, _, kind = name.rpartition(".")
    if kind not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
        return [(name, tensor)]
    found = []
    for number, expert in enumerate(tensor):
        halves = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True) if kind == "gate_up_proj" else None
        for part, values in halves or [("down_proj", expert)]:
            found.append((f"{prefix}.{number}.{part}.weight", values))
    return found


def apart_by(found: Tensor, expected: Tensor) -> float:
    """Relative to the size of what is expected."""
    return float((found - expected).norm() / expected.norm())


def modules_of(backend: Any) -> set[str]:
    return {type(module).__name__ for model in backend.models for module in model.modules()}


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_gradients_are_those_of_other_implementations(paths: Callable[[str], str], name: str) -> None:
    from slime.trainer.backends.megatron.model import parallel

    path, megatron = paths(name), MODELS[name].megatron
    expected = reference(path)
    backend, _ = backend_of(path, megatron)
    modules = modules_of(backend)
    assert {"TEDotProductAttention", "TERowParallelLinear"} <= modules and "CoreAttention" not in modules
    assert ("TEGroupedMLP" in modules) == bool(megatron.get("moe_grouped_gemm"))
    engine = numbers_of(backend)
    del backend
    parallel.destroy()
    backend, _ = backend_of(path, LOCAL)
    modules = modules_of(backend)
    assert "CoreAttention" in modules and not any(module.startswith("TE") for module in modules)
    local = numbers_of(backend)

    assert set(engine.gradients) == set(local.gradients) >= set(expected.gradients)
    off, usual = (float((found.log_probs - expected.log_probs).abs().mean()) for found in (engine, local))
    report = [f"{name}: log-probs are off by {off:.4f} with Transformer Engine, by {usual:.4f} without; gradients:"]
    worst = 0.0
    for tensor, gradient in expected.gradients.items():
        of_engine, of_local = (apart_by(found.gradients[tensor], gradient) for found in (engine, local))
        worst = max(worst, of_engine / max(2 * of_local, 0.05))
        report.append(f"  {tensor}: {of_engine:.4f} with, {of_local:.4f} without")
    print("\n".join(report))
    # bfloat16 alone puts log-probs off by less than 0.01 on the whole, and gradients by 1 to 3 %.
    assert off < max(2 * usual, 0.02), report[0]
    assert float((engine.log_probs - local.log_probs).abs().max()) < 0.2, report[0]
    assert worst < 1, "\n".join(report)


@pytest.mark.parametrize("name", MODELS)
def test_weights_come_out_as_they_went_in(paths: Callable[[str], str], name: str) -> None:
    path = paths(name)
    backend, _ = backend_of(path, MODELS[name].megatron)
    weights = dict(backend.named_weights())
    files = [load_file(file) for file in Path(path).glob("*.safetensors")]
    stored = {tensor: values for file in files for tensor, values in file.items()}
    assert set(weights) == set(stored)
    for tensor, values in stored.items():
        assert torch.equal(weights[tensor].cpu(), values.to(weights[tensor].dtype)), tensor


@pytest.mark.parametrize("megatron", [{}, {"use_distributed_optimizer": True}], ids=["whole", "distributed"])
def test_an_update_is_adams(paths: Callable[[str], str], megatron: dict[str, Any]) -> None:
    backend, _ = backend_of(paths("qwen3-tied"), megatron)
    before = on_cpu(backend.named_weights())
    add_gradients(backend)
    gradients = on_cpu(backend.named_gradients())
    norm, lr = backend.optimizer_step()
    expected_norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    assert norm == pytest.approx(expected_norm, rel=1e-3) and lr == 1e-2
    after = on_cpu(backend.named_weights())
    for tensor, weight in before.items():
        # At the first update both moments are those of one gradient.
        gradient = gradients[tensor] * min(1.0, 1.0 / (norm + 1e-6))
        expected = weight - lr * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(after[tensor], expected, rtol=2**-7, atol=1e-4)
    assert all(float(gradient.abs().max()) == 0 for gradient in on_cpu(backend.named_gradients()).values())


@pytest.mark.parametrize(
    ("name", "megatron", "later"),
    [
        ("qwen3", {}, {}),
        ("qwen3", {"use_distributed_optimizer": True}, {"use_distributed_optimizer": True}),
        ("qwen3", {}, LOCAL),
        ("grouped-experts", GROUPED, GROUPED),
        ("grouped-experts", GROUPED, LOCAL),
        ("grouped-experts", LOCAL, GROUPED),
        ("latent", {"moe_grouped_gemm": True}, LOCAL),
        ("latent", LOCAL, {"moe_grouped_gemm": True}),
    ],
)
def test_training_goes_on_from_a_checkpoint(
    paths: Callable[[str], str], tmp_path: Path, name: str, megatron: dict[str, Any], later: dict[str, Any]
) -> None:
    from slime.trainer.backends.megatron.model import parallel

    backend, checkpoints = backend_of(paths(name), megatron)
    for _ in range(2):
        add_gradients(backend)
        backend.optimizer_step()
    directory = tmp_path / "iter_0000000"
    checkpoints.save(directory, checkpoint.TrainerState(step=0, updates=2))
    checkpoints.finish(wait=True)
    saved = on_cpu(backend.named_weights())
    add_gradients(backend)
    backend.optimizer_step()
    straight = on_cpu(backend.named_weights())
    del backend, checkpoints
    parallel.destroy()

    resumed, _ = backend_of(paths(name), later, str(directory))
    restored = on_cpu(resumed.named_weights())
    assert not [tensor for tensor in saved if not torch.equal(saved[tensor], restored[tensor])]
    add_gradients(resumed)
    _, lr = resumed.optimizer_step()
    again = on_cpu(resumed.named_weights())
    # Sums of other kernels differ in their last bits, which moments of an earlier step would multiply.
    for tensor, weight in straight.items():
        moved = (weight - saved[tensor]).abs().mean()
        assert (again[tensor] - weight).abs().mean() <= 0.3 * moved + lr * 2**-8, tensor


def test_recomputed_layers_have_the_same_gradients(paths: Callable[[str], str]) -> None:
    from slime.trainer.backends.megatron.model import parallel

    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found = []
    for megatron in ({}, full):
        backend, _ = backend_of(paths("qwen3"), megatron)
        found.append(numbers_of(backend))
        del backend
        parallel.destroy()
    for tensor, gradient in found[0].gradients.items():
        assert apart_by(found[1].gradients[tensor], gradient) < 0.01, tensor
