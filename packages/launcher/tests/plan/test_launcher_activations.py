"""Activations of gated delta nets in a plan, against the tensors that autograd keeps of such a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from slime.converters.megatron.rank_layout import Sizes
from slime.launcher.plan.activations import DeltaNets, Shape, activations
from slime.trainer.backends import delta_rule
from slime.trainer.backends.delta_net import use_packed_delta_nets
from slime.trainer.backends.fsdp.attention import use_packed_attention
from slime.trainer.batching.runs import Runs
from slime.trainer.settings.trainer import TrainerSettings

TOKENS = 256


class Kept:
    """Adds up the memory of tensors that are kept, each once; none of `parameters`."""

    def __init__(self, parameters: list[Tensor] | None = None) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters or ()}
        self._sizes: dict[int, int] = {}
        self._tensors: list[Tensor] = []

    def add(self, tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._parameters:
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()
            # Alive, so that no other tensor gets its memory.
            self._tensors.append(tensor)
        return tensor

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor)

    @property
    def per_token(self) -> float:
        return sum(self._sizes.values()) / TOKENS


def config_of(layers: int, **values: int) -> dict[str, Any]:
    return {
        "vocab_size": 32, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        "max_position_embeddings": 512, **values,
    }  # fmt: skip


def measured(config: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> float:
    """Bytes per token that autograd keeps, and what the delta rule gets, from which it is computed again."""
    model: Any = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**config), attn_implementation="sdpa").to(dtype)
    use_packed_delta_nets(model)
    use_packed_attention(model, flag="--hf-checkpoint")
    kept, checkpoint = Kept(list(model.parameters())), torch.utils.checkpoint.checkpoint

    def noted(function: Any, *arguments: Any, **options: Any) -> Any:
        for argument in arguments:
            kept.add(argument)
        return checkpoint(function, *arguments, **options)

    monkeypatch.setattr(delta_rule, "checkpoint", noted)
    tokens, positions = torch.zeros(1, TOKENS, dtype=torch.int64), torch.arange(TOKENS)[None]
    with kept.hooks():
        model(input_ids=tokens, position_ids=positions, runs=Runs.apart([TOKENS], "cpu"), use_cache=False)
    return kept.per_token


def estimated(config: dict[str, Any], **values: Any) -> dict[str, float]:
    settings = TrainerSettings(hf_checkpoint="m", compile=False, **values)
    shape = Shape.of(config)
    items = activations(settings, shape, Sizes(), TOKENS, None, 0, shape.layers)
    return {item.name: item.num_bytes / TOKENS for item in items}


@pytest.mark.parametrize("bf16", [False, True])
def test_what_a_layer_keeps_is_what_autograd_keeps(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if bf16 else torch.float32
    # Embedding and output layer are in both models; a fourth of the further layers has attention.
    shallow, deep = (measured(config_of(layers), dtype, monkeypatch) for layers in (4, 8))
    less, more = (estimated(config_of(layers), bf16=bf16) for layers in (4, 8))
    further = sum(more[name] - less[name] for name in ("activations", "delta nets"))
    assert further == pytest.approx(deep - shallow, rel=0.1)
    # One layer at a time is computed again, however many there are.
    assert less["delta rule"] == more["delta rule"]


@pytest.mark.parametrize("values", [{}, {"linear_key_head_dim": 32, "linear_value_head_dim": 64}])
def test_the_delta_rule_takes_what_autograd_keeps_of_it(values: dict[str, int]) -> None:
    config = config_of(4, **values)
    found = DeltaNets.of(config)
    assert found is not None
    widths = (found.keys // found.key, found.key), (found.heads, found.value)
    query, key, value = (torch.randn(TOKENS, *width, requires_grad=True) for width in (widths[0], *widths))
    decay, beta = -torch.rand(TOKENS, found.heads), torch.rand(TOKENS, found.heads)
    kept = Kept()
    with kept.hooks():
        delta_rule._rule(query, key, value, decay.requires_grad_(), beta.requires_grad_(), Runs.apart([TOKENS], "cpu"))
    assert found.rule_bytes == pytest.approx(kept.per_token, rel=0.1)


def test_recomputed_layers_keep_their_input_alone() -> None:
    config = config_of(8)
    kept, again = estimated(config), estimated(config, gradient_checkpointing=True)
    assert again.keys() == {"activations", "delta rule"} and again["delta rule"] == kept["delta rule"]
    # One layer beside the inputs: a delta net, if it takes more than attention.
    assert again["activations"] - 4 * 96 * 8 == pytest.approx(max(kept["delta nets"] / 6, kept["activations"] / 2))


def test_a_model_of_attention_alone_has_no_delta_nets() -> None:
    config = {name: value for name, value in config_of(4).items() if not name.startswith("linear_")}
    assert estimated(config).keys() == {"activations"}
