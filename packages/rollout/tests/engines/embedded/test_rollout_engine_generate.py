"""The embedded engine as a process: what it generates is what transformers would."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_tiny_model import CONTEXT, write_tiny_model

from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.types import Sample
from slime.types.sample.validate import validate_sample

PROMPTS = [[2, 3, 4, 39], [12, 13, 14, 15, 16, 17, 39], [5, 39]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[EngineProcess]:
    options = EmbeddedOptions(model_path=str(directory), threads=1, max_running_requests=16)
    with start_embedded(options) as process:
        yield process.wait_ready(120)


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def post(engine: EngineProcess, path: str, body: Any, raw: bool = False) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(engine.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            content = answer.read()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]
    return content.decode() if raw else json.loads(content)


def generate(engine: EngineProcess, ids: Any, **params: Any) -> Any:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 8, **params}, "return_logprob": True}
    return post(engine, "/generate", body)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == 1:
            break
    return ids[len(prompt) :]


def log_probs(model: Any, prompt: list[int], output: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()


def test_greedy_is_what_the_model_says(engine: EngineProcess, model: Any) -> None:
    for prompt in PROMPTS:
        answer = generate(engine, prompt, temperature=0)
        assert answer["output_ids"] == greedy(model, prompt, 8)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_log_probs_are_those_of_the_whole_vocabulary_at_the_temperature(
    engine: EngineProcess, model: Any, temperature: float
) -> None:
    for prompt in PROMPTS:
        answer = generate(engine, prompt, temperature=temperature, top_k=5, top_p=0.9)
        given = [log_prob for log_prob, _, _ in answer["meta_info"]["output_token_logprobs"]]
        assert given == pytest.approx(log_probs(model, prompt, answer["output_ids"], temperature), abs=1e-4)
        assert [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]


def test_a_batch_is_what_its_prompts_are_alone(engine: EngineProcess) -> None:
    ids = [PROMPTS[i % 3] for i in range(40)]  # more than max_running_requests
    params = [{"max_new_tokens": 6, "sampling_seed": 100 + i} for i in range(40)]
    batch = post(engine, "/generate", {"input_ids": ids, "sampling_params": params})
    for i in (0, 1, 2, 17, 39):
        alone = post(engine, "/generate", {"input_ids": ids[i], "sampling_params": params[i]})
        assert batch[i]["output_ids"] == alone["output_ids"]


def test_requests_that_come_together_are_all_answered(engine: EngineProcess) -> None:
    with ThreadPoolExecutor(24) as pool:
        seeds = range(48)
        answers = list(pool.map(lambda s: generate(engine, PROMPTS[s % 3], sampling_seed=s), seeds))
    for seed, answer in zip(seeds, answers, strict=True):
        assert answer["output_ids"] == generate(engine, PROMPTS[seed % 3], sampling_seed=seed)["output_ids"]


def test_samples_of_one_prompt_share_its_prefill(engine: EngineProcess) -> None:
    answers = generate(engine, [PROMPTS[0]] * 4)
    assert [a["meta_info"]["cached_tokens"] for a in answers] == [0, 4, 4, 4]


def test_a_response_ends_at_its_length_stop_token_or_stop_string(engine: EngineProcess, model: Any) -> None:
    prompt = PROMPTS[1]
    output = greedy(model, prompt, 8)
    assert len(output) >= 3
    text = generate(engine, prompt, temperature=0)["text"]
    cut = generate(engine, prompt, temperature=0, max_new_tokens=2)
    assert cut["output_ids"] == output[:2]
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    first = output.index(output[2])
    stopped = generate(engine, prompt, temperature=0, stop_token_ids=[output[2]])
    assert stopped["output_ids"] == output[: first + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": output[2]}
    by_text = generate(engine, prompt, temperature=0, stop=[text[2]])
    assert by_text["text"] == text[: text.index(text[2])]
    kept = generate(engine, prompt, temperature=0, stop=[text[2]], no_stop_trim=True)
    assert kept["text"] == text[: text.index(text[2]) + 1]


def test_no_end_of_sequence_before_min_new_tokens(engine: EngineProcess) -> None:
    answers = generate(engine, [PROMPTS[0]] * 32, temperature=5.0, min_new_tokens=8)
    assert all(len(a["output_ids"]) == 8 and 1 not in a["output_ids"][:-1] for a in answers)
    free = generate(engine, [PROMPTS[0]] * 64, temperature=5.0, max_new_tokens=30)
    assert any(a["meta_info"]["finish_reason"]["type"] == "stop" for a in free)


def test_a_stream_grows_to_the_whole_answer(engine: EngineProcess) -> None:
    body = {"input_ids": PROMPTS[1], "sampling_params": {"temperature": 0, "max_new_tokens": 6}, "stream": True}
    events = post(engine, "/generate", body, raw=True).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    outputs = [json.loads(event.removeprefix("data: "))["output_ids"] for event in events[:-1]]
    assert outputs[-1] == generate(engine, PROMPTS[1], temperature=0, max_new_tokens=6)["output_ids"]
    assert all(outputs[-1][: len(part)] == part for part in outputs)


def test_completions_have_log_probs_in_their_own_form(engine: EngineProcess) -> None:
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 4, "logprobs": 0}
    (choice,) = post(engine, "/v1/completions", body)["choices"]
    same = generate(engine, PROMPTS[0], temperature=0, max_new_tokens=4)
    told = choice["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(same["output_ids"])
    starts = zip(told["text_offset"], told["tokens"], strict=True)
    assert all("".join(told["tokens"])[start:].startswith(token) for start, token in starts)
    assert max(told["token_logprobs"]) <= 0
    assert post(engine, "/v1/completions", body | {"logprobs": None})["choices"][0]["logprobs"] is None


def test_chat_speaks_openais_protocol(engine: EngineProcess) -> None:
    body = {"messages": [{"role": "user", "content": "12"}], "temperature": 0, "max_tokens": 4, "logprobs": True}
    answer = post(engine, "/v1/chat/completions", body)
    same = generate(engine, [3, 4, 40, 41], temperature=0, max_new_tokens=4)  # "12:>"
    assert answer["choices"][0]["message"]["content"] == same["text"]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["logprobs"]["content"])
    streamed = post(engine, "/v1/chat/completions", body | {"stream": True}, raw=True).strip().split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in streamed[:-1]]
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == answer["choices"][0]["message"]["content"]
    assert parts[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    "body, field, words",
    [
        ({"input_ids": [2] * CONTEXT}, "input_ids", f"{CONTEXT} tokens"),
        ({"input_ids": [2, 4000]}, "input_ids", "4000"),
        ({"input_ids": []}, "input_ids", "a list of token ids"),
        ({}, "input_ids", "one of them"),
        ({"input_ids": [2], "sampling_params": {"temprature": 1}}, "sampling_params.temprature", "temperature"),
        ({"input_ids": [2], "sampling_params": {"top_p": 2}}, "sampling_params.top_p", "at most 1"),
        ({"input_ids": [2], "sampling_params": {"stop": 5}}, "sampling_params.stop", "a list of texts"),
        ({"input_ids": [2], "sampling_params": {"sampling_seed": 2**63}}, "sampling_params.sampling_seed", "64 bits"),
        ({"input_ids": [2], "sampling_params": {"stop_token_ids": [999]}}, "sampling_params.stop_token_ids", "999"),
        ({"input_ids": [2], "sampling_params": {"min_new_tokens": 200}}, "sampling_params.min_new_tokens", "200"),
        ({"input_ids": [2], "sampling_params": []}, "sampling_params", "0 of them, expected 1"),
        ({"input_ids": [2], "sampling_params": "x"}, "sampling_params", "an object"),
        ({"input_ids": [2], "stream": "x"}, "stream", "true or false"),
        ({"input_ids": [2], "return_logprob": 1}, "return_logprob", "true or false"),
        ({"input_ids": [2], "imput": 1}, "imput", "input_ids"),
        (b"{nonsense", "body", "JSON"),
    ],
)
def test_a_bad_request_is_refused_by_field(engine: EngineProcess, body: Any, field: str, words: str) -> None:
    status, error = post(engine, "/generate", body)
    assert status == 400
    assert error["field"] == field
    assert words in error["message"]


def test_a_bad_request_does_not_harm_others(engine: EngineProcess) -> None:
    assert generate(engine, PROMPTS[0], temperature=0)["output_ids"]


def test_answers_tell_the_nucleus_of_each_token_and_samples_keep_it(engine: EngineProcess, model: Any) -> None:
    params = {"top_p": 0.7, "temperature": 1.3, "ignore_eos": True}
    body = {"input_ids": PROMPTS, "sampling_params": {"max_new_tokens": 8, **params}, "return_logprob": True}
    for prompt, output in zip(PROMPTS, post(engine, "/generate", body | {"return_top_p_token_ids": True}), strict=True):
        meta, sample = output["meta_info"], Sample(tokens=prompt)
        log_probs = [log_prob for log_prob, *_ in meta["output_token_logprobs"]]
        sample.append_response_tokens(None, tokens=output["output_ids"], log_probs=log_probs, meta_info=meta)
        validate_sample(sample)
        bounds, ids = sample.rollout_top_p_token_offsets, sample.rollout_top_p_token_ids
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *output["output_ids"]]])).logits[0, len(prompt) - 1 : -1]
        for place, (row, token) in enumerate(zip(logits / params["temperature"], output["output_ids"], strict=True)):
            probabilities, order = row.softmax(-1).sort(descending=True)
            nucleus = order[probabilities.cumsum(-1) - probabilities < 0.7].tolist()
            assert ids[bounds[place] : bounds[place + 1]] == sorted(nucleus) and token in nucleus
            assert log_probs[place] == pytest.approx(float(row[token] - row[nucleus].logsumexp(-1)), abs=1e-4)
    assert "top_p_token_ids" not in post(engine, "/generate", body)[0]["meta_info"]
