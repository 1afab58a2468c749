"""FP8 with Megatron: the configuration, what is refused at the start, the length of rows, and that every pass is in it.

Products in FP8 need a GPU: tests/gpu/test_fp8_training.py has their numbers.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.fp8_utils import get_fp8_align_size, is_first_last_bf16_layer
from megatron.core.transformer import transformer_block
from trainer_tiny import VOCAB, Runner, make_settings, write_model

from slime.trainer.backends.megatron import fp8
from slime.trainer.backends.megatron.model.config import transformer_config
from slime.trainer.backends.megatron.model.row import cut
from slime.trainer.backends.snapshots import Snapshots
from slime.trainer.batching.packing import pack
from slime.types import Sample
from slime.types.errors import InvalidSetting, NotAvailable

MODEL = {
    "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100,
    "max_position_embeddings": 64, "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
}  # fmt: skip

RECIPES = ("blockwise", "tensorwise", "mxfp8")
E4M3 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def config_of(**changes: Any) -> Any:
    return transformer_config(MODEL | changes, params_dtype=torch.bfloat16)


def test_the_arguments_become_a_configuration() -> None:
    ends = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 2}
    config = config_of(fp8="hybrid", fp8_recipe="tensorwise", **ends)
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == ("hybrid", "tensorwise", False)
    assert [is_first_last_bf16_layer(config, layer) for layer in range(4)] == [False, False, True, True]
    # No quantized weight outlives a pass.
    assert config.disable_parameter_transpose_cache
    plain = config_of()
    assert plain.fp8 is None and not plain.disable_parameter_transpose_cache and fp8.row_multiple(plain) == 1
    with pytest.raises(InvalidSetting, match="num_layers_at_end_in_bf16"):
        config_of(**E4M3, first_last_layers_bf16=True, num_layers_at_end_in_bf16=5)


@pytest.mark.parametrize(
    ("changes", "device", "bf16", "words"),
    [
        ({}, CPU, True, "--fp8-format e4m3 requires a GPU"),
        ({"transformer_impl": "local"}, GPU, True, "--fp8-format e4m3 and --transformer-impl local cannot be used"),
        ({}, GPU, False, "--fp8-format e4m3 requires (--bf16|the package transformer-engine)"),
    ],
)
def test_a_process_that_cannot_compute_in_fp8_refuses_it(
    changes: dict[str, str], device: torch.device, bf16: bool, words: str
) -> None:
    with pytest.raises((InvalidSetting, NotAvailable), match=words):
        fp8.require(E4M3 | changes, device, bf16=bf16)
    fp8.require({"transformer_impl": "local"}, CPU, bf16=False)


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)
def test_layers_that_are_not_installed_are_named() -> None:
    with pytest.raises(NotAvailable, match=r'package transformer-engine: pip install "transformer-engine\[pytorch\]"'):
        fp8.require(E4M3, GPU, bf16=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("experts", [0, 4])
def test_a_trainer_on_a_cpu_refuses_before_it_builds_the_model(tmp_path: Path, experts: int) -> None:
    model = write_model(tmp_path, experts=experts)
    with pytest.raises(InvalidSetting, match="--fp8-format e4m3 requires a GPU"):
        Runner(make_settings(model, train_backend="megatron"), megatron=E4M3)


@pytest.mark.parametrize(("recipe", "multiple"), [("blockwise", 16), ("tensorwise", 16), ("mxfp8", 32)])
def test_weights_that_fp8_cannot_multiply_are_named(recipe: str, multiple: int) -> None:
    config = config_of(fp8="e4m3", fp8_recipe=recipe)
    good = [("a.weight", torch.empty(multiple, 3 * multiple)), ("b.weight0", torch.empty(5 * multiple, multiple))]
    fp8.check_sizes(good, config)
    bad = [("c.weight", torch.empty(multiple + 8, multiple)), ("d.weight", torch.empty(multiple, 8))]
    words = rf"multiples of {multiple}, and c\.weight \[{multiple + 8}, {multiple}\] and 1 more is not"
    with pytest.raises(InvalidSetting, match=words):
        fp8.check_sizes([*good, *bad], config)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 200), max_size=4), st.sampled_from(RECIPES), st.integers(1, 4), st.integers(1, 3))
def test_every_rank_has_tokens_that_fp8_can_multiply(
    lengths: list[int], recipe: str, tensor: int, context: int
) -> None:
    """tensor: ranks that share the tokens of a row by sequence parallelism; context: by context parallelism."""
    multiple = fp8.row_multiple(config_of(fp8="e4m3", fp8_recipe=recipe))
    assert multiple % get_fp8_align_size(recipe) == 0 and multiple % 16 == 0
    tokens = [np.arange(length, dtype=np.int32) % VOCAB for length in lengths]
    samples = [Sample(index=i, tokens=t, response_length=1, reward=1.0) for i, t in enumerate(tokens)]
    ones = [1.0] * len(samples)
    batch = pack(samples, range(len(samples)), ones, ones, share_prompts=False) if samples else None
    for rank in range(context):
        held = cut(batch, rank, context, multiple * tensor, CPU).tokens.shape[1]
        assert held > 0 and held % (multiple * tensor) == 0
        needed = sum(length + 2 * context for length in lengths) / context
        assert held < needed + 2 * multiple * tensor + 1, "no more padding than that"


def test_every_layer_is_in_the_context_when_scoring_and_when_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our own layers, which ignore it: what a GPU would do beyond is Transformer Engine's."""
    entered: list[int] = []
    inside = 0

    @contextlib.contextmanager
    def context(config: Any, layer_no: int = -1, is_init: bool = False) -> Iterator[None]:
        nonlocal inside
        if not is_init:
            entered.append(layer_no)
        inside += not is_init
        yield
        inside -= not is_init

    monkeypatch.setattr(transformer_block, "get_fp8_context", context)
    for name in ("require", "check_recipe", "check_weights"):
        monkeypatch.setattr(fp8, name, lambda *args, **others: None)
    model = write_model(tmp_path)
    updates = make_settings(model, train_backend="megatron", use_kl_loss=True, num_steps_per_rollout=2)
    runner = Runner(updates, megatron=E4M3)
    assert runner.backend.optimizer.wrapped.config.fp8_recipe is None, "the weights that it updates are no FP8"  # type: ignore[attr-defined]
    seen: list[tuple[int, bool, int]] = []
    for layer in runner.backend.models[0].decoder.layers:  # type: ignore[attr-defined]

        def note(module: Any, args: Any, kwargs: Any) -> None:
            seen.append((module.layer_number - 1, torch.is_grad_enabled(), kwargs["hidden_states"].shape[0]))
            assert entered[-1] == module.layer_number - 1 and inside

        layer.register_forward_pre_hook(note, with_kwargs=True)
    runner.run()
    assert [number for number, _, _ in seen] == entered
    assert {(number, trains) for number, trains, _ in seen} == {(n, trains) for n in (0, 1) for trains in (True, False)}
    assert {length % fp8.BLOCK for _, _, length in seen} == {0}


class Growing(torch.nn.Linear):
    """A layer with an extra state as Transformer Engine's: empty before the first pass in FP8, made anew each time."""

    passes = 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(7 * self.passes, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None: ...


def test_the_extra_state_of_layers_is_no_weight() -> None:
    layer = Growing(2, 3)
    snapshots = Snapshots([torch.nn.Sequential(layer)])
    kept = layer.weight.detach().clone()
    snapshots.keep("reference")
    layer.passes = 2
    with torch.no_grad():
        layer.weight += 1
    with snapshots.swapped_in("reference"):
        assert torch.equal(layer.weight, kept)
    assert torch.equal(layer.weight, kept + 1)
