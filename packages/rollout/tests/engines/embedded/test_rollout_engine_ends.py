"""The embedded engine where a client goes away, a process stops, or a stream meets a pause."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from rollout_tiny_model import write_tiny_model

from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.model.loading import load
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.types.errors import EngineError, InvalidFile, SlimeError

PROMPT = [2, 3, 4, 41]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[EngineProcess]:
    with start_embedded(EmbeddedOptions(model_path=str(directory), threads=1)) as process:
        yield process.wait_ready(120)


async def until_waiting(client: EngineClient, count: int) -> None:
    deadline = time.monotonic() + 20
    while (await client.server_info())["num_waiting"] != count:
        assert time.monotonic() < deadline


def test_a_client_that_goes_away_takes_its_request_with_it(engine: EngineProcess) -> None:
    async def scenario() -> dict[str, Any]:
        async with EngineClient(engine.url) as client:
            await client.pause("in_place")
            lost = asyncio.ensure_future(client.generate(PROMPT, GREEDY, rid="same"))
            await until_waiting(client, 1)
            kept = asyncio.ensure_future(client.generate([PROMPT] * 2, GREEDY, rid=["same", "other"]))
            await until_waiting(client, 3)
            lost.cancel()
            await until_waiting(client, 2)
            await client.continue_()
            return await kept

    # The other request has the same id, and is not touched.
    assert [a["meta_info"]["finish_reason"]["type"] for a in asyncio.run(scenario())] == ["length", "length"]


def test_calls_that_nobody_waits_for_do_not_end_the_engine(engine: EngineProcess) -> None:
    async def scenario() -> str:
        async with EngineClient(engine.url) as client:
            for call in (client.continue_, client.abort, lambda: client.generate([PROMPT] * 8, GREEDY)) * 10:
                task = asyncio.ensure_future(call())
                await asyncio.wait({task}, timeout=0.003)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            return (await client.generate(PROMPT, GREEDY))["meta_info"]["finish_reason"]["type"]

    assert asyncio.run(scenario()) == "length"


def test_a_stream_goes_on_from_its_tokens_after_a_retraction(engine: EngineProcess) -> None:
    async def scenario() -> tuple[list[list[int]], list[int]]:
        async with EngineClient(engine.url) as client, aiohttp.ClientSession() as session:
            params = GREEDY | {"max_new_tokens": 40}
            body = {"input_ids": PROMPT, "sampling_params": params, "stream": True}
            outputs: list[list[int]] = []
            async with session.post(engine.url + "/generate", json=body) as response:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    outputs.append(json.loads(line[6:])["output_ids"])
                    if len(outputs) == 1:
                        await client.pause("retract")
                        await client.continue_()
            return outputs, (await client.generate(PROMPT, params))["output_ids"]

    outputs, whole = asyncio.run(scenario())
    assert outputs[-1] == whole
    assert all(whole[: len(part)] == part for part in outputs)


def test_a_streamed_chat_never_shows_the_start_of_its_stop_string(engine: EngineProcess) -> None:
    async def scenario() -> tuple[str, str]:
        async with EngineClient(engine.url) as client, aiohttp.ClientSession() as session:
            body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
            text = (await client.post("/v1/completions", body))["choices"][0]["text"]
            body |= {"stop": text[2:4], "stream": True}
            async with session.post(engine.url + "/v1/completions", json=body) as response:
                lines = [line async for line in response.content if line.startswith(b"data: {")]
            return text, "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)

    text, streamed = asyncio.run(scenario())
    assert len(text) >= 4
    assert streamed == text[: text.index(text[2:4])]


def test_stop_answers_who_waits_and_leaves_nothing(directory: Path) -> None:
    process = start_embedded(EmbeddedOptions(model_path=str(directory), threads=1)).wait_ready(120)
    started = psutil.Process(process.pid)

    async def scenario() -> None:
        async with EngineClient(process.url) as client:
            await client.pause("in_place")
            waiting = [asyncio.ensure_future(client.generate(PROMPT, GREEDY)) for _ in range(3)]
            await until_waiting(client, 3)
            await asyncio.to_thread(process.stop, 60.0)
            for answer in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(answer, EngineError)
                assert "stopping" in str(answer)

    asyncio.run(scenario())
    assert not started.is_running()
    assert process.poll() == 0
    process.stop()


def test_weights_that_lack_a_tensor_or_are_cut_off_are_refused(directory: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    whole = (directory / "model.safetensors").read_bytes()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for words in ("model.norm.weight", "does not load"):
        with pytest.raises(InvalidFile, match=words):
            load(EmbeddedOptions(model_path=str(tmp_path)))
        (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def test_a_model_without_weights_is_named_without_the_flag_of_the_engines_program(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with (
        start_embedded(EmbeddedOptions(model_path=str(tmp_path)), name="embedded-7") as process,
        pytest.raises(InvalidFile, match=f"^the model of engine embedded-7: {tmp_path} has no weights: expected model"),
    ):
        process.wait_ready(60.0)


@pytest.mark.parametrize(
    "path, body, field",
    [
        ("/v1/chat/completions", {"messages": "hi"}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "seed": "x"}, "seed"),
        ("/v1/completions", {"prompt": ["1", "2"]}, "prompt"),
        ("/v1/completions", {"prompt": "1", "echo": True}, "echo"),
        ("/generate", {"input_ids": [[2], 3]}, "input_ids[1]"),
        ("/generate", {"text": ["1", "2" * 80]}, "text[1]"),
        ("/pause_generation", {"mode": "softly"}, "mode"),
        ("/abort_request", {}, "rid"),
        ("/update_weights_from_disk", {"model_path": "nowhere"}, "model_path"),
    ],
)
def test_a_bad_body_is_refused_by_field(engine: EngineProcess, path: str, body: dict[str, Any], field: str) -> None:
    async def scenario() -> None:
        async with EngineClient(engine.url) as client:
            await client.post(path, body)

    with pytest.raises(SlimeError) as refused:
        asyncio.run(scenario())
    assert refused.value.status == "INVALID_ARGUMENT"
    assert refused.value.field == field
