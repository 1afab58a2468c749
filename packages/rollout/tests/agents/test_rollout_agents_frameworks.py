"""Frameworks of agents at the gateway. The packages are large, and the tests do not require them. To run these:

pip install litellm langchain-openai langgraph strands-agents
pytest packages/rollout/tests/agents/test_rollout_agents_frameworks.py
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rollout_agents_fakes import Client, Letters, Speaker

from slime.rollout.agents.gateway import Gateway
from slime.rollout.agents.sessions import Session
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.generate.state import RolloutState

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def framework(name: str) -> Any:
    """The module, or a skip that says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed ({error}); see the top of this file")


@pytest.fixture
def speaker() -> Iterator[Speaker]:
    engine = Speaker()
    yield engine
    engine.stop()


@pytest.fixture
def client(speaker: Speaker, make_state: Callable[..., RolloutState]) -> Iterator[Client]:
    state = make_state(speaker)
    state.tokenizer, state.context_len = Letters(), 20_000
    settings = AgentSettings(
        agent_runtime_arn="http://127.0.0.1:1/invocations", cumulative_token_mode=True, sglang_tool_call_parser="qwen"
    )
    gateway = Gateway(state, settings)
    state.loop.run(gateway.start(), timeout=120)
    session = Session("the-session", {"max_new_tokens": 400, "temperature": 0.7})
    yield Client(gateway, session, gateway.open_session(session))
    state.loop.run(gateway.stop(), timeout=120)


def check_one_sample(client: Client) -> None:
    """The call of the tool and the answer to it are one sample, in which nothing was encoded again."""
    first, second = client.session.turns
    assert second.prompt_ids[: len(first.all_ids)] == first.all_ids
    (sample,) = client.samples()
    assert sample.metadata["drifted_turns"] == 0 and sample.response.endswith("3<|im_end|>")


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
@pytest.mark.parametrize("stream", [False, True])
def test_litellm(speaker: Speaker, client: Client, provider: str, stream: bool) -> None:
    litellm = framework("litellm")
    speaker.lines = ["yes"]
    base_url = client.base_url if provider == "openai" else client.base_url.removesuffix("/v1")
    answer = litellm.completion(
        model=f"{provider}/m", api_base=base_url, api_key="none", stream=stream, max_tokens=20, num_retries=0,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    )  # fmt: skip
    text = "".join(c.choices[0].delta.content or "" for c in answer) if stream else answer.choices[0].message.content
    assert text == "yes" and len(client.session.turns) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_langgraph_calls_its_tool(speaker: Speaker, client: Client, stream: bool) -> None:
    langchain, prebuilt = framework("langchain_openai"), framework("langgraph.prebuilt")
    speaker.lines = [CALL, "3"]
    model = langchain.ChatOpenAI(model="m", base_url=client.base_url, api_key="none", streaming=stream, max_retries=0)
    agent = prebuilt.create_react_agent(model, [add])
    answer = agent.invoke({"messages": [{"role": "user", "content": "1+2"}]})
    assert answer["messages"][-1].content == "3"
    check_one_sample(client)


def test_an_agent_of_strands_calls_its_tool(speaker: Speaker, client: Client) -> None:
    strands, models = framework("strands"), framework("strands.models.openai")
    speaker.lines = [CALL, "3"]
    model = models.OpenAIModel(client_args={"base_url": client.base_url, "api_key": "none"}, model_id="m")
    agent = strands.Agent(model=model, tools=[strands.tool(add)], callback_handler=None)
    assert "3" in str(agent("1+2"))
    check_one_sample(client)
