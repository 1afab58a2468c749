"""Attacks on the embedded engine over HTTP: none of them succeeds, and it answers afterwards as it did before."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_tiny_model import write_tiny_model

from slime.rollout.chat.front import PATHS
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.embedded.__main__ import serve
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.types.errors import InvalidSetting, Unauthenticated

KEY = "the-key-of-this-run"
USER = {"role": "user", "content": "12"}
GENERATE = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
CHAT = {"messages": [USER], "temperature": 0, "max_tokens": 4}
EFFECTS = (
    "/update_weights_from_disk", "/pause_generation", "/continue_generation", "/abort_request", "/flush_cache",
    "/weights_checker", "/release_memory_occupation", "/resume_memory_occupation", "/generate", *PATHS,
)  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[EngineProcess]:
    with start_embedded(EmbeddedOptions(model_path=str(directory), threads=1), api_key=KEY) as process:
        yield process.wait_ready(280)


@pytest.fixture(autouse=True)
def unharmed(engine: EngineProcess) -> Iterator[None]:
    before = call(engine, "/generate", GENERATE)
    yield
    after = call(engine, "/generate", GENERATE)
    assert before[0] == after[0] == 200
    assert before[1]["output_ids"] == after[1]["output_ids"]
    assert after[1]["meta_info"]["weight_version"] == "0"


def call(
    engine: EngineProcess, path: str, body: Any = None, *, method: str = "POST", timeout: float = 60, **headers: str
) -> tuple[int, Any]:
    """Status and content of the answer, parsed if it is JSON. body: sent as JSON, unless it is bytes."""
    address = urlsplit(engine.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=timeout)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    sent = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, data, sent)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    try:
        return answer.status, json.loads(content)
    except ValueError:
        return answer.status, content.decode()


def test_calls_without_the_key_are_refused_and_it_is_in_no_argument_list(engine: EngineProcess) -> None:
    for key in ("", "Bearer", f"Bearer {KEY}x", f"bearer {KEY}", KEY):
        for path in EFFECTS:
            assert call(engine, path, GENERATE, Authorization=key)[0] == 401
        assert call(engine, "/server_info", method="GET", Authorization=key)[0] == 401
        assert call(engine, "/health", method="GET", Authorization=key)[0] == 200
    assert KEY.encode() not in Path(f"/proc/{engine.pid}/cmdline").read_bytes()

    async def ask(api_key: str | None) -> str:
        async with EngineClient(engine.url, "engine-7", api_key=api_key) as client:
            return await client.weight_version()

    assert asyncio.run(ask(KEY)) == "0"
    with pytest.raises(Unauthenticated, match="engine-7 .*no valid API key.*--rollout-engine-api-key-file"):
        asyncio.run(ask(None))


def test_clients_of_every_protocol_have_their_answer(engine: EngineProcess) -> None:
    user: Any = [{"role": "user", "content": [{"type": "text", "text": "12"}]}]
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        asked: Any = {"model": "m", "messages": user, "temperature": 0, "max_tokens": 4}
        text = client.chat.completions.create(**asked).choices[0].message.content
        chunks = client.chat.completions.create(stream=True, **asked)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        answer = client.responses.create(model="m", input=user, temperature=0, max_output_tokens=4)
        assert answer.output_text == text
        for stranger in (client.with_options(api_key="other"), client.with_options(api_key=f"{KEY}x")):
            with pytest.raises(openai.AuthenticationError):
                stranger.responses.create(model="m", input=user)
    with anthropic.Anthropic(base_url=engine.url, api_key=KEY, max_retries=0, timeout=60) as claude:
        more: Any = {"temperature": 0}
        message = claude.messages.create(model="m", messages=user, max_tokens=4, extra_body=more)
        assert "".join(block.text for block in message.content if block.type == "text") == text
        with claude.messages.stream(model="m", messages=user, max_tokens=4, extra_body=more) as events:
            assert "".join(events.text_stream) == text
        assert claude.messages.count_tokens(model="m", messages=user).input_tokens == message.usage.input_tokens
        with pytest.raises(anthropic.AuthenticationError):
            claude.with_options(api_key="other").messages.create(model="m", messages=user, max_tokens=4)
        with pytest.raises(anthropic.BadRequestError, match="tools: got given"):
            claude.messages.create(model="m", messages=user, max_tokens=4, tools=[{"name": "f", "input_schema": {}}])


def test_a_web_page_steers_nothing(engine: EngineProcess, directory: Path) -> None:
    body = {"model_path": str(directory), "weight_version": "666"}
    for path in EFFECTS:
        assert call(engine, path, body, Content_Type="text/plain", Origin="http://evil.example")[0] == 403
        assert call(engine, path, body, Origin="http://evil.example")[0] == 403
        assert call(engine, path, body, Host="evil.example")[0] == 403
        assert call(engine, path, body, Content_Type="text/plain")[0] == 415
        assert call(engine, path, method="GET")[0] == 405


def test_a_template_of_a_client_is_not_run(engine: EngineProcess) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for name, value in (("chat_template", loop), ("padding", "max_length"), ("max_length", 10**9), ("tokenize", False)):
        status, answer = call(engine, "/v1/chat/completions", CHAT | {"chat_template_kwargs": {name: value}})
        assert status == 400 and answer["error"]["field"] == f"chat_template_kwargs.{name}"
    assert call(engine, "/health", method="GET", timeout=20)[0] == 200


def test_bodies_that_are_too_large_or_never_come_harm_nobody(engine: EngineProcess) -> None:
    status, answer = call(engine, "/generate", b"[" + b"1," * (33 * 2**20))
    assert status == 413 and "at most 67108864 bytes" in answer["error"]["message"]
    address = urlsplit(engine.url)
    half = (
        f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000000\r\n"
    ).encode()
    opened = []
    for number in range(300):
        opened.append(socket.create_connection((str(address.hostname), address.port or 0), timeout=20))
        opened[-1].sendall(half + (b"\r\n{" if number % 2 else b""))
    assert call(engine, "/generate", GENERATE)[0] == 200
    for each in opened:
        each.close()


@pytest.mark.parametrize("raw", [b"[" * 500_000, b'{"a":' * 500_000, b'{"input_ids":' + b"[" * 900 + b"]" * 900 + b"}"])
def test_json_that_nests_deeply_is_a_bad_request(engine: EngineProcess, raw: bytes) -> None:
    for path in ("/generate", "/v1/chat/completions", "/v1/completions", "/abort_request"):
        status, answer = call(engine, path, raw)
        assert status == 400, answer


def test_messages_of_other_clients_are_read(engine: EngineProcess) -> None:
    plain = call(engine, "/v1/chat/completions", CHAT)[1]["choices"]
    parts = {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]}
    assert call(engine, "/v1/chat/completions", CHAT | {"messages": [parts]})[1]["choices"] == plain
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    turns = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "3"}]
    assert call(engine, "/v1/chat/completions", CHAT | {"messages": turns})[0] == 200
    for messages in ([{"role": "user", "content": "\ud800"}], [{"role": "user", "content": [{"type": "image_url"}]}]):
        status, answer = call(engine, "/v1/chat/completions", CHAT | {"messages": messages})
        assert status == 400 and answer["error"]["field"].startswith("messages")
    for path, body in (("/generate", {"text": "\ud800"}), ("/v1/completions", {"prompt": "\ud800"})):
        assert call(engine, path, body)[0] == 400


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"tool_choice": "auto", "response_format": {"type": "text"}, "service_tier": "auto", "logit_bias": {}}, 200),
        ({"frequency_penalty": 0, "presence_penalty": 0.0, "top_logprobs": 0, "store": False, "user": "me"}, 200),
        ({"parallel_tool_calls": False}, 200),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400),
        ({"tool_choice": "required"}, 400),
        ({"response_format": {"type": "json_schema"}}, 400),
        ({"top_logprobs": 5}, 400),
        ({"frequency_penalty": 1}, 400),
        ({"max_token": 3}, 400),
    ],
)
def test_what_changes_the_answer_is_refused_and_what_asks_for_nothing_is_not(
    engine: EngineProcess, more: dict[str, Any], status: int
) -> None:
    found, answer = call(engine, "/v1/chat/completions", CHAT | more)
    assert found == status, answer
    if status == 400:
        assert answer["error"]["field"] == next(iter(more))


def test_a_stream_ends_with_the_number_of_tokens_where_that_is_asked_for(engine: EngineProcess) -> None:
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
    events = call(engine, "/v1/chat/completions", body)[1].strip().split("\n\n")
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    whole = call(engine, "/v1/chat/completions", CHAT | {"logprobs": True})[1]
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    told = [token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert told == whole["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "\ud800", "", 7, None, "nowhere"])
def test_weights_from_a_path_that_cannot_be_are_refused(engine: EngineProcess, path: Any) -> None:
    status, answer = call(engine, "/update_weights_from_disk", {"model_path": path, "weight_version": "1"})
    assert status == 400 and answer["error"]["field"] == "model_path"


def test_one_model_is_listed_by_its_name(engine: EngineProcess, directory: Path) -> None:
    assert call(engine, f"/v1/models/{directory.name}", method="GET")[1]["id"] == directory.name
    assert call(engine, "/v1/models/other", method="GET")[0] == 400


def test_beyond_the_loopback_it_does_not_start_without_a_key(directory: Path) -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(InvalidSetting, match=f"--host {host} requires --api-key-file"):
            serve(EmbeddedOptions(model_path=str(directory), host=host))


odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(st.characters(codec=None), max_size=8)
    | st.sampled_from([2**63, -1, 10**400, "\ud800", "\0", "x" * 5000, "../..", "\r\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", GENERATE | {"rid": "r", "return_logprob": True, "stream": False, "stop": ["a"]}),
    ("/generate", {"text": ["1", "2"], "sampling_params": {"max_new_tokens": 2, "stop": ["3"], "top_k": 3}}),
    ("/generate", {"input_ids": [[5], [6]], "image_data": [["data:image/png;base64,AA=="], []], "sampling_params": {}}),
    ("/v1/chat/completions", CHAT | {"tools": [{"function": {"name": "f"}}], "n": 1, "logprobs": True}),
    ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}, "stop": ["1"]}),
    ("/v1/completions", {"prompt": [5, 6], "max_tokens": 2, "logprobs": 0, "seed": 3, "model": "m"}),
    ("/v1/responses", {"input": [USER, {"type": "function_call", "name": "f", "call_id": "c"}], "instructions": "1"}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 2, "system": [{"type": "text", "text": "1"}], "stream": True}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
    ("/abort_request", {"rid": "nobody"}),
    ("/update_weights_from_disk", {"model_path": "nowhere", "weight_version": "1"}),
    ("/weights_checker", {"action": "checksum"}),
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route and a body that was right before something in it was replaced, or its bytes were."""
    path, body = draw(st.sampled_from(BODIES))
    body = json.loads(json.dumps(body))
    for _ in range(draw(st.integers(1, 2))):
        place: Any = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys)) if keys else None
            if key is None:
                break
            if isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            place[key] = draw(odd)
            break
    raw = json.dumps(body).encode()
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=4)) + raw[at + draw(st.integers(0, 4)) :]
    return path, raw


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_mutated_bodies_are_answered_or_refused(engine: EngineProcess, request_: tuple[str, bytes]) -> None:
    path, raw = request_
    status, answer = call(engine, path, raw)
    assert status in (200, 400, 409), (path, raw, answer)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=64), st.sampled_from(["?weight_version=9", "", "?weight_version=9&last=false", "?last=x"]))
def test_buckets_that_are_no_weights_are_refused(engine: EngineProcess, raw: bytes, query: str) -> None:
    status, answer = call(
        engine, f"/update_weights_from_tensor{query}", raw or b"x", Content_Type="application/octet-stream"
    )
    assert status == 400, answer
