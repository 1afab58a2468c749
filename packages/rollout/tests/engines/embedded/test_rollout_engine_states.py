"""Models with recurrent states (gated delta nets) in the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_tiny_vision import write_qwen3_5
from safetensors import safe_open
from safetensors.torch import save

from slime.rollout.engines.embedded.endpoints.generate import make_response
from slime.rollout.engines.embedded.model.loading import Loaded, load
from slime.rollout.engines.embedded.model.names import disk_tensors
from slime.rollout.engines.embedded.model.padded import state_tokens, token_bytes
from slime.rollout.engines.embedded.model.params import SamplingParams
from slime.rollout.engines.embedded.model.weights import ModelWeights
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.embedded.scheduling.scheduler import Scheduler
from slime.types.errors import InvalidField

VOCABULARY = 40
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "patch_size": 4, "out_hidden_size": 24}
# Prompts of several lengths, one of them three times.
PROMPTS = [[2, *range(3, 3 + n)] for n in (1, 2, 19, 1, 1, 5)]


def model(kind: str, path: Path) -> Any:
    """Loads a random model from its files: a model of text also where the files have layers that read images."""
    import transformers as hf

    torch.manual_seed(0)
    if kind == "qwen3_next":
        made = hf.AutoModelForCausalLM.from_config(hf.Qwen3NextConfig(**TEXT))
    else:
        config = hf.Qwen3_5MoeConfig(text_config=TEXT, vision_config=VISION)
        made = hf.AutoModelForImageTextToText.from_config(config)
    made.save_pretrained(path)
    return hf.AutoModelForCausalLM.from_pretrained(path).eval().requires_grad_(False)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe"])
def test_sequences_with_states_have_the_tokens_of_each_alone(tmp_path: Path, kind: str) -> None:
    made = model(kind, tmp_path)
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    loaded = Loaded(made, None, VOCABULARY, 128, frozenset([1]))
    # Memory for some of them at a time: the others leave, and continue from their tokens.
    scheduler = Scheduler(loaded, EmbeddedOptions(model_path=".", random_seed=0, max_total_tokens=130))
    responses = [make_response(loaded, prompt, params, "", "input_ids") for prompt in PROMPTS]
    try:
        scheduler.submit(responses).done.result(timeout=60)
    finally:
        scheduler.stop()
    assert sum(r.retractions for r in responses) > 0
    for prompt, response in zip(PROMPTS, responses, strict=True):
        ids, log_probs = list(prompt), []
        for _ in range(12):
            logits = made(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
            log_probs.append(float(logits.log_softmax(-1).max()))
        assert list(response.output_ids) == ids[len(prompt) :]
        assert list(response.log_probs) == pytest.approx(log_probs, abs=1e-3)


def test_states_count_as_the_tokens_that_take_their_memory(tmp_path: Path) -> None:
    made = model("qwen3_next", tmp_path)
    layers = made(torch.tensor([[2, 3, 4]]), use_cache=True).past_key_values.layers
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if hasattr(layer, "keys"))
    states = sum(layer.recurrent_states[0].nbytes for layer in layers if hasattr(layer, "recurrent_states"))
    assert token_bytes(made) * 3 == kept
    assert (state_tokens(made) - 1) * token_bytes(made) < states <= state_tokens(made) * token_bytes(made)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe"])
def test_new_weights_come_by_the_names_of_the_files(tmp_path: Path, kind: str) -> None:
    made = model(kind, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as files:
        names = {name for name in files.keys() if not name.startswith("model.visual.")}  # noqa: SIM118
        assert disk_tensors(made).keys() == names


def test_updates_of_a_trainer_of_text_leave_what_sees_as_it_is(tmp_path: Path) -> None:
    loaded = load(EmbeddedOptions(model_path=str(write_qwen3_5(tmp_path))))
    weights = ModelWeights(loaded.model, "0", loaded.vision)
    before = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    new = {name: tensor + 1 for name, tensor in before.items()}
    seeing = {name for name in new if name.startswith("model.visual.")}
    first, *_, last = sorted(seeing)
    text = {name: tensor for name, tensor in new.items() if name not in seeing}
    weights.load_bucket(save(text), "1", last=True)
    assert weights.version == "1" and not weights.incomplete
    for name, tensor in weights.tensors.items():
        assert torch.equal(tensor, before[name] if name in seeing else new[name]), name
    # All of it comes from a trainer of images, and a part of it from none.
    with pytest.raises(InvalidField, match=rf"{last}: got missing, with 0 others"):
        weights.load_bucket(save({name: tensor for name, tensor in new.items() if name != last}), "2", last=True)
    with pytest.raises(InvalidField, match="got missing"):
        weights.load_bucket(save({name: new[name] for name in seeing}), "2", last=True)
    with pytest.raises(InvalidField, match="got missing"):
        weights.load_bucket(save(text | {first: new[first]}), "2", last=True)
    weights.load_bucket(save(new), "2", last=True)
    assert all(torch.equal(tensor, new[name]) for name, tensor in weights.tensors.items())
