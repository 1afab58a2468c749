"""Reads the results that agents leave in S3."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from slime.rollout.agents.settings import AgentSettings
from slime.rollout.agents.transport import JSON, parse_result
from slime.types.errors import InvalidSetting, NotAvailable, Unavailable

FIRST_WAIT_SECONDS = 0.5
WAIT_FACTOR = 1.5
LONGEST_WAIT_SECONDS = 30.0
CONNECT_SECONDS = 10
READ_SECONDS = 30
ATTEMPTS = 5


def aws_client(service: str, settings: AgentSettings, *, read_seconds: float = READ_SECONDS) -> Any:
    """Returns a boto3 client, which reads credentials, and endpoints other than Amazon's, from the environment.

    Raises NotAvailable if boto3 is not installed, InvalidSetting if boto3 refuses its configuration.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        setting = f"s3_bucket {settings.s3_bucket}" if settings.s3_bucket else "agent_runtime_arn"
        raise NotAvailable.not_installed(setting, "boto3", "slime-rollout[agents]") from error
    config = Config(
        retries={"mode": "adaptive", "max_attempts": ATTEMPTS},
        connect_timeout=CONNECT_SECONDS,
        read_timeout=read_seconds,
        max_pool_connections=settings.max_pool_connections,
    )
    region = settings.region
    try:
        session = boto3.session.Session()
        return session.client(service, region_name=region or session.region_name or "us-east-1", config=config)
    except (BotoCoreError, ValueError) as error:
        raise InvalidSetting(f"AWS {service}: {error}", field=service, value=str(error)) from error


class S3Results:
    """Waits for results in S3. Blocking calls run in a thread pool of its own."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self._client = aws_client("s3", settings)
        self._threads: Executor = ThreadPoolExecutor(settings.max_pool_connections, "agent-results")

    async def wait(self, bucket: str, key: str, check: Callable[[], Awaitable[None]] | None = None) -> JSON:
        """Waits for a result. Polls at once, after 0.5 s, then after 1.5 times as long each time, up to 30 s.

        check: awaited whenever the result is not there yet; may raise. Raises Unavailable if the result cannot be read,
        because the bucket is missing or access is denied.
        """
        wait = FIRST_WAIT_SECONDS
        loop = asyncio.get_running_loop()
        while True:
            body = await loop.run_in_executor(self._threads, self._read, bucket, key)
            if body is not None:
                return parse_result(body, f"s3://{bucket}/{key}")
            if check is not None:
                await check()
            await asyncio.sleep(wait)
            wait = min(wait * WAIT_FACTOR, LONGEST_WAIT_SECONDS)

    def _read(self, bucket: str, key: str) -> bytes | None:
        from botocore.exceptions import BotoCoreError, ClientError

        # Not HEAD: its answer does not distinguish a missing bucket from a missing key.
        try:
            return bytes(self._client.get_object(Bucket=bucket, Key=key)["Body"].read())
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code"))
            if code in ("NoSuchKey", "404"):
                return None
            raise Unavailable(f"s3://{bucket}/{key}: {error}", field="s3_bucket", value=bucket) from error
        except BotoCoreError as error:
            raise Unavailable(f"s3://{bucket}/{key}: {error}", field="s3_bucket", value=bucket) from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()
