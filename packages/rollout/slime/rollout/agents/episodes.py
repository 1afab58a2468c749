"""One episode: opens a session at the gateway, calls the agent, and turns the session into samples."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

from slime.rollout.agents.agentcore import AgentCore
from slime.rollout.agents.gateway import Gateway
from slime.rollout.agents.http_agent import HTTPAgent
from slime.rollout.agents.merge import failed_sample, merge_turns
from slime.rollout.agents.sessions import Session
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.agents.transport import JSON, Transport, extract_reward
from slime.rollout.generate.responses import trim
from slime.rollout.generate.state import RolloutState
from slime.types import Sample
from slime.types.errors import ConfigError, SlimeError

log = logging.getLogger(__name__)


class Episodes:
    """Runs episodes of one service. Opened by `start`, closed by `stop`, both on the loop of `state`.

    Raises ConfigError and its kin for settings that cannot work.
    """

    def __init__(self, state: RolloutState, settings: AgentSettings) -> None:
        self.state = state
        self.settings = settings
        self.gateway = Gateway(state, settings)
        self._transport: Transport | None = None
        self._places = asyncio.Semaphore(settings.max_concurrent)

    async def start(self) -> None:
        self._transport = HTTPAgent(self.settings) if self.settings.region is None else AgentCore(self.settings)
        try:
            await self.gateway.start()
        except BaseException:
            await self._transport.close()
            raise

    async def stop(self) -> None:
        await self.gateway.stop()
        if self._transport is not None:
            await self._transport.close()

    async def run(self, origin: Sample, sampling_params: JSON) -> list[Sample]:
        """Runs an episode of `origin`. Returns its samples with their reward, or one FAILED sample.

        An episode fails where the agent fails, does not answer in `acr_timeout` seconds, asks the model nothing or
        gives no reward. Raises ConfigError.
        """
        async with self._places:
            session_id = str(uuid.uuid4())
            if origin.index is None and origin.rollout_id is None:
                origin.rollout_id = uuid.uuid4().int >> 66
            try:
                async with asyncio.timeout(self.settings.acr_timeout):
                    segments = await self._run(session_id, origin, sampling_params)
            except ConfigError:
                raise
            except TimeoutError:
                segments = [failed_sample(origin, f"no result in {self.settings.acr_timeout:g} s")]
            except SlimeError as error:
                segments = [failed_sample(origin, f"{type(error).__name__}: {error}")]
        for sample in segments:
            sample.metadata |= {
                "gateway_session_id": session_id,
                "task_index": origin.group_index,
                "task_metadata": origin.metadata,
            }
            if "episode_error" in sample.metadata:
                log.warning(
                    "episode %s of group %s: %s", session_id, origin.group_index, sample.metadata["episode_error"]
                )
            else:
                sample.session_id = session_id
        return segments

    async def _run(self, session_id: str, origin: Sample, sampling_params: JSON) -> list[Sample]:
        assert self._transport is not None, "start() comes first"
        session = Session(session_id, dict(sampling_params), origin.index if self.state.seeded else None)
        base_url = self.gateway.open_session(session)
        started = time.monotonic()
        try:
            result = await self._transport.run(session_id, self._payload(session, origin, base_url))
        finally:
            await self.gateway.close_session(session_id)
        seconds = time.monotonic() - started
        reward = extract_reward(result)
        if not any(turn.completion_ids for turn in session.turns):
            return [failed_sample(origin, "the agent made no request to the model")]
        segments = merge_turns(session.turns, origin, self._decode, self.state.args)
        key = getattr(self.state.args, "reward_key", None)
        for sample in segments:
            trim(self.state, sample)
            sample.reward = {key: reward} if key else reward
        segments[0].non_generation_time = max(0.0, seconds - session.generation_seconds)
        return segments

    def _payload(self, session: Session, origin: Sample, base_url: str) -> JSON:
        params = {
            key: session.sampling_params[key] for key in ("temperature", "top_p") if key in session.sampling_params
        }
        rollout_fields: JSON = {
            "exp_id": self.settings.exp_id,
            "input_id": session.id,
            "s3_bucket": self.settings.s3_bucket,
            "base_url": base_url,
            "api_key": self.gateway.api_key,
            "model_id": self.settings.model_id,
            "sampling_params": params | {"max_tokens": session.sampling_params["max_new_tokens"]},
        }
        task: dict[str, Any] = origin.metadata if isinstance(origin.metadata, dict) else {}
        return task | {"_rollout": {key: value for key, value in rollout_fields.items() if value is not None}}

    def _decode(self, ids: list[int]) -> str:
        return str(self.state.tokenizer.decode(ids, skip_special_tokens=False))
