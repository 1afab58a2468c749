"""Find the digit: after each guess the game says whether the secret is higher (`>`) or lower (`<`)."""

from __future__ import annotations

import random
from typing import Any

from slime.rollout.adapters.gym import episodes

MAX_GUESSES = 4


class FindTheDigit:
    """A text game with the interface of gymnasium. Reward: 1 for the digit, -0.5 for anything but a digit."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.secret = random.Random(seed).randrange(10)
        self.guesses = 0
        return "?", {}

    def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.guesses += 1
        if len(action) != 1 or not action.isdigit():
            return "", -0.5, True, False, {}
        if int(action) == self.secret:
            return "", 1.0, True, False, {}
        return ">" if self.secret > int(action) else "<", 0.0, False, self.guesses == MAX_GUESSES, {}


generate = episodes(FindTheDigit, max_turns=MAX_GUESSES)
