"""The embedded engine: weights, pauses, aborts, and how its process lives and dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rollout_tiny_model import write_tiny_model
from safetensors.torch import load_file, save

from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.embedded.launch import command_line, start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.types.errors import EngineError, InvalidField, InvalidFile, MissingFile, PortInUse, SlimeError

PROMPT = [2, 3, 4, 41]
GREEDY = {"temperature": 0, "max_new_tokens": 6}
SCORED = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("first"), seed=0)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("second"), seed=1)


@pytest.fixture(scope="module")
def engine(first: Path) -> Iterator[EngineProcess]:
    with start_embedded(EmbeddedOptions(model_path=str(first), threads=1), name="engine-7") as process:
        yield process.wait_ready(120)


@pytest.fixture
def call(engine: EngineProcess, first: Path) -> Any:
    """call(lambda client: ...): runs it with a client; the engine starts every test with the first weights."""

    def run(function: Any) -> Any:
        async def inside() -> Any:
            async with EngineClient(engine.url, engine.name) as client:
                return await function(client)

        return asyncio.run(inside())

    run(lambda client: client.update_weights_from_disk(str(first), 0))
    return run


def output(call: Any) -> list[int]:
    return call(lambda client: client.generate(PROMPT, GREEDY))["output_ids"]


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_weights_from_buckets_take_effect_with_the_last_one(call: Any, second: Path) -> None:
    before = output(call)
    items = list(tensors(second).items())
    half = len(items) // 2
    call(lambda c: c.update_weights_from_bucket(save(dict(items[:half])), 3, last=False))
    assert call(lambda c: c.weight_version()) == "0"
    call(lambda c: c.update_weights_from_bucket(save(dict(items[half:])), 3, last=True))
    assert call(lambda c: c.weight_version()) == "3"
    answer = call(lambda c: c.generate(PROMPT, GREEDY))
    assert answer["meta_info"]["weight_version"] == "3"
    call(lambda c: c.update_weights_from_disk(str(second), 4))
    assert answer["output_ids"] == output(call) != before
    assert call(lambda c: c.weight_version()) == "4"


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda t: t | {"model.extra.weight": torch.zeros(2)}, "model.extra.weight"),
        (lambda t: t | {"model.norm.weight": torch.zeros(3)}, "model.norm.weight"),
        (lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}, "model.norm.weight"),
    ],
)
def test_a_refused_update_names_the_tensor_and_changes_nothing(
    call: Any, second: Path, change: Any, named: str
) -> None:
    before = output(call)
    with pytest.raises(InvalidField, match=named) as refused:
        call(lambda c: c.update_weights_from_bucket(save(change(tensors(second))), 9, last=True))
    assert refused.value.field == named
    assert call(lambda c: c.weight_version()) == "0"
    assert output(call) == before


def in_file(path: object, version: int, *, last: bool, **more: str) -> Any:
    params = {"weight_version": str(version), "last": str(last).lower(), "file": str(path)} | more
    return lambda c: c.call("POST", "/update_weights_from_tensor", data=b"", params=params)


def test_a_bucket_in_a_file_of_this_machine_is_read_from_there(call: Any, second: Path, tmp_path: Path) -> None:
    items = list(tensors(second).items())
    half = len(items) // 2
    memory = os.memfd_create("bucket")
    path = f"/proc/{os.getpid()}/fd/{memory}"
    # The engine has let go of the first content when it answers, and tells that it read a file.
    for version, part, last in ((3, {}, False), (3, dict(items[:half]), False), (3, dict(items[half:]), True)):
        os.ftruncate(memory, 0)
        os.pwrite(memory, save(part), 0)
        assert call(in_file(path, version, last=last))["file"] == path
    os.close(memory)
    assert call(lambda c: c.weight_version()) == "3"
    by_files = output(call)
    call(lambda c: c.update_weights_from_disk(str(second), 4))
    assert output(call) == by_files


def test_a_file_that_holds_no_bucket_is_refused_by_name(call: Any, tmp_path: Path) -> None:
    before = output(call)
    (tmp_path / "text").write_text("no safetensors")
    os.mkfifo(tmp_path / "pipe")
    for name in ("none", "text", "pipe", ""):
        with pytest.raises(InvalidField, match=f"file: {tmp_path / name}: ") as refused:
            call(in_file(tmp_path / name, 9, last=True))
        assert refused.value.field == "file"
    with pytest.raises(InvalidField, match="delta: got true, expected false with a file"):
        call(in_file(tmp_path / "text", 9, last=True, delta="true"))
    assert call(lambda c: c.weight_version()) == "0"
    assert output(call) == before


def test_a_pickle_is_refused(call: Any) -> None:
    with pytest.raises(InvalidField, match="pickle"):
        call(lambda c: c.post("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}))


def test_an_empty_bucket_leaves_the_model_whole(call: Any) -> None:
    before = output(call)
    call(lambda c: c.update_weights_from_bucket(save({}), 5, last=False))
    assert output(call) == before
    assert call(lambda c: c.weight_version()) == "0"


def test_a_mixture_of_versions_does_not_generate(call: Any, second: Path) -> None:
    name, tensor = next(iter(tensors(second).items()))
    call(lambda c: c.update_weights_from_bucket(save({name: tensor}), 5, last=False))
    with pytest.raises(SlimeError, match="half-way"):
        output(call)
    with pytest.raises(SlimeError, match="half-way"):
        call(lambda c: c.post("/generate", SCORED))
    call(lambda c: c.update_weights_from_disk(str(second), 5))
    assert output(call)


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_a_paused_engine_keeps_new_requests_until_it_goes_on(call: Any, mode: str) -> None:
    expected = output(call)

    async def scenario(client: EngineClient) -> dict[str, Any]:
        await client.pause(mode)
        request = asyncio.ensure_future(client.generate(PROMPT, GREEDY))
        done, _ = await asyncio.wait({request}, timeout=0.3)
        assert not done
        await client.health_generate()
        await client.continue_()
        return await request

    assert call(scenario)["output_ids"] == expected


def test_an_aborted_request_answers_with_what_it_has(call: Any) -> None:
    async def scenario(client: EngineClient) -> list[dict[str, Any]]:
        await client.pause("in_place")
        mine = asyncio.ensure_future(client.generate(PROMPT, GREEDY, rid="mine"))
        other = asyncio.ensure_future(client.generate(PROMPT, GREEDY, rid="other"))
        done: set[Any] = set()
        while not done:  # until the request has arrived there, an abort finds nothing
            await client.abort("mine")
            done, _ = await asyncio.wait({mine}, timeout=0.05)
        await client.continue_()
        return [await mine, await other]

    aborted, other = call(scenario)
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert aborted["output_ids"] == []
    assert other["meta_info"]["finish_reason"]["type"] == "length"


def test_it_says_what_it_serves(call: Any, first: Path) -> None:
    models = call(lambda c: c.get("/v1/models"))["data"]
    assert [model["id"] for model in models] == [first.name]
    assert call(lambda c: c.server_info())["engine"] == "embedded"
    call(lambda c: c.flush_cache())
    call(lambda c: c.health_generate())


def test_a_directory_that_is_no_model_is_refused_by_name(first: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((first / name).read_bytes())
    for path, error, words in (
        (tmp_path / "none", MissingFile, "no such directory"),
        (bare, InvalidFile, "no tokenizer"),
    ):
        with pytest.raises(error, match=words):
            start_embedded(EmbeddedOptions(model_path=str(path))).wait_ready(240)


def test_a_port_in_use_is_refused(first: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            start_embedded(EmbeddedOptions(model_path=str(first), port=port)).wait_ready(240)


def test_wrong_flags_end_it_with_code_2(first: Path) -> None:
    command = [*command_line(EmbeddedOptions(model_path=str(first))), "--prot", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "--port" in ended.stderr


def test_an_engine_that_is_killed_is_named_with_its_last_lines(first: Path) -> None:
    with start_embedded(EmbeddedOptions(model_path=str(first), threads=1), name="engine-9") as process:
        process.wait_ready(120)
        os.kill(process.pid, signal.SIGKILL)

        async def ask() -> None:
            async with EngineClient(process.url, process.name) as client:
                await client.generate(PROMPT, GREEDY)

        with pytest.raises(EngineError, match="engine-9"):
            asyncio.run(ask())
        process.stop()
        with pytest.raises(EngineError, match="engine-9.*SIGKILL(.|\n)*is served at"):
            process.raise_if_dead()


PARENT = """
import json, sys
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
process = start_embedded(EmbeddedOptions(model_path=sys.argv[1], threads=1)).wait_ready(120)
print(json.dumps(process.pid), flush=True)
sys.stdin.read()
"""


def test_an_engine_ends_with_its_parent(first: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(first)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    engine = psutil.Process(json.loads(parent.stdout.readline()))
    parent.kill()
    parent.communicate(timeout=120)
    gone, alive = psutil.wait_procs([engine], timeout=60)
    assert not alive
