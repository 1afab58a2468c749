"""API keys of engines: made by the run that starts them, or read from a file; never in an argument list.

An engine that was started with a key answers only calls that carry it as `Authorization: Bearer`, as with SGLang's
`--api-key`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from slime.types.rpc.auth import read_secret

# How a key reaches the process of an engine.
VARIABLE = "SLIME_ENGINE_API_KEY"

_KEYS: dict[str, str] = {}


def new_key() -> str:
    return secrets.token_urlsafe(32)


def read_key(path: str, flag: str) -> str:
    """Raises MissingFile, or InvalidFile for an empty one."""
    return read_secret(path, flag).decode()


def take_key(path: str | None, flag: str) -> str | None:
    """The key of this process: from the file, else from the environment, where nothing else finds it afterwards."""
    from_environment = os.environ.pop(VARIABLE, None)
    return read_key(path, flag) if path is not None else from_environment or None


def bearer(api_key: str | None) -> dict[str, str]:
    """Headers of a call to an engine with this key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def remember(url: str, api_key: str | None) -> None:
    """Lets `engine_headers` find the key of the engine at `url`; None forgets it."""
    if api_key is None:
        _KEYS.pop(urlsplit(url).netloc, None)
    else:
        _KEYS[urlsplit(url).netloc] = api_key


def engine_headers(url: str) -> Mapping[str, str]:
    """Headers that a call to `url` needs: those of an engine of this run, or none."""
    return bearer(_KEYS.get(urlsplit(url).netloc))
