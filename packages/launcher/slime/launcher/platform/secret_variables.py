"""Finds environment variables and flags that hold secrets, by their names, and hides their values in texts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
# A shorter value may be part of any word.
SHORTEST_HIDDEN = 6
_QUOTED = r'"(?:[^"\\]|\\.)*"'
# A value in a line of bash: quoted, or up to the next space.
_VALUE = rf"(?:'[^']*'|{_QUOTED}|\\.|[^\s'\"\\])+"
_FLAG = r"--(?:\w+-)*(?:wandb-key|api-key|access-key|secret-key|secret|password|passwd|auth-token|hf-token|token)"
_VARIABLE = rf"\b[A-Z0-9_]*(?:{'|'.join(SECRET_WORDS)})[A-Z0-9_]*"
_IN_BASH = re.compile(rf"({_FLAG}(?:=|\s+)|{_VARIABLE}=){_VALUE}")
_IN_JSON = re.compile(rf'("{_VARIABLE}"\s*:\s*){_QUOTED}')


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


def shown_command(line: str) -> str:
    """Returns a line of bash to be shown: without the values of flags and variables whose names suggest secrets."""
    return without_secrets(_IN_JSON.sub(r'\1"***"', _IN_BASH.sub(r"\1***", line)))
