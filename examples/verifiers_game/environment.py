"""Find the digit, as an environment of verifiers: after each guess it says `>` (higher) or `<` (lower)."""

from __future__ import annotations

from typing import Any

import verifiers as vf  # pants: no-infer-dep
from datasets import Dataset  # pants: no-infer-dep

from slime.rollout.adapters.verifiers import episodes

MAX_GUESSES = 4


class HiddenDigit(vf.MultiTurnEnv):
    @vf.stop
    async def is_over(self, state: vf.State, **kwargs: Any) -> bool:
        return bool(state["trajectory"]) and (not last(state).isdigit() or last(state) == state["answer"])

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return [vf.UserMessage(content=">" if state["answer"] > last(state) else "<")]


def last(state: vf.State) -> str:
    """The last guess; an empty answer is an error of the episode."""
    if state["error"] is not None or not state["trajectory"]:
        return ""
    return state["trajectory"][-1]["completion"][-1].content or ""


def found(state: vf.State, answer: str) -> float:
    return float(last(state) == answer)


def no_digit(state: vf.State) -> float:
    return float(not last(state).isdigit())


def load_environment() -> vf.Environment:
    rows = [{"prompt": [{"role": "user", "content": "?"}], "answer": str(secret)} for secret in range(10)]
    rubric = vf.Rubric(funcs=[found, no_digit], weights=[1.0, -0.5])
    return HiddenDigit(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=MAX_GUESSES)


agent = episodes(load_environment)
