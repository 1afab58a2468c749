"""Released frameworks of agents, unchanged, at the gateway of a rollout and at an embedded engine.

The packages are large and no dependencies of ours: the tests install them into a directory of their own.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uv
from rollout_agents_fakes import Client, Letters, Speaker
from rollout_tiny_model import write_tiny_model

from slime.rollout.agents.gateway import Gateway
from slime.rollout.agents.sessions import Session
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.rollout.generate.state import RolloutState

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module", autouse=True)
def frameworks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes the packages of frameworks.txt importable, behind those that are installed."""
    directory = tmp_path_factory.mktemp("frameworks")
    pins = Path(__file__).with_name("frameworks.txt")
    where = ["--python", sys.executable, "--target", str(directory), "--no-deps", "--requirement", str(pins)]
    subprocess.run([uv.find_uv_bin(), "--quiet", "pip", "install", *where], check=True, timeout=300)
    sys.path.append(str(directory))
    yield
    sys.path.remove(str(directory))
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = write_tiny_model(tmp_path_factory.mktemp("model"))
    with start_embedded(EmbeddedOptions(model_path=str(model), threads=1)) as process:
        yield process.wait_ready(280)


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
    litellm = importlib.import_module("litellm")
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
    langchain, prebuilt = importlib.import_module("langchain_openai"), importlib.import_module("langgraph.prebuilt")
    speaker.lines = [CALL, "3"]
    model = langchain.ChatOpenAI(model="m", base_url=client.base_url, api_key="none", streaming=stream, max_retries=0)
    agent = prebuilt.create_react_agent(model, [add])
    answer = agent.invoke({"messages": [{"role": "user", "content": "1+2"}]})
    assert answer["messages"][-1].content == "3"
    check_one_sample(client)


def test_an_agent_of_strands_calls_its_tool(speaker: Speaker, client: Client) -> None:
    strands, models = importlib.import_module("strands"), importlib.import_module("strands.models.openai")
    speaker.lines = [CALL, "3"]
    model = models.OpenAIModel(client_args={"base_url": client.base_url, "api_key": "none"}, model_id="m")
    agent = strands.Agent(model=model, tools=[strands.tool(add)], callback_handler=None)
    assert "3" in str(agent("1+2"))
    check_one_sample(client)


@pytest.mark.parametrize("stream", [False, True])
def test_an_embedded_engine_answers_them_alike(engine: EngineProcess, stream: bool) -> None:
    litellm = importlib.import_module("litellm")
    langchain = importlib.import_module("langchain_openai")
    strands, models = importlib.import_module("strands"), importlib.import_module("strands.models.openai")
    base_url, messages = f"{engine.url}/v1", [{"role": "user", "content": "12"}]
    model = langchain.ChatOpenAI(
        model="m", base_url=base_url, api_key="none", streaming=stream, max_retries=0, temperature=0, max_tokens=4
    )
    text = model.invoke(messages).content
    answer = litellm.completion(
        model="openai/m", api_base=base_url, api_key="none", messages=messages, stream=stream, temperature=0,
        max_tokens=4, num_retries=0,
    )  # fmt: skip
    parts = [c.choices[0].delta.content or "" for c in answer] if stream else [answer.choices[0].message.content]
    assert text and "".join(parts) == text
    params = {"temperature": 0, "max_tokens": 4, "stream": stream}
    speaker = models.OpenAIModel(client_args={"base_url": base_url, "api_key": "none"}, model_id="m", params=params)
    with pytest.raises(strands.types.exceptions.MaxTokensReachedException):
        strands.Agent(model=speaker, callback_handler=None)("12")
