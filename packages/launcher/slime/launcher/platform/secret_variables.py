"""Finds environment variables that hold secrets, by their names, and hides their values in texts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
# A shorter value may be part of any word.
SHORTEST_HIDDEN = 6


def secrets_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables whose names suggest secrets.

    Ray shows a job's runtime environment in the arguments of its processes. Secrets therefore go into the environment
    of Ray itself, which its processes inherit.
    """
    return {name: value for name, value in variables.items() if any(word in name.upper() for word in SECRET_WORDS)}


def without_secrets(text: str) -> str:
    """Hides the values of secret variables of this process in a text, and user:password in its URLs."""
    # The longest value first, because a shorter one may be its beginning.
    for value in sorted(secrets_of(os.environ).values(), key=len, reverse=True):
        if len(value) >= SHORTEST_HIDDEN:
            text = text.replace(value, "***")
    # Up to the last @: a password may hold an @, and a / that should have been escaped.
    return re.sub(r"://\S+@", "://***@", text)
