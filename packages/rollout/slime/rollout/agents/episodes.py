"""One episode: opens a session at the gateway, calls the agent, and turns the session into samples."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from slime.rollout.agents.agentcore import AgentCore
from slime.rollout.agents.gateway import Gateway
from slime.rollout.agents.http_agent import HTTPAgent
from slime.rollout.agents.in_process import InProcessAgent
from slime.rollout.agents.merge import failed_sample, merge_turns
from slime.rollout.agents.sessions import Session
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.agents.transport import JSON, Transport, extract_reward
from slime.rollout.calls.call import CALL
from slime.rollout.generate.responses import trim
from slime.rollout.generate.state import RolloutState
from slime.rollout.rewards.score import check, reward_key
from slime.types import Sample
from slime.types.errors import ConfigError, SlimeError

log = logging.getLogger(__name__)


class Episodes:
    """Runs the episodes of one rollout service. Opened by `start`, closed by `stop`, both on the loop of `state`.

    agent: the user's function, which plays episodes in this process; None for the remote agent of the settings.

    Raises ConfigError or a subclass for settings that cannot work.
    """

    def __init__(self, state: RolloutState, settings: AgentSettings, agent: InProcessAgent | None = None) -> None:
        self.state = state
        self.settings = settings
        self.agent = agent
        self.gateway = Gateway(state, settings)
        self._transport: Transport | None = None
        self._places = asyncio.Semaphore(settings.max_concurrent)

    async def start(self) -> None:
        if self.agent is None:
            self._transport = HTTPAgent(self.settings) if self.settings.region is None else AgentCore(self.settings)
        try:
            await self.gateway.start()
        except BaseException:
            if self._transport is not None:
                await self._transport.close()
            raise

    async def stop(self) -> None:
        await self.gateway.stop()
        if self._transport is not None:
            await self._transport.close()

    async def run(self, origin: Sample, sampling_params: JSON, evaluation: bool = False) -> list[Sample]:
        """Runs an episode of `origin`. Returns its samples with their reward, or one FAILED sample.

        An episode fails if the agent fails, does not answer within `acr_timeout` seconds, makes no request to the
        model, or returns no reward; only an agent in this process may leave the reward to the run. Returns `origin`
        itself, with status ABORTED, if the episode of an agent in this process was aborted. Raises ConfigError.
        """
        async with self._places:
            session_id = str(uuid.uuid4())
            if origin.index is None and origin.rollout_id is None:
                origin.rollout_id = uuid.uuid4().int >> 66
            try:
                async with asyncio.timeout(self.settings.acr_timeout):
                    segments = await self._run(session_id, origin, sampling_params, evaluation)
            except ConfigError:
                raise
            except TimeoutError:
                segments = [failed_sample(origin, f"no result in {self.settings.acr_timeout:g} s")]
            except SlimeError as error:
                segments = [failed_sample(origin, f"{type(error).__name__}: {error}")]
        for sample in segments:
            if sample is origin:
                continue
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

    async def _run(self, session_id: str, origin: Sample, sampling_params: JSON, evaluation: bool) -> list[Sample]:
        session = Session(session_id, dict(sampling_params), origin.index if self.state.seeded else None)
        session.ends_aborted = self.agent is not None
        call = CALL.get()
        if call is not None:
            session.open_of_call = call.open_requests
        reward: Any = None
        base_url = self.gateway.open_session(session)
        started = time.monotonic()
        try:
            reward = await self._play(session, origin, base_url, evaluation)
        except SlimeError:
            if not (session.ends_aborted and session.aborted):
                raise
        finally:
            await self.gateway.close_session(session_id)
        if session.ends_aborted and session.aborted:
            # The episode starts over, like any sample that was aborted before its first token.
            origin.status = Sample.Status.ABORTED
            return [origin]
        seconds = time.monotonic() - started
        if not any(turn.completion_ids for turn in session.turns):
            return [failed_sample(origin, "the agent made no request to the model")]
        if reward is not None:
            key = reward_key(self.state.args, evaluation)
            named = {key: reward} if key and not isinstance(reward, dict) else reward
            reward = check(named, origin, "the agent", key)
        segments = merge_turns(session.turns, origin, self._decode, self.state.args)
        for sample in segments:
            trim(self.state, sample)
            sample.reward = reward
        segments[0].non_generation_time = max(0.0, seconds - session.generation_seconds)
        return segments

    async def _play(self, session: Session, origin: Sample, base_url: str, evaluation: bool) -> Any:
        if self.agent is not None:
            keywords = {
                "api_key": self.gateway.api_key or "none", "model": self.settings.model_id,
                "sampling_params": dict(session.sampling_params), "evaluation": evaluation, "args": self.state.args,
            }  # fmt: skip
            return await self.agent.play(base_url, origin, keywords)
        assert self._transport is not None, "start() comes first"
        return extract_reward(await self._transport.run(session.id, self._payload(session, origin, base_url)))

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


@dataclass
class _SharedEpisodes:
    """Episodes that several calls use at once: opened by the first call, closed after the last."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    episodes: Episodes | None = None
    users: int = 0


_SHARED: WeakKeyDictionary[RolloutState, _SharedEpisodes] = WeakKeyDictionary()


@asynccontextmanager
async def shared_episodes(
    state: RolloutState, settings: AgentSettings, agent: InProcessAgent | None = None
) -> AsyncIterator[Episodes]:
    """Yields the episodes of a state. Calls that overlap share them, with the settings of the first call."""
    shared = _SHARED.setdefault(state, _SharedEpisodes())
    async with shared.lock:
        if shared.episodes is None:
            episodes = Episodes(state, settings, agent)
            await episodes.start()
            shared.episodes = episodes
        shared.users += 1
    try:
        yield shared.episodes
    finally:
        # Before waiting for the lock: a call that is cancelled there no longer uses the episodes either.
        shared.users -= 1
        async with shared.lock:
            if not shared.users and shared.episodes is not None:
                closing, shared.episodes = shared.episodes, None
                await closing.stop()


async def play(state: RolloutState, sample: Sample, sampling_params: JSON, evaluation: bool) -> list[Sample]:
    """Plays an episode of `sample` with the function of `--custom-agent-path`. Returns its samples, or `sample` itself
    if the episode was aborted."""
    function = state.plugins.agent
    assert function is not None, "the run has an agent"

    async def played() -> list[Sample]:
        async with shared_episodes(state, settings, InProcessAgent(function)) as episodes:
            return await episodes.run(sample, sampling_params, evaluation)

    settings = AgentSettings.from_args(state.args)
    return await state.loop.bridge(played())
