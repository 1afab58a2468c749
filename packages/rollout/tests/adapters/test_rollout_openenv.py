"""Environments behind OpenEnv's protocol, on a server of the package where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rollout_openenv_servers import BrokenServer, PackageServer, RecordedServer, Server, observation

from slime.rollout.adapters import openenv
from slime.rollout.adapters.gym import prompts
from slime.rollout.adapters.openenv import OpenEnv
from slime.types.errors import InvalidField, InvalidSetting, RemoteError, Unavailable

StartServer = Callable[..., Server]


@pytest.fixture(params=["recorded", "openenv"])
def start(request: pytest.FixtureRequest) -> Iterator[StartServer]:
    if request.param == "openenv" and importlib.util.find_spec("openenv") is None:
        pytest.skip("the package openenv is not installed")
    kind = RecordedServer if request.param == "recorded" else PackageServer
    started: list[Server] = []

    def start(rooms: int = 4) -> Server:
        started.append(kind(rooms))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def make(server: Server, **options: Any) -> OpenEnv:
    return OpenEnv(server.url, **{"action": "text", "observation": "digit"} | options)


def test_an_episode_has_the_steps_and_rewards_of_the_server(start: StartServer) -> None:
    server = start()

    async def main() -> None:
        env = make(server, options={"level": 2})
        assert await env.reset(seed=3) == ("3", {})
        assert await env.step("4") == ("4", 1.0, False, False, {})
        assert await env.step("9") == ("5", 0.0, False, False, {})
        other = make(server)
        assert (await other.reset(seed=7))[0] == "7", "an episode has a session of its own"
        assert await env.step("6") == ("", 1.0, True, False, {})
        await env.close()
        await other.close()
        await gone(server)

    asyncio.run(main())
    assert server.resets == [{"seed": 3, "level": 2}, {"seed": 7}]


async def gone(server: Server) -> None:
    """Waits until the server has closed what was closed here."""
    async with asyncio.timeout(20):
        while server.sessions():
            await asyncio.sleep(0.01)


def test_actions_and_observations_may_be_functions(start: StartServer) -> None:
    env = make(start(), action=lambda text: {"text": text.strip("[]")}, observation=lambda seen: f"<{seen['digit']}>")

    async def main() -> None:
        assert (await env.reset(seed=1))[0] == "<1>"
        assert (await env.step("[2]"))[:2] == ("<2>", 1.0)
        await env.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [("text", "x", "EXECUTION_ERROR: no digit: x"), ("word", "5", "VALIDATION_ERROR: Invalid message")],
)
def test_an_action_that_the_server_refuses_ends_the_episode(
    start: StartServer, field: str, text: str, words: str
) -> None:
    env = make(start(), action=field, refused=-1.0)

    async def main() -> None:
        await env.reset(seed=1)
        observation, reward, terminated, truncated, info = await env.step(text)
        assert (observation, reward, terminated, truncated) == ("", -1.0, True, False)
        assert info["error"].startswith(words)
        await env.close()

    asyncio.run(main())


def test_a_server_that_is_full_is_waited_for(start: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "PAUSE_SECONDS", 0.01)
    server = start(rooms=1)

    async def main() -> None:
        first, second = make(server), make(server)
        await first.reset(seed=1)
        waiting = asyncio.create_task(second.reset(seed=2))
        with pytest.raises(Unavailable, match="had no room for a session in 0 s: CAPACITY_REACHED: .*1/1 sessions"):
            await make(server, wait_seconds=0).reset(seed=3)
        assert not waiting.done()
        await first.close()
        assert (await asyncio.wait_for(waiting, 20))[0] == "2"
        await second.close()

    asyncio.run(main())


def test_pings_are_answered_while_the_model_generates() -> None:
    """A server closes sessions whose pings are not answered in time."""
    server = RecordedServer(rooms=1)

    async def main() -> None:
        env = make(server)
        await env.reset(seed=1)
        assert await asyncio.to_thread(server.is_alive.wait, 20)
        assert (await env.step("2"))[1] == 1.0
        await env.close()

    asyncio.run(main())
    server.stop()


def test_first_observations_are_prompt_data(start: StartServer, tmp_path: Path) -> None:
    server = start()
    prompts(lambda: make(server), range(2), tmp_path / "prompts.jsonl", chat=False)  # type: ignore[arg-type,return-value]
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert rows == [{"input": str(seed), "metadata": {"seed": seed}} for seed in range(2)]
    asyncio.run(gone(server))


def test_an_observation_without_the_field_is_named_with_its_fields(start: StartServer) -> None:
    env = make(start(), observation="text")

    async def main() -> None:
        with pytest.raises(InvalidField, match="have no field 'text', only digit, metadata"):
            await env.reset(seed=1)
        await env.close()

    asyncio.run(main())


def test_a_server_that_is_not_there_or_goes_away_is_named() -> None:
    server = RecordedServer(rooms=2)
    env = make(server)

    async def main() -> None:
        await env.reset(seed=1)
        await asyncio.to_thread(server.stop)
        with pytest.raises(RemoteError, match=f"{server.url} ended the session"):
            await env.step("2")
        await env.close()
        with pytest.raises(Unavailable, match=f"no OpenEnv server answers at {server.url}/ws"):
            await env.reset(seed=1)
        with pytest.raises(InvalidField, match="reset.. before step"):
            await make(server).step("2")

    asyncio.run(main())
    with pytest.raises(InvalidSetting, match="must be http://HOST:PORT, got 'digits:80'"):
        OpenEnv("digits:80", action="text", observation="digit")


def answer(**data: Any) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"digit": "2"}, "done": False} | data})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<html>", "answered a step with <html>"),
        ("[" * 100_000, "answered a step with [[[["),
        ("[1]", "answered a step with .1."),
        (answer(observation="digit"), "answered a step with"),
        (answer(reward=float("nan")), "reward nan, expected a finite number"),
        (answer(reward=10**400), "reward 1000"),
        (answer(reward="much"), "reward 'much', expected"),
        (answer(reward=[1.0]), "reward .1.0., expected"),
    ],
    ids=["html", "deep", "list", "text", "nan", "huge", "word", "numbers"],
)
def test_an_answer_that_is_none_is_named(text: str, words: str) -> None:
    server = BrokenServer([], [text])

    async def main() -> None:
        env = make(server)
        await env.reset()
        with pytest.raises(RemoteError, match=words if "[[" not in words else None) as error:
            await env.step("2")
        assert len(str(error.value)) < 500
        await env.close()

    asyncio.run(main())
    server.stop()


def test_a_long_error_of_a_server_is_cut() -> None:
    data = {"message": "x" * 10_000, "code": "EXECUTION_ERROR"}
    server = BrokenServer([], [json.dumps({"type": "error", "data": data})])

    async def main() -> None:
        env = make(server)
        await env.reset()
        assert len((await env.step("2"))[4]["error"]) < 2_000
        await env.close()

    asyncio.run(main())
    server.stop()


@pytest.mark.parametrize(("number", "words"), [(1, "answered a step before it was asked"), (100, "ended the session")])
def test_answers_that_nobody_asked_for_are_no_answers(number: int, words: str) -> None:
    """Each would be taken for that to the next action, and they would fill the memory."""
    server = BrokenServer([answer(reward=9.0)] * number, [json.dumps(observation(2, 1.0, False))])

    async def main() -> None:
        env = make(server)
        with pytest.raises(RemoteError, match=words):
            await env.reset()
            async with asyncio.timeout(20):
                while not env._answers.qsize():
                    await asyncio.sleep(0.01)
            while True:
                await env.step("2")
        assert env._answers.qsize() <= openenv.MOST_WAITING
        await env.close()

    asyncio.run(main())
    server.stop()


def test_a_server_that_reads_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "CLOSE_SECONDS", 0.2)
    server = BrokenServer([], [], reads=False)

    async def main() -> None:
        env = make(server, step_seconds=0.5)
        await env.reset()
        async with asyncio.timeout(20):
            with pytest.raises(RemoteError, match=r"did not answer a step in 0.5 s"):
                await env.step("2" * (64 << 20))
            await env.close()

    asyncio.run(main())
    server.stop()


def test_a_server_that_accepts_and_says_nothing_is_named_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        env = OpenEnv(f"http://127.0.0.1:{listener.getsockname()[1]}", action="t", observation="o", step_seconds=0.2)

        async def main() -> None:
            async with asyncio.timeout(20):
                with pytest.raises(Unavailable, match=r"no OpenEnv server answers at .*/ws within 0.2 s"):
                    await env.reset()

        asyncio.run(main())


def test_headers_are_not_sent_to_another_host() -> None:
    async def main() -> list[str]:
        seen: list[str] = []

        async def other(request: web.Request) -> web.Response:
            seen.append(request.headers.get("X-API-Key", ""))
            return web.Response()

        async def redirect(request: web.Request) -> web.Response:
            raise web.HTTPFound(f"http://127.0.0.1:{elsewhere.port}/ws")

        apps = [web.Application(), web.Application()]
        for app, handler in zip(apps, (other, redirect), strict=True):
            app.router.add_get("/ws", handler)
        async with TestServer(apps[0]) as elsewhere, TestServer(apps[1]) as named:
            url = f"http://127.0.0.1:{named.port}"
            env = OpenEnv(url, action="text", observation="digit", headers={"X-API-Key": "s3cret"})
            with pytest.raises(
                Unavailable, match=f"{url}/ws: it redirects to http://127.0.0.1:{elsewhere.port}/ws, which"
            ):
                await env.reset()
        return seen

    assert asyncio.run(main()) == []
