"""Agents on AWS Bedrock AgentCore."""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime.rollout.agents.results import S3Results, aws_client
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.agents.transport import JSON, SESSION_HEADER, Pace, is_pending, parse_result, result_place
from slime.types.errors import ConfigError, RemoteError, SlimeError

log = logging.getLogger(__name__)

STOP_SECONDS = 15.0
# Errors that end the run, because every further episode would get the same one.
REFUSALS = (
    "AccessDeniedException", "InvalidClientTokenId", "InvalidSignatureException", "ResourceNotFoundException",
    "UnrecognizedClientException",
)  # fmt: skip


class AgentCore:
    """Invokes the runtime of an ARN, waits for results in S3, and ends the session afterwards in any case.

    Raises NotAvailable where boto3 is not installed, ConfigError where the runtime does not exist or AWS refuses the
    credentials.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self._client = aws_client("bedrock-agentcore", settings, read_seconds=settings.acr_timeout)
        self._client.meta.events.register(
            "before-send.bedrock-agentcore.InvokeAgentRuntime", self._refuse_when_over, unique_id="slime-over"
        )
        self._running: set[str] = set()
        self._results = S3Results(settings)
        self._pace = Pace(settings.acr_tps_limit)
        self._threads = ThreadPoolExecutor(settings.max_concurrent, "agent-calls")
        self._stops = ThreadPoolExecutor(settings.max_pool_connections, "agent-stops")

    async def run(self, session_id: str, payload: JSON) -> JSON:
        await self._pace.wait()
        self._running.add(session_id)
        try:
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._threads, self._invoke, session_id, payload)
            if not is_pending(answer):
                return answer
            return await self._results.wait(*result_place(answer, self.settings.s3_bucket, payload, session_id))
        finally:
            self._running.discard(session_id)
            await self._stop(session_id)

    def _refuse_when_over(self, request: Any, **kwargs: Any) -> None:
        """Raises RemoteError for calls of a session that is over. boto3 retries calls in a thread that outlives the
        episode's deadline: such a retry would start the agent again with nobody waiting for its result."""
        session = request.headers.get(SESSION_HEADER)
        session_id = session.decode() if isinstance(session, bytes) else session
        if session_id not in self._running:
            raise RemoteError(f"session {session_id} is over", field="runtimeSessionId", value=str(session_id))

    def _invoke(self, session_id: str, payload: JSON) -> JSON:
        from botocore.exceptions import BotoCoreError, ClientError

        arn = self.settings.agent_runtime_arn
        try:
            answer = self._client.invoke_agent_runtime(
                agentRuntimeArn=arn,
                runtimeSessionId=session_id,
                contentType="application/json",
                accept="application/json",
                payload=json.dumps(payload).encode(),
            )
            body = answer["response"].read()
        except (BotoCoreError, ClientError) as error:
            raise _failure(arn, error) from error
        status = int(answer.get("statusCode") or 200)
        if status >= 400:
            text = body[:500].decode(errors="replace")
            raise RemoteError(f"agent {arn} answered {status}: {text}", field="status_code", value=status)
        return parse_result(body, f"agent {arn}")

    async def _stop(self, session_id: str) -> None:
        """Ends the session. Where that fails, only warns: the session then costs money until AWS ends it."""
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(
                loop.run_in_executor(self._stops, self._stop_session, session_id), timeout=STOP_SECONDS
            )
        except (RemoteError, TimeoutError) as error:
            log.warning("session %s may still run: %s", session_id, str(error) or f"no answer in {STOP_SECONDS:g} s")

    def _stop_session(self, session_id: str) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        arn = self.settings.agent_runtime_arn
        try:
            return self._client.stop_runtime_session(agentRuntimeArn=arn, runtimeSessionId=session_id)
        except (BotoCoreError, ClientError) as error:
            raise RemoteError(f"agent {arn}: {error}", field="agent_runtime_arn", value=arn) from error

    async def close(self) -> None:
        self._results.close()
        for threads in (self._threads, self._stops):
            threads.shutdown(wait=False, cancel_futures=True)


def _failure(arn: str | None, error: Exception) -> SlimeError:
    from botocore.exceptions import NoCredentialsError, PartialCredentialsError

    answer = getattr(error, "response", {})
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return ConfigError(
            f"agent {arn}: {error}; expected AWS credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, "
            "or a role",
            field="agent_runtime_arn", value=arn, expected="AWS credentials",
        )  # fmt: skip
    if answer.get("Error", {}).get("Code") in REFUSALS:
        return ConfigError(
            f"agent {arn}: {error}; expected an existing runtime, and credentials that may invoke it",
            field="agent_runtime_arn", value=arn, expected="a runtime that may be invoked",
        )  # fmt: skip
    return RemoteError(f"agent {arn}: {error}", field="agent_runtime_arn", value=arn)
