"""Calls agents and reads their results."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any, Protocol

from slime.types.errors import InvalidField, RemoteError

JSON = dict[str, Any]

# The header in which AgentCore names the session; agents that run elsewhere get it too.
SESSION_HEADER = "X-Amzn-Bedrock-AgentCore-Runtime-Session-Id"


class Transport(Protocol):
    async def run(self, session_id: str, payload: JSON) -> JSON:
        """Calls the agent and waits for its result, without a deadline: the caller sets one.

        Raises Unavailable if the agent is gone, RemoteError if it refuses, ConfigError or a subclass for a problem that
        every other call would meet too.
        """

    async def close(self) -> None: ...


class Pace:
    """Spaces calls evenly, so that all tasks that share it make at most `per_second` calls per second."""

    def __init__(self, per_second: float) -> None:
        self._gap = 1.0 / per_second
        self._next = 0.0

    async def wait(self) -> None:
        now = time.monotonic()
        at = max(now, self._next)
        self._next = at + self._gap
        if at > now:
            await asyncio.sleep(at - now)


def result_key(payload: Mapping[str, Any], session_id: str) -> str:
    """Returns the default S3 key of an agent's result."""
    rollout_fields = payload["_rollout"]
    return f"{rollout_fields['exp_id']}/{rollout_fields['input_id']}/{session_id}.json"


def result_place(answer: JSON, bucket: str | None, payload: Mapping[str, Any], session_id: str) -> tuple[str, str]:
    """Returns the bucket and key of a result that an agent leaves in S3.

    The result is read with the credentials of the run, so an agent may only choose a key within its own experiment.
    Raises InvalidField for another bucket or key.
    """
    named = answer.get("s3_bucket") or bucket
    if bucket is None or named != bucket:
        raise InvalidField("s3_bucket", named, f"the bucket of the settings ({bucket or 'none is set'})")
    key = answer.get("result_key") or result_key(payload, session_id)
    start = f"{payload['_rollout']['exp_id']}/"
    if not isinstance(key, str) or not key.startswith(start):
        raise InvalidField("result_key", key, f"a key that begins with {start}")
    return bucket, key


def parse_result(body: bytes, where: str) -> JSON:
    """Returns a parsed result. Raises RemoteError, with `where` it came from, for anything but a JSON object."""
    try:
        result = json.loads(body)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, dict):
        text = body[:200].decode(errors="replace")
        raise RemoteError(f"{where}: got {text!r}, expected a JSON object", field="result", value=text)
    return result


def is_pending(result: Mapping[str, Any]) -> bool:
    """Returns whether an answer only says that the agent has started and will leave its result in S3."""
    return result.get("status") == "processing"


def extract_reward(result: Mapping[str, Any]) -> float:
    """Returns the reward of a result: its `rewards`, a number or a list of which the last counts.

    Raises RemoteError if the agent reports a failure (a status_code of 400 or more), InvalidField if there is no
    reward.
    """
    status = result.get("status_code", 200)
    if not re.fullmatch("[0-9]{1,3}", str(status)) or int(status) >= 400:
        reason = result.get("stop_reason") or result.get("error") or "no reason given"
        raise RemoteError(f"the agent failed with {status}: {reason}", field="status_code", value=status)
    value = result.get("rewards")
    if isinstance(value, list):
        value = value[-1] if value else None
    try:
        reward = math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if not math.isfinite(reward):
        raise InvalidField("rewards", result.get("rewards"), "a finite number, or a list that ends with one")
    return reward
