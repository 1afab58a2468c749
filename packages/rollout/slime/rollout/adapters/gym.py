"""Text games of gymnasium's interface, and those of textarena, for `--custom-generate-function-path`.

    observation, info = env.reset(seed=...)
    observation, reward, terminated, truncated, info = env.step(action)

Observations and actions are text. Both methods may be asynchronous, and so may `close`, which a game need not have.
`prompts` writes the first observations as prompt data; `episodes` plays on from there: a turn of the model is an
action, and what the game answers is appended with loss mask 0. The sum of the rewards is the reward of the sample.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from slime.rollout.chat.template import render
from slime.rollout.generate.sample import generate_sample
from slime.rollout.generate.state import RolloutState, state_of
from slime.rollout.plugins import maybe_await
from slime.types import Sample
from slime.types.errors import InvalidSetting, NotAvailable
from slime.types.files import write_whole

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

# Stands for an answer when looking for the text that a template writes after it; no template changes letters.
MARK = "zqxanswerzqx"


class TextEnv(Protocol):
    """A game: `gymnasium.Env` with text as observations and actions, or a class of its own."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]: ...

    def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]: ...


class AsyncTextEnv(Protocol):
    """A game with asynchronous methods, such as one behind a server."""

    async def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]: ...

    async def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]: ...


Game: TypeAlias = TextEnv | AsyncTextEnv
Generate = Callable[[Any, Sample, dict[str, Any]], Awaitable[Sample]]


def prompts(make: Callable[[], Game], seeds: Iterable[int], path: Path, *, chat: bool = True) -> None:
    """Writes a row for each seed: its first observation, as a message of the user or as text, and its seed."""
    lines = []
    with ThreadPoolExecutor(1) as thread:
        for seed in seeds:
            # A notebook has an event loop of its own.
            observation = thread.submit(asyncio.run, _first(make(), seed)).result()
            prompt = [{"role": "user", "content": observation}] if chat else observation
            lines.append(json.dumps({"input": prompt, "metadata": {"seed": seed}}) + "\n")
    write_whole(path, "".join(lines))


async def _first(env: Game, seed: int) -> str:
    try:
        return str((await maybe_await(env.reset, seed=seed))[0])
    finally:
        await _close(env)


async def _close(env: Game) -> None:
    close = getattr(env, "close", None)
    if close is not None:
        await maybe_await(close)


def episodes(make: Callable[[], Game], *, max_turns: int = 16) -> Generate:
    """Returns a generate function that plays an episode of `make()` for each sample.

    An episode ends when the game ends it, after `max_turns`, or when the sample has no tokens left. An interrupted
    episode is replayed up to that point, so the game must give the same answers to the same actions and seed.
    """

    async def play(args: RolloutArgs, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        env = make()
        try:
            return await _play(env, max_turns, state_of(args), sample, sampling_params)
        finally:
            await _close(env)

    return play


async def _play(
    env: Game, max_turns: int, state: RolloutState, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    tokenizer = state.tokenizer
    actions: list[str] = sample.metadata.setdefault("actions", [])
    await maybe_await(env.reset, seed=sample.metadata.get("seed"))
    reward = 0.0
    for action in actions:
        reward += float((await maybe_await(env.step, action))[1])
    begun = sample.metadata.pop("turn_begun", len(sample.response))
    next_turn = False
    while True:
        length = sample.response_length
        sample = await generate_sample(state, sample, sampling_params, next_turn=next_turn)
        if sample.status is Sample.Status.TRUNCATED and sample.response_length == length:
            # No token was left for an action.
            sample.reward = reward
            return sample
        if sample.status is Sample.Status.ABORTED:
            sample.metadata["turn_begun"] = begun
            return sample
        actions.append(sample.response[begun:])
        observation, gained, terminated, truncated, _ = await maybe_await(env.step, actions[-1])
        reward += float(gained)
        over = terminated or truncated or len(actions) >= max_turns
        if over or sample.status is not Sample.Status.COMPLETED:
            sample.reward = reward
            return sample
        text = _behind_an_answer(tokenizer, sample, observation)
        ids = tokenizer.encode(text, add_special_tokens=False)
        room = int(sampling_params["max_new_tokens"]) - sample.response_length
        if state.context_len is not None:
            room = min(room, state.context_len - len(sample.tokens))
        if len(ids) > room:
            # The model could not act on the observation, and the response would be longer than the trainer expects.
            sample.status, sample.reward = Sample.Status.TRUNCATED, reward
            return sample
        sample.append_response_tokens(state.args, tokens=ids, log_probs=None, trainable=False, text=text)
        sample.status = Sample.Status.PENDING
        begun, next_turn = len(sample.response), True


def _behind_an_answer(tokenizer: Any, sample: Sample, observation: str) -> str:
    """Returns the observation as the chat template writes it behind the model's turn; as it is if there is no chat."""
    if not (getattr(sample, "prompt_messages", None) or isinstance(sample.prompt, list)):
        return observation
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": MARK},
        {"role": "user", "content": observation},
    ]
    text = render(tokenizer, messages, None, {}).partition(MARK)[2]
    # If the turn ended with its end token, the sample has that token already.
    return text.removeprefix(tokenizer.decode([sample.tokens[-1]], skip_special_tokens=False))


class TextArena:
    """A game of textarena for one player: its id, and options of `textarena.make`.

    Raises NotAvailable without the package, InvalidSetting for an unknown id.
    """

    def __init__(self, env_id: str, **options: Any) -> None:
        try:
            textarena = importlib.import_module("textarena")
        except ModuleNotFoundError as error:
            raise NotAvailable.requires(
                f"the game {env_id}", "the package textarena", "pip install textarena"
            ) from error
        try:
            self._env = textarena.make(env_id, **options)
        except (KeyError, ValueError, ModuleNotFoundError) as error:
            raise InvalidSetting.must_be("the game", "an id of textarena", got=env_id, reason=str(error)) from error

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._env.reset(num_players=1, seed=seed)
        return self._observation(), {}

    def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]:
        done, info = self._env.step(action=action)
        if not done:
            return self._observation(), 0.0, False, False, dict(info or {})
        rewards, information = self._env.close()
        return "", float(rewards[0]), True, False, dict(information or {})

    def _observation(self) -> str:
        _, observation = self._env.get_observation()
        return str(observation)
