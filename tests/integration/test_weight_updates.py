"""A trainer's weights in a real embedded engine, by tensor and by disk, held against what was sent."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.registry import KINDS
from slime.trainer.backends.build import build_backend
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.weight_sync.sender import WeightSender
from slime.types.clients import Engine
from slime.types.errors import EngineError

CONFIG = dict(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
    tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**CONFIG)).save_pretrained(directory)
    vocabulary = {str(number): number for number in range(32)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="1").save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[EngineProcess]:
    with start_embedded(EmbeddedOptions(model_path=model), env={"OMP_NUM_THREADS": "1"}) as process:
        yield process.wait_ready(120)


class OneEngine:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls: list[str] = []

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        self.calls.append("begin")
        return [self.engine]

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None:
        self.calls.append("onload")

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None:
        self.calls.append("commit")

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None:
        self.calls.append("abort")


def weight_updates(engine: EngineProcess, model: str, **values: Any) -> tuple[WeightSender, Any, OneEngine]:
    settings = TrainerSettings(
        hf_checkpoint=model, update_weight_buffer_size=20_000, check_weight_update_equal=True, **values
    )
    ranks = Ranks(0, 1, "", 1)
    backend = build_backend(settings, ranks, torch.device("cpu"))
    rollout = OneEngine(
        Engine(
            engine.name,
            engine.url,
            engine.kind,
            True,
            0,
            weight_transports=KINDS[engine.kind].weight_transports,
            delta_carriers=KINDS[engine.kind].delta_carriers,
        )
    )
    return WeightSender(settings, ranks, backend, rollout, Path(model)), backend, rollout


def version(engine: EngineProcess) -> str:
    with urllib.request.urlopen(f"{engine.url}/model_info", timeout=60) as answer:
        return json.load(answer)["weight_version"]


@pytest.mark.parametrize("transport", ["auto", "disk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_holds_what_was_sent(
    engine: EngineProcess, model: str, tmp_path: Path, transport: str, dtype: str
) -> None:
    values: dict[str, Any] = {"update_weight_transport": transport, "update_weight_disk_dir": str(tmp_path)}
    updates, backend, rollout = weight_updates(engine, model, update_weight_dtype=dtype, **values)
    with torch.no_grad():
        for parameter in backend.policy.parameters():
            parameter.add_(torch.randn_like(parameter))
    updates.push(7)
    updates.close()
    assert rollout.calls == ["begin", "onload", "commit"]
    assert version(engine) == "7"
    # Nothing is left of what was written for the comparison.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_an_engine_holds_lora_merged_into_the_base_model(
    engine: EngineProcess, model: str, bf16: bool, mode: str
) -> None:
    values: dict[str, Any] = {"update_weight_mode": mode, "bf16": bf16}
    updates, backend, _ = weight_updates(engine, model, lora_rank=2, lora_alpha=4.0, **values)
    name = "model.layers.1.mlp.up_proj"
    layer, master = backend.policy.get_submodule(name), backend._master
    base = layer.weight.detach().clone()
    for number in (1, 2):
        with torch.no_grad():
            layer.lora_B.weight.fill_(number)
        updates.push(number)
        sent = dict(backend.named_weights(dtype=base.dtype))[f"{name}.weight"]
        # Each version is made of the frozen weights, and the engine, which compares, holds it.
        expected = base.float() + 2 * number * layer.lora_A.weight.float().sum(0)
        torch.testing.assert_close(sent.float(), expected, rtol=1e-2 if bf16 else 1e-5, atol=1e-5)
        assert torch.equal(layer.weight, base) and base.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert version(engine) == "2" and (master is not None) == bf16
    updates.close()


def test_a_tensor_that_differs_is_named(engine: EngineProcess, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    updates, backend, rollout = weight_updates(engine, model)
    true_weights, calls = backend.named_weights, []

    def wrong_the_first_time(**options: Any) -> Iterator[tuple[str, Tensor]]:
        calls.append(options)
        for name, tensor in true_weights(**options):
            wrong = len(calls) == 1 and name == "model.layers.1.mlp.up_proj.weight"
            yield name, tensor + 1 if wrong else tensor

    monkeypatch.setattr(backend, "named_weights", wrong_the_first_time)
    words = "engine embedded-0, weight version 3: tensor model.layers.1.mlp.up_proj.weight .tp 0/pp 0/dp 0. is not what"
    with pytest.raises(EngineError, match=words):
        updates.push(3)
    assert rollout.calls == ["begin", "abort"]
