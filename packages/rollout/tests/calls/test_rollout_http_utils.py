"""Posts of custom code share their connections."""

from __future__ import annotations

import asyncio

from aiohttp import ClientSession, web

from slime.rollout.calls.event_loop import LoopThread
from slime.utils import http_utils
from slime.utils.http_utils import post


async def served(count: int) -> tuple[set[object], ClientSession]:
    """The connections of `count` posts, one after the other, and the session that made them."""
    connections: set[object] = set()

    async def answer(request: web.Request) -> web.Response:
        connections.add(request.transport)
        return web.json_response({"cookies": len(request.cookies)}, headers={"Set-Cookie": "a=1"})

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/"  # type: ignore[union-attr]
    try:
        for _ in range(count):
            assert await post(url, {}, max_retries=1) == {"cookies": 0}, "calls share connections and nothing else"
        return connections, await http_utils._session()
    finally:
        await runner.cleanup()


def test_posts_of_a_loop_share_a_connection_until_the_loop_ends() -> None:
    for _ in range(2):
        connections, session = asyncio.run(served(21))
        assert len(connections) == 1
        assert session.closed and session not in [known for known, _ in http_utils._SESSIONS.values()]


def test_the_rollout_loop_closes_its_session_when_it_stops() -> None:
    thread = LoopThread()
    connections, session = thread.run(served(3), timeout=30)
    assert len(connections) == 1 and not session.closed
    thread.stop()
    assert session.closed and thread.loop not in http_utils._SESSIONS
