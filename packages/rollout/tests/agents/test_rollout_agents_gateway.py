"""The gateway over HTTP, as OpenAI's clients see it, against an engine that answers what it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rollout_agents_fakes import END, TEMPLATE_END, Client, Letters, Speaker

from slime.rollout.agents.gateway import Gateway
from slime.rollout.agents.sessions import Session
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.chat.front import PATHS
from slime.rollout.generate.state import RolloutState
from slime.types import Sample
from slime.types.errors import InvalidSetting, PortInUse


@pytest.fixture
def speaker() -> Iterator[Speaker]:
    engine = Speaker()
    yield engine
    engine.stop()


@pytest.fixture
def connect(speaker: Speaker, make_state: Callable[..., RolloutState]) -> Iterator[Callable[..., Client]]:
    opened: list[Gateway] = []

    def make(sampling: dict[str, Any] | None = None, **values: Any) -> Client:
        state = make_state(speaker)
        state.tokenizer, state.context_len = Letters(), 2000
        gateway = Gateway(state, AgentSettings(agent_runtime_arn="http://127.0.0.1:1/invocations", **values))
        state.loop.run(gateway.start(), timeout=120)
        opened.append(gateway)
        session = Session("the-session", {"max_new_tokens": 400, "temperature": 0.7} | (sampling or {}))
        return Client(gateway, session, gateway.open_session(session))

    yield make
    for gateway in opened:
        gateway.state.loop.run(gateway.stop(), timeout=120)


USER = {"role": "user", "content": "hi"}


def test_an_answer_has_openais_form_and_the_engines_tokens(speaker, connect):
    client = connect()
    speaker.lines = ["ok"]
    answer = client.chat([USER], logprobs=True)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ok"} and choice["finish_reason"] == "stop"
    assert answer["object"] == "chat.completion" and answer["model"] == "m"
    prompt = Letters().encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert answer["usage"].items() >= {
        "prompt_tokens": len(prompt), "completion_tokens": 3, "total_tokens": len(prompt) + 3
    }.items()  # fmt: skip
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == [-1.0, -2.0, -3.0]
    assert speaker.requests[-1]["input_ids"] == [prompt]
    (turn,) = client.session.turns
    assert (turn.prompt_ids, turn.completion_ids, turn.log_probs) == (prompt, [*b"ok", END], [-1.0, -2.0, -3.0])
    assert turn.weight_version == "4" and turn.finish_reason == "stop"


def test_turns_that_go_on_are_one_sample_and_a_changed_history_starts_another(speaker, connect):
    client = connect()
    speaker.lines = ["one", "two", "three"]
    messages = [USER]
    for _ in range(2):
        messages += [client.chat(messages)["choices"][0]["message"], {"role": "user", "content": "more"}]
    client.chat([{"role": "system", "content": "other"}, USER])
    first, second = client.samples()
    assert first.response == "one<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    assert first.effective_response_length == 8 and first.metadata["num_turns"] == 2
    assert second.response == "three<|im_end|>" and second.loss_mask == [1] * 6
    assert first.rollout_id == second.rollout_id == 7


@pytest.mark.parametrize("family", ["auto", "qwen"])
@pytest.mark.parametrize("limit", [400, 3])
def test_cumulative_prompts_go_on_from_tokens_that_no_text_would_give_again(speaker, connect, family, limit):
    client = connect({"max_new_tokens": limit}, cumulative_token_mode=True, renderer_family=family)
    speaker.lines = ["a\x02b c", "done"]
    said = client.chat([USER])["choices"][0]["message"]
    client.chat([USER, said, {"role": "user", "content": "more"}])
    (sample,) = client.samples()
    bridge = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    first, last = ("a<|im_start|>b c<|im_end|>", "done<|im_end|>") if limit == 400 else ("a<|im_start|>b", "don")
    assert sample.response == first + ("" if limit == 400 else "<|im_end|>") + bridge + last
    assert (sample.status is Sample.Status.TRUNCATED) == (limit == 3)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_parsed_and_their_answers_rendered(speaker, connect, stream):
    client = connect(sglang_tool_call_parser="qwen", cumulative_token_mode=True, renderer_family="qwen")
    speaker.lines = ["let me see" + CALL, "2"]
    answer = client.chat([USER], tools=[TOOL], stream=stream)
    if stream:
        events = [json.loads(line[6:]) for line in answer.split("\n\n") if line.startswith("data: {")]  # type: ignore[attr-defined]
        assert answer.endswith("data: [DONE]\n\n")  # type: ignore[attr-defined]
        deltas, reason = [e["choices"][0]["delta"] for e in events], events[-1]["choices"][0]["finish_reason"]
        assert "".join(delta.get("content", "") for delta in deltas) == "let me see"
        (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        assert calls[0].pop("index") == 0
        message = {"role": "assistant", "content": "let me see", "tool_calls": calls}
    else:
        message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
    (call,) = message["tool_calls"]
    assert reason == "tool_calls" and message["content"] == "let me see"
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 1}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for text in ("2", "3")]
    client.chat([USER, message, *results], tools=[TOOL])
    (sample,) = client.samples()
    assert (
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        in sample.response
    )


def test_what_is_no_tool_call_stays_text(speaker, connect):
    speaker.lines = ["<tool_call>{add}</tool_call>", CALL]
    client = connect(sglang_tool_call_parser="qwen")
    assert client.chat([USER], tools=[TOOL])["choices"][0]["message"]["content"] == "<tool_call>{add}</tool_call>"
    assert client.chat([USER])["choices"][0]["finish_reason"] == "stop", "no tools were offered"


def test_reasoning_is_kept_apart(speaker, connect):
    speaker.lines = ["<think>hm</think>\n\nyes"]
    message = connect(sglang_reasoning_parser="qwen3").chat([USER])["choices"][0]["message"]
    assert message["content"] == "yes" and message["reasoning_content"] == "hm"


def test_sampling_is_the_sessions_and_a_request_may_only_ask_for_less(speaker, connect):
    client = connect({"max_new_tokens": 4})
    speaker.lines = ["abcdefgh", "abcdefgh"]
    reason = client.chat([USER], temperature=0.0, top_p=0.1, max_tokens=9, stop="x")["choices"][0]["finish_reason"]
    params = speaker.requests[-1]["sampling_params"][0]
    assert reason == "length" and params["max_new_tokens"] == 4
    assert params["temperature"] == 0.7 and "top_p" not in params and params["stop"] == ["x"]
    assert client.chat([USER], max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    assert client.samples()[-1].status is Sample.Status.TRUNCATED


def test_plain_completions_take_text_and_token_ids(speaker, connect):
    client = connect()
    speaker.lines = ["x", "y"]
    status, answer = client.call("/completions", {"prompt": "ab"})
    assert status == 200 and answer["choices"][0]["text"] == "x"
    _, answer = client.call("/completions", {"prompt": [*b"ab", *b"x", END, *b"c"], "logprobs": 0})
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["y", TEMPLATE_END], "token_logprobs": [-1.0, -2.0], "top_logprobs": None, "text_offset": [0, 1]
    }  # fmt: skip
    (sample,) = client.samples()
    assert sample.tokens == [*b"abx", END, *b"cy", END] and sample.loss_mask == [1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/chat/completions", b"{", 400, "JSON"),
        ("/chat/completions", {"messages": []}, 400, "messages"),
        ("/chat/completions", {"messages": [{"content": "x"}]}, 400, "role and content"),
        ("/chat/completions", {"messages": [USER], "n": 2}, 400, "n: got 2"),
        ("/chat/completions", {"messages": [USER], "max_tokens": 0}, 400, "max_tokens"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "the context"),
        ("/completions", {"prompt": 3}, 400, "a text or a list of token ids"),
        ("/completions", {"prompt": "a", "echo": True}, 400, "echo: got True"),
        ("/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix: got b"),
        ("/completions", {"prompt": "a", "best_of": 3}, 400, "best_of: got 3"),
        ("/completions", {"prompt": "\ud800"}, 400, "prompt: got 'utf-8' codec"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "got 'utf-8' codec"),
        ("/chat/completions", {"messages": [USER], "stop": [""]}, 400, "stop: got ['']"),
        ("/chat/completions", {"messages": [USER], "stop": 0}, 400, "stop: got 0"),
        ("/chat/completions", {"messages": [USER], "chat_template_kwargs": {"chat_template": "x"}}, 400, "model's own"),
        ("/chat/completions", b"[" * 100_000, 400, "JSON"),
    ],
)
def test_a_wrong_request_is_refused_in_openais_form(speaker, connect, path, body, status, says):
    client = connect()
    got, answer = client.call(path, body)
    assert got == status and says in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error" and not client.session.turns


def test_models_and_unknown_sessions(connect):
    client = connect(model_id="tiny")
    assert client.call("/models")[1]["data"][0]["id"] == "tiny"
    client.base_url = client.base_url.replace("the-session", "another")
    assert client.call("/models")[0] == client.call("/chat/completions", {"messages": [USER]})[0] == 404


def test_closing_a_session_ends_its_requests_and_refuses_more(speaker, connect):
    client = connect()
    prompt = Letters().encode(Letters().apply_chat_template([USER]))
    speaker.held_prompts.add(tuple(prompt))
    speaker.lines = ["late"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.call, "/chat/completions", {"messages": [USER]})
        assert speaker.busy.wait(120)
        client.gateway.state.loop.run(client.gateway.close_session("the-session"), timeout=120)
        assert waiting.result(10)[0] == 503
    assert len(speaker.aborted) == 1 and speaker.aborted != ["all"]
    assert client.call("/chat/completions", {"messages": [USER]})[0] == 404 and not client.session.turns


def test_sessions_do_not_see_each_other(speaker, connect):
    client = connect()
    other = Session("other", dict(client.session.sampling_params))
    second = Client(client.gateway, other, client.gateway.open_session(other))
    speaker.lines = ["a"] * 16
    barrier = threading.Barrier(2)

    def talk(who: Client) -> None:
        barrier.wait(10)
        for _ in range(8):
            who.chat([USER])

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(talk, who) for who in (client, second)]:
            each.result(60)
    assert len(client.session.turns) == len(other.turns) == 8


def test_a_port_in_use_is_said(connect):
    taken = connect().gateway
    port = int(taken.url.rsplit(":", 1)[1])
    with pytest.raises(PortInUse, match=str(port)):
        connect(gateway_port=port)


def test_web_pages_and_other_hosts_are_refused_and_a_deep_body_is_a_bad_request(speaker, connect):
    client = connect(gateway_url="https://tunnel.example/x")
    client.base_url = client.base_url.replace("https://tunnel.example/x", client.gateway.local_url)
    path, body = "/chat/completions", {"messages": [USER]}
    for each in PATHS:
        each = each.removeprefix("/v1")
        assert client.call(each, body, Origin="http://evil.example")[0] == 403
        assert client.call(each, body, Host="evil.example")[0] == 403
        assert client.call(each, body, Content_Type="text/plain")[0] == 415
        assert client.call(each, b"[" * 900 + b"]" * 900)[0] == 400
        assert client.call(each, b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}")[0] == 400
    assert not speaker.requests
    speaker.lines = ["ok"]
    assert client.call(path, body, Host="tunnel.example")[0] == 200


def test_a_gateway_with_a_key_answers_those_who_have_it(speaker, connect, tmp_path):
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text("the-key\n")
    client = connect(gateway_api_key_file=str(file), gateway_host="0.0.0.0", gateway_url="http://127.0.0.1:1")
    client.base_url = client.base_url.replace(
        "http://127.0.0.1:1", client.gateway.local_url.replace("0.0.0.0", "127.0.0.1")
    )
    for key in ("", "Bearer other"):
        status, answer = client.call("/chat/completions", {"messages": [USER]}, Authorization=key)
        assert status == 401 and "the-key" not in str(answer)
    speaker.lines = ["ok"]
    assert client.call("/chat/completions", {"messages": [USER]}, Authorization="Bearer the-key")[0] == 200
    with pytest.raises(InvalidSetting, match="gateway_host 0.0.0.0 requires"):
        connect(gateway_host="0.0.0.0")


def test_arguments_that_nest_without_end_stay_text(speaker, connect):
    client = connect(sglang_tool_call_parser="qwen")
    tools = [{"type": "function", "function": {"name": "f"}}]
    deep = '<tool_call>{"name": "f", "arguments": ' + "[" * 2000 + "]" * 2000 + "}</tool_call>"
    client.gateway.state.context_len = 20_000
    client.session.sampling_params["max_new_tokens"] = 9000
    speaker.lines = [deep]
    message = client.chat([USER], tools=tools)["choices"][0]["message"]
    assert message["content"] == deep and "tool_calls" not in message and len(client.session.turns) == 1
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 2000}}
    speaker.lines = ["ok"]
    assert client.chat([USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER])


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"tool_choice": "auto", "response_format": {"type": "text"}, "top_logprobs": 0, "temperature": 0.3}, 200),
        ({"frequency_penalty": 0.0, "stream_options": None, "user": "me", "seed": 4, "top_k": 3}, 200),
        ({"tool_choice": "required"}, 400),
        ({"response_format": {"type": "json_schema"}}, 400),
        ({"logit_bias": {"5": 100}}, 400),
        ({"frequency_penalty": 0.5}, 400),
        ({"top_logprobs": 3}, 400),
        ({"max_token": 3}, 400),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(speaker, connect, more, status):
    client = connect()
    speaker.lines = ["ok"]
    found, answer = client.call("/chat/completions", {"messages": [USER]} | more)
    assert found == status, answer
    if status == 400:
        assert answer["error"]["param"] == next(iter(more))
