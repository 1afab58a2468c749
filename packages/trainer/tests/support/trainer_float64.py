"""References in plain torch: transformers in float64, one forward pass for each sample, LoRA, and FlashAttention."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trainer_tiny import VOCAB
from transformers import AutoModelForCausalLM

from slime.trainer.batching.packing import pack
from slime.trainer.checkpoints.adapter import Adapter, AdapterConfig
from slime.trainer.settings.trainer import TrainerSettings
from slime.types import Sample

LORA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load64(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()


def reference_log_probs(model: Any, sample: Any, temperature: float = 1.0, nuclei: bool = False) -> torch.Tensor:
    """nuclei: among the tokens that the sample's were drawn from."""
    tokens = torch.tensor(sample.tokens, dtype=torch.int64)
    logits = model(input_ids=tokens[None]).logits[0] / temperature
    if nuclei:
        allowed = torch.zeros_like(logits, dtype=torch.bool)
        bounds, first = sample.rollout_top_p_token_offsets, len(tokens) - sample.response_length
        for place in range(sample.response_length):
            ids = [*sample.rollout_top_p_token_ids[bounds[place] : bounds[place + 1]], int(tokens[first + place])]
            allowed[first + place - 1, ids] = True
        logits = logits.masked_fill(~allowed, -torch.inf)
    log_probs = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
    return log_probs[len(tokens) - 1 - sample.response_length :]


def samples_of_lengths(*prompts: int) -> list[Sample]:
    """Samples with six tokens of response after prompts of these lengths."""
    random = np.random.default_rng(0)
    return [
        Sample(tokens=random.integers(2, VOCAB, prompt + 6).tolist(), response_length=6, index=number)
        for number, prompt in enumerate(prompts)
    ]


def compare_rows(model: Any, plain: Any, samples: list[Sample], *, share_prompts: bool = False) -> None:
    """Holds the logits and gradients of `model` over one packed row against those of `plain`, sample by sample.

    samples: of `samples_of_lengths`. What has no gradient in one has none in the other.
    """
    count = len(samples)
    batch = pack(samples, range(count), [0.0] * count, [1.0] * count, share_prompts=share_prompts)
    logits = model(batch.tokens, position_ids=batch.position_ids, runs=batch.runs, logits_to_keep=batch.rows).logits[0]
    wanted = torch.cat([plain(torch.tensor([s.tokens])).logits[0, -7:-1] for s in samples])
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=2e-5)
    by_token = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    logits.backward(by_token)
    wanted.backward(by_token)
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        reference = expected[name].grad
        if reference is None:
            assert parameter.grad is None, name
        else:
            assert (parameter.grad - reference).norm() <= 1e-3 * reference.norm() + 1e-6, name


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, q_limits: Tensor, k_limits: Tensor, max_q: int, max_k: int,
    causal: bool, scale: float, window: None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention over sequences, in any precision: what lies outside the limits is never written."""
    output, lse = torch.full_like(query, float("nan")), query.new_full((query.shape[1], len(query)), float("nan"))
    for a, b, c, d in zip(q_limits, q_limits[1:], k_limits, k_limits[1:], strict=False):
        assert b - a <= max_q and d - c <= max_k
        logits = _logits(query[a:b], key[c:d], causal, scale)
        # For queries without keys the kernel returns infinity, and 0.
        lse[:, a:b] = logits.logsumexp(-1) if d > c else float("inf")
        output[a:b] = torch.einsum("hqk,khv->qhv", logits.softmax(-1), _heads(value[c:d], query)) if d > c else 0.0
    return output, lse


def flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, q_limits: Tensor,
    k_limits: Tensor, max_q: int, max_k: int, causal: bool, scale: float, window: None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """With probabilities exp(logits - lse), and ds = p (dp - sum(gradient * output))."""
    found = [torch.full_like(tensor, float("nan")) for tensor in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    for a, b, c, d in zip(q_limits, q_limits[1:], k_limits, k_limits[1:], strict=False):
        p = (_logits(query[a:b], key[c:d], causal, scale) - lse[:, a:b, None]).exp()
        dp = torch.einsum("qhv,khv->hqk", gradient[a:b], _heads(value[c:d], query))
        ds = p * (dp - (gradient[a:b] * output[a:b]).sum(-1).t()[..., None]) * scale
        found[0][a:b] = torch.einsum("hqk,khd->qhd", ds, _heads(key[c:d], query))
        for into, whole in ((1, torch.einsum("hqk,qhd->khd", ds, query[a:b])),
                            (2, torch.einsum("hqk,qhv->khv", p, gradient[a:b]))):  # fmt: skip
            found[into][c:d] = whole.unflatten(1, (-1, groups)).sum(2)
    return found[0], found[1], found[2]


def _heads(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _logits(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    logits = torch.einsum("qhd,khd->hqk", query, _heads(key, query)) * scale
    seen = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    return logits.masked_fill(~seen, float("-inf")) if causal else logits


def write_adapter(path: Path, settings: TrainerSettings, *, ends: tuple[str, ...] = LORA_LAYERS, seed: int = 0) -> str:
    """Writes an adapter of random numbers for the layers of `settings.hf_checkpoint` whose names end in `ends`."""
    path.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in load64(settings.hf_checkpoint).named_modules():
        if name.rpartition(".")[2] in ends:
            m, n = module.weight.shape
            tensors[f"{name}.lora_A.weight"] = torch.randn(settings.lora_rank, n, generator=generator) / 4
            tensors[f"{name}.lora_B.weight"] = torch.randn(m, settings.lora_rank, generator=generator) / 16
    config = AdapterConfig(settings.hf_checkpoint, settings.lora_rank, settings.lora_alpha, ends)
    Adapter(config, iter(tensors.items()), 0).write(path)
    (path / "config.json").write_text((Path(settings.hf_checkpoint) / "config.json").read_text())
    return str(path)


class Lora64:
    """The model in float64 whose weights are W + scale B A. tensors: by the names of peft's files."""

    def __init__(self, model: str, tensors: dict[str, Tensor], scale: float) -> None:
        self.base = load64(model).requires_grad_(False)
        self.adapter = {
            name.removeprefix("base_model.model."): t.double().requires_grad_() for name, t in tensors.items()
        }
        self.scale = scale

    def weights(self) -> dict[str, Tensor]:
        found = dict(self.base.named_parameters())
        for name, a in self.adapter.items():
            if name.endswith(".lora_A.weight"):
                layer = name.removesuffix(".lora_A.weight")
                update = self.adapter[f"{layer}.lora_B.weight"] @ a
                found[f"{layer}.weight"] = found[f"{layer}.weight"] + self.scale * update
        return found

    def __call__(self, **inputs: Any) -> Any:
        return torch.func.functional_call(self.base, self.weights(), kwargs=inputs)
