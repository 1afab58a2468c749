"""API keys of engines: who makes them, who is told, and which calls carry them."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest
from aiohttp import web
from rollout_fakes import FakeEngine

from slime.rollout import launch
from slime.rollout.engines import keys, registry
from slime.rollout.engines.base import RemoteEngine
from slime.rollout.fleet.engine_host import EngineHost
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile
from slime.utils.http_utils import post


def settings(**values: object) -> RolloutSettings:
    return RolloutSettings(hf_checkpoint="none", **values)  # type: ignore[arg-type]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text("of-others\n")
    return file


def test_each_engine_that_a_run_starts_has_a_key_of_its_own() -> None:
    starts = [
        *registry.KINDS["embedded"].starts(settings(rollout_num_engines=2), []),
        *registry.KINDS["sglang"].starts(settings(rollout_num_gpus=2), ["0", "1"]),
    ]
    made = {start.keywords["api_key"] for start in starts}  # type: ignore[attr-defined]
    assert len(made) == 4 and min(map(len, made)) > 40


def test_no_key_looks_like_a_flag_to_the_engine_that_gets_it() -> None:
    # One of 64 keys began with a hyphen, and its run ended as SGLang started.
    assert all(keys.new_key().isalnum() for _ in range(1000))


def test_external_engines_have_the_key_of_the_file(key_file: Path, tmp_path: Path) -> None:
    addresses = {"rollout_external_engine_addrs": ["h:1", "h:2"]}
    found = launch.start_engines(settings(**addresses, rollout_engine_api_key_file=str(key_file)))
    assert [engine.api_key for engine in found] == ["of-others"] * 2
    assert [engine.api_key for engine in launch.start_engines(settings(**addresses))] == [None] * 2
    with pytest.raises(MissingFile, match="--rollout-engine-api-key-file: no such file"):
        launch.start_engines(settings(**addresses, rollout_engine_api_key_file=str(tmp_path / "none")))
    key_file.chmod(0o644)
    with pytest.raises(InvalidFile, match="--rollout-engine-api-key-file: every user can read"):
        launch.start_engines(settings(**addresses, rollout_engine_api_key_file=str(key_file)))
    with pytest.raises(InvalidSetting, match="--rollout-engine-api-key-file requires --rollout-external-engine-addrs"):
        settings(rollout_engine_api_key_file=str(key_file))


def test_engines_of_another_node_keep_their_keys() -> None:
    host = EngineHost([RemoteEngine("embedded-0", "http://127.0.0.1:5", "embedded", "secret")], "10.0.0.1")
    (engine,) = pickle.loads(pickle.dumps(host.engines))
    assert (engine.url, engine.api_key) == ("http://10.0.0.1:5", "secret")


def test_calls_of_plug_ins_carry_the_key_of_the_engine_and_of_no_other_server(engine: FakeEngine, make_state) -> None:
    engine.api_key = "secret"
    seen: list[str | None] = []

    async def note(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({})

    async def scenario() -> None:
        application = web.Application()
        application.router.add_post("/generate", note)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        await post(f"{url}/generate", {})
        keys.remember(url, "mine")
        await post(f"{url}/generate", {})
        keys.remember(url, None)
        await runner.cleanup()

    asyncio.run(scenario())
    assert seen == [None, "Bearer mine"]
    state = make_state(engine)
    assert keys.engine_headers(f"{engine.url}/generate") == {"Authorization": "Bearer secret"}
    state.fleet.stop()
    assert keys.engine_headers(engine.url) == {}
