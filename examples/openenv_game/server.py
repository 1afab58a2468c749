"""Find the digit, on a server of OpenEnv: after each guess it says `>` (higher) or `<` (lower).

Usage: python server.py PORT_FILE writes the port that the system has chosen.
"""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path
from typing import Any

import openenv.core.env_server as openenv  # pants: no-infer-dep
import uvicorn  # pants: no-infer-dep

MAX_GUESSES = 4


class Guess(openenv.Action):
    text: str


class Hint(openenv.Observation):
    text: str


class ServedDigit(openenv.Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self.secret = random.Random(seed).randrange(10)
        self.guesses = 0
        return Hint(text="?")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.guesses += 1
        if len(action.text) != 1 or not action.text.isdigit():
            return Hint(text="", reward=-0.5, done=True)
        if int(action.text) == self.secret:
            return Hint(text="", reward=1.0, done=True)
        return Hint(text=">" if self.secret > int(action.text) else "<", reward=0.0, done=self.guesses == MAX_GUESSES)

    @property
    def state(self) -> openenv.State:
        return openenv.State(step_count=self.guesses)


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    Path(sys.argv[1]).write_text(str(listener.getsockname()[1]))
    app = openenv.create_fastapi_app(ServedDigit, Guess, Hint, max_concurrent_envs=256)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
