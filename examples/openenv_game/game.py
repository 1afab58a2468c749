"""The game behind the server at GAME_URL, for `--custom-generate-function-path`."""

from __future__ import annotations

import os

from slime.rollout.adapters.gym import episodes
from slime.rollout.adapters.openenv import OpenEnv


def make() -> OpenEnv:
    return OpenEnv(os.environ["GAME_URL"], action="text", observation="text")


generate = episodes(make, max_turns=4)
