"""Calls agents over HTTP, at `http://host:port/invocations`."""

from __future__ import annotations

from typing import Any
from urllib.parse import urljoin

import aiohttp

from slime.rollout.agents.results import S3Results
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.agents.transport import JSON, SESSION_HEADER, Pace, is_pending, parse_result, result_place
from slime.types.errors import RemoteError, Unavailable

PING_SECONDS = 5.0


class HTTPAgent:
    """Transport for an agent that is called directly.

    The agent answers with its result, or with {"status": "processing", "s3_bucket": ..., "result_key": ...} and writes
    the result to S3 later. While waiting for it, requests to the agent's `/ping` check that the agent still runs.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.url = settings.agent_runtime_arn
        self._pace = Pace(settings.acr_tps_limit)
        timeout = aiohttp.ClientTimeout(total=settings.acr_timeout)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        self._results: S3Results | None = None

    async def run(self, session_id: str, payload: JSON) -> JSON:
        await self._pace.wait()
        answer = await self._post(session_id, payload)
        if not is_pending(answer):
            return answer
        bucket, key = result_place(answer, self.settings.s3_bucket, payload, session_id)
        if self._results is None:
            self._results = S3Results(self.settings)
        return await self._results.wait(bucket, key, self._check_alive)

    async def _post(self, session_id: str, payload: JSON) -> JSON:
        try:
            async with self._session.post(self.url, json=payload, headers={SESSION_HEADER: session_id}) as response:
                status, body = response.status, await response.read()
        except aiohttp.ClientError as error:
            raise self._gone(error) from error
        if status >= 400:
            text = body[:500].decode(errors="replace")
            raise RemoteError(f"agent {self.url} answered {status}: {text}", field="status_code", value=status)
        return parse_result(body, f"agent {self.url}")

    async def _check_alive(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PING_SECONDS)
        try:
            async with self._session.get(urljoin(self.url, "/ping"), timeout=timeout):
                return
        except TimeoutError:
            # A busy agent may be slow to answer, but it is not gone.
            return
        except aiohttp.ClientError as error:
            raise self._gone(error) from error

    def _gone(self, error: Any) -> Unavailable:
        reason = str(error) or type(error).__name__
        return Unavailable(f"agent {self.url} is gone: {reason}", field="agent_runtime_arn", value=self.url)

    async def close(self) -> None:
        await self._session.close()
        if self._results is not None:
            self._results.close()
