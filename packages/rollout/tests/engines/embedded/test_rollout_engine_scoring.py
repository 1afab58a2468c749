"""The embedded engine as a teacher: log-probs of a prompt are those of transformers."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_tiny_model import CONTEXT, write_tiny_model

from slime.rollout.engines.embedded.endpoints.scoring import Scored, score
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.weights import ModelWeights
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.rollout.on_policy_distillation import reward_func
from slime.types import Sample

IDS = [2, 3, 4, 39, 7, 9]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[EngineProcess]:
    with start_embedded(EmbeddedOptions(model_path=str(directory), threads=1)) as process:
        yield process.wait_ready(120)


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[float]:
    """Log-probs of IDS[1:]."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(torch.tensor([IDS])).logits[0, :-1].log_softmax(-1)
    return found.gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0].tolist()


def ask(engine: EngineProcess, **body: Any) -> Any:
    """The answer's meta_info, or the error's text."""
    sent = {"sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True, "logprob_start_len": 0}
    request = urllib.request.Request(
        f"{engine.url}/generate", json.dumps(sent | body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["meta_info"]
    except urllib.error.HTTPError as error:
        return error.read().decode()


def test_a_prompt_is_scored_and_nothing_is_generated(engine: EngineProcess, expected: list[float]) -> None:
    meta = ask(engine, input_ids=IDS)
    assert [entry[1] for entry in meta["input_token_logprobs"]] == IDS
    assert meta["input_token_logprobs"][0][0] is None and meta["completion_tokens"] == 0
    assert [entry[0] for entry in meta["input_token_logprobs"][1:]] == pytest.approx(expected, abs=1e-5)
    part = ask(engine, input_ids=IDS, logprob_start_len=4)["input_token_logprobs"]
    assert [entry[0] for entry in part] == pytest.approx(expected[3:], abs=1e-5)


@pytest.mark.parametrize("length", [1, 256, 257, 600])
def test_a_long_prompt_is_scored_in_parts_with_the_same_numbers(length: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(config).eval()
    tokens = torch.randint(2, 60, (length,))
    loaded = Loaded(model, None, 60, 1024, frozenset([1]))
    *parts, answer = score(loaded, Scored("", tokens.tolist(), 0), ModelWeights(model, "0"))
    assert parts == [None] * -(-length // 256)
    assert answer is not None
    found = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
    with torch.no_grad():
        whole = model(tokens[None]).logits[0, :-1].double().log_softmax(-1)
    assert found[0] is None
    assert found[1:] == pytest.approx(whole.gather(-1, tokens[1:, None])[:, 0].tolist(), abs=1e-4)


def test_a_sample_is_scored_by_its_teacher(engine: EngineProcess, expected: list[float]) -> None:
    sample = Sample(tokens=IDS, response_length=3, status=Sample.Status.COMPLETED)
    reward = asyncio.run(reward_func(SimpleNamespace(rm_url=f"{engine.url}/generate"), sample))
    assert reward == 0.0 and sample.teacher_log_probs == pytest.approx(expected[-3:], abs=1e-5)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": IDS, "return_logprob": False}, "max_new_tokens"),
        ({"input_ids": [IDS]}, "token ids of one prompt"),
        ({"input_ids": [2, 10**6]}, "token ids of one prompt"),
        ({"input_ids": [2] * (CONTEXT + 1)}, f"at most {CONTEXT}"),
        ({"input_ids": IDS, "logprob_start_len": 6}, "from 0 to 5"),
        ({"text": "a"}, "where nothing is generated"),
    ],
)
def test_what_cannot_be_scored_is_refused(engine: EngineProcess, body: dict[str, Any], words: str) -> None:
    assert words in ask(engine, **body)
