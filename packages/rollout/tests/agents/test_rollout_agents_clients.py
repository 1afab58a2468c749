"""The released clients of OpenAI and Anthropic at the gateway, and the turns that it records."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from rollout_agents_fakes import END, Client, Letters, Speaker

from slime.rollout.agents.gateway import Gateway
from slime.rollout.agents.sessions import Session
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.generate.state import RolloutState

KEY = "the-key"
THINKING = "<think>Is it?</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_CHAT: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
OF_RESPONSES: Any = {"type": "function", "name": "add", "parameters": SCHEMA}
OF_MESSAGES: Any = {"name": "add", "input_schema": SCHEMA}
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def speaker() -> Iterator[Speaker]:
    engine = Speaker()
    yield engine
    engine.stop()


@pytest.fixture
def client(speaker: Speaker, make_state: Callable[..., RolloutState], tmp_path: Any) -> Iterator[Client]:
    state = make_state(speaker)
    state.tokenizer, state.context_len = Letters(), 2000
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text(KEY)
    settings = AgentSettings(
        agent_runtime_arn="http://127.0.0.1:1/invocations", cumulative_token_mode=True,
        sglang_tool_call_parser="qwen", sglang_reasoning_parser="qwen3", gateway_api_key_file=str(key),
    )  # fmt: skip
    gateway = Gateway(state, settings)
    state.loop.run(gateway.start(), timeout=120)
    session = Session("the-session", {"max_new_tokens": 400, "temperature": 0.7})
    yield Client(gateway, session, gateway.open_session(session))
    state.loop.run(gateway.stop(), timeout=120)


@pytest.fixture
def oai(client: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=client.base_url, api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def claude(client: Client) -> Iterator[anthropic.Anthropic]:
    base_url = client.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base_url, api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def check_one_sample(client: Client) -> None:
    """The two turns are one sample, in which nothing was encoded again."""
    first, second = client.session.turns
    assert second.prompt_ids[: len(first.all_ids)] == first.all_ids
    (sample,) = client.samples()
    assert sample.tokens == second.all_ids
    assert sample.effective_response_length == len(first.completion_ids) + len(second.completion_ids)
    assert "<tool_response>" not in Letters().decode(first.all_ids) and "role" not in sample.response


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_by_openais_chat(speaker: Speaker, client: Client, oai: openai.OpenAI, stream: bool) -> None:
    speaker.lines = [THINKING + "I add." + CALL, "2"]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    if stream:
        chunks = list(
            oai.chat.completions.create(
                model="m", messages=messages, tools=[OF_CHAT], stream=True, stream_options={"include_usage": True}
            )
        )
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        content, thought = (
            "".join(getattr(delta, name, None) or "" for delta in deltas) for name in ("content", "reasoning_content")
        )
        (calls,) = [delta.tool_calls for delta in deltas if delta.tool_calls]
        usage, reason = chunks[-1].usage, [c.choices[0].finish_reason for c in chunks if c.choices][-1]
    else:
        answer = oai.chat.completions.create(model="m", messages=messages, tools=[OF_CHAT], tool_choice="auto")
        message, reason, usage = answer.choices[0].message, answer.choices[0].finish_reason, answer.usage
        content, thought, calls = message.content, message.reasoning_content, message.tool_calls  # type: ignore
    assert (content, thought, reason) == ("I add.", "Is it?", "tool_calls")
    assert usage is not None and usage.completion_tokens == len(THINKING + "I add." + CALL) + 1
    call = calls[0].model_dump(exclude={"index"})  # type: ignore[index]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
    messages += [
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "2"},
    ]
    answer = oai.chat.completions.create(model="m", messages=messages, tools=[OF_CHAT])
    assert answer.choices[0].message.content == "2" and answer.choices[0].finish_reason == "stop"
    check_one_sample(client)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_by_openais_responses(
    speaker: Speaker, client: Client, oai: openai.OpenAI, stream: bool
) -> None:
    speaker.lines = [THINKING + "I add." + CALL, "2"]
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    asked: Any = {"model": "m", "tools": [OF_RESPONSES], "instructions": "Add."}
    if stream:
        with oai.responses.stream(input=items, **asked) as events:
            kinds = [each.type for each in events]
            answer: Any = events.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert {"response.output_text.delta", "response.function_call_arguments.done"} <= set(kinds)
    else:
        answer = oai.responses.create(input=items, **asked)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output_text == "I add." and answer.status == "completed"
    assert answer.usage.output_tokens == len(THINKING + "I add." + CALL) + 1
    call = answer.output[2]
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    items += [item.model_dump(exclude_none=True) for item in answer.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
    assert oai.responses.create(input=items, **asked).output_text == "2"
    check_one_sample(client)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_by_anthropics_messages(
    speaker: Speaker, client: Client, claude: anthropic.Anthropic, stream: bool
) -> None:
    speaker.lines = [THINKING + "I add." + CALL, "2"]
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    asked: Any = {"model": "m", "max_tokens": 200, "tools": [OF_MESSAGES], "system": "Add."}
    if stream:
        with claude.messages.stream(messages=messages, **asked) as events:
            kinds = [each.type for each in events]
            answer = events.get_final_message()
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "text" in kinds
    else:
        answer = claude.messages.create(messages=messages, **asked)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    thought, said, call = (block.model_dump() for block in answer.content)
    assert (thought["thinking"], said["text"], answer.stop_reason) == ("Is it?", "I add.", "tool_use")
    assert (call["name"], call["input"]) == ("add", {"a": 1})
    assert answer.usage.output_tokens == len(THINKING + "I add." + CALL) + 1
    result: Any = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "2"}]}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    counted = claude.messages.count_tokens(messages=messages, model="m", tools=[OF_MESSAGES], system="Add.")
    last = claude.messages.create(messages=messages, **asked)
    assert last.content[0].text == "2" and last.stop_reason == "end_turn"  # type: ignore[union-attr]
    assert counted.input_tokens == last.usage.input_tokens == len(client.session.turns[1].prompt_ids)
    check_one_sample(client)


def test_a_stream_tells_each_token_before_the_next_is_made(
    speaker: Speaker, client: Client, oai: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    user: Any = [{"role": "user", "content": "hi"}]

    def heard(texts: Iterator[str | None]) -> str:
        told = ""
        for text in texts:
            if text:
                told += text
                # Only now does the engine make another token.
                speaker.pace.release()  # type: ignore[union-attr]
        return told

    for stream in ("chat", "completions", "responses", "messages"):
        speaker.lines, speaker.pace = ["abcd"], threading.Semaphore(0)
        if stream == "chat":
            chunks = oai.chat.completions.create(model="m", messages=user, stream=True)
            assert heard(chunk.choices[0].delta.content for chunk in chunks) == "abcd"
        elif stream == "completions":
            texts = oai.completions.create(model="m", prompt="ab", stream=True)
            assert heard(chunk.choices[0].text for chunk in texts) == "abcd"
        elif stream == "responses":
            events = oai.responses.create(model="m", input="hi", stream=True)
            deltas = (each.delta for each in events if each.type == "response.output_text.delta")
            assert heard(deltas) == "abcd"
        else:
            with claude.messages.stream(model="m", max_tokens=9, messages=user) as opened:
                assert heard(opened.text_stream) == "abcd"
        assert speaker.requests[-1]["stream"] is True and client.session.turns[-1].completion_ids == [*b"abcd", END]


def test_a_stream_that_an_engine_breaks_off_is_an_error_of_the_client(
    speaker: Speaker, client: Client, oai: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    user: Any = [{"role": "user", "content": "hi"}]
    speaker.status = 500
    with pytest.raises(openai.InternalServerError, match="it broke"):
        oai.chat.completions.create(model="m", messages=user, stream=True)
    with pytest.raises(anthropic.InternalServerError, match="it broke"):
        claude.messages.create(model="m", max_tokens=9, messages=user, stream=True)
    assert not client.session.turns


def test_answers_that_are_cut_say_so(
    speaker: Speaker, client: Client, oai: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    speaker.lines = ["abcd"] * 3
    cut = oai.responses.create(model="m", input="hi", max_output_tokens=2)
    assert cut.status == "incomplete" and cut.output_text == "ab"
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"
    user: Any = [{"role": "user", "content": "hi"}]
    assert claude.messages.create(model="m", max_tokens=2, messages=user).stop_reason == "max_tokens"
    assert oai.chat.completions.create(model="m", max_tokens=2, messages=user).choices[0].finish_reason == "length"


USER: Any = [{"role": "user", "content": "hi"}]
SCHEMA_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
REFUSED_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"tools": [OF_CHAT], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [OF_CHAT], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"response_format": SCHEMA_FORMAT}, "response_format"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0]"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"n": 2}, "n"),
]
REFUSED_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
]
REFUSED_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"tools": [OF_MESSAGES], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"messages": [*USER, {"role": "assistant", "content": "The"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0]"),
    ({"max_tokens": 0}, "max_tokens"),
]


def test_what_changes_the_answer_is_refused_in_the_form_of_the_protocol(
    client: Client, oai: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    for more, field in REFUSED_CHAT:
        with pytest.raises(openai.BadRequestError) as refused:
            oai.chat.completions.create(**({"model": "m", "messages": USER} | more))
        assert refused.value.param is not None and refused.value.param.startswith(field)
        assert refused.value.type == "invalid_request_error"
    for more, field in REFUSED_RESPONSES:
        with pytest.raises(openai.BadRequestError) as refused:
            oai.responses.create(**({"model": "m", "input": "hi"} | more))
        assert refused.value.param is not None and refused.value.param.startswith(field)
    for more, field in REFUSED_MESSAGES:
        with pytest.raises(anthropic.BadRequestError) as denied:
            claude.messages.create(**({"model": "m", "max_tokens": 9, "messages": USER} | more))
        body: Any = denied.value.body
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert body["error"]["message"].startswith(field)
    assert not client.session.turns


def test_what_asks_for_nothing_is_taken(
    speaker: Speaker, client: Client, oai: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    speaker.lines = ["ok"] * 3
    chat: Any = {"response_format": {"type": "text"}, "tool_choice": "none", "tools": [OF_CHAT], "seed": 3, "n": 1}
    chat |= {"messages": [{"role": "developer", "content": "Add."}, *USER], "temperature": 0.2, "logit_bias": {}}
    assert oai.chat.completions.create(model="m", **chat).choices[0].message.content == "ok"
    text: Any = {"format": {"type": "text"}}
    more: Any = {"text": text, "store": False, "truncation": "disabled", "include": [], "metadata": {"a": "b"}}
    assert oai.responses.create(model="m", input="hi", parallel_tool_calls=False, **more).output_text == "ok"
    more = {"thinking": {"type": "disabled"}, "metadata": {"user_id": "me"}, "service_tier": "auto"}
    more["extra_body"] = {"top_k": 3, "speed": "standard"}
    system: Any = [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}]
    answer = claude.messages.create(model="m", max_tokens=9, messages=USER, system=system, **more)
    assert answer.content[0].text == "ok"  # type: ignore[union-attr]
    assert "tools" not in Letters().decode(client.session.turns[0].prompt_ids), "none may be called"


def test_a_key_is_asked_of_every_client(client: Client) -> None:
    user: Any = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=client.base_url, api_key="other", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model="m", messages=user)
        with pytest.raises(openai.AuthenticationError):
            stranger.responses.create(model="m", input="hi")
    with anthropic.Anthropic(base_url=client.base_url.removesuffix("/v1"), api_key="other", max_retries=0) as claude:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            claude.messages.create(model="m", max_tokens=9, messages=user)
        body: Any = refused.value.body
        assert body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.AuthenticationError):
            claude.messages.count_tokens(model="m", messages=user)
