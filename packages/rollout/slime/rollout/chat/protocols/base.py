"""Interface of the protocols that agents speak."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any
from typing import Protocol as Interface

from slime.rollout.chat.pieces import JSON, Piece
from slime.rollout.chat.request import Answer, ModelRequest
from slime.types.errors import SlimeError

LogProbs = list[tuple[str, float]]


class Events(Interface):
    """Encodes an answer as server-sent events; each method returns the events to send next."""

    def begin(self, prompt_tokens: int) -> list[bytes]: ...

    def pieces(self, pieces: Sequence[Piece], log_probs: LogProbs | None) -> list[bytes]:
        """Returns the events of new pieces. log_probs: of the pieces' tokens, where the request asked for them."""

    def end(self, answer: Answer) -> list[bytes]: ...

    def error(self, error: SlimeError, status: int) -> list[bytes]: ...


class Protocol(Interface):
    """A protocol that agents speak. path: the URL path of its requests. model: the name of the model in answers."""

    path: str

    def read(self, body: Any) -> ModelRequest:
        """Raises InvalidField for a wrong field, or for an unsupported one that would change the answer."""

    def whole(self, request: ModelRequest, answers: Sequence[Answer], model: str) -> JSON: ...

    def events(self, request: ModelRequest, model: str) -> Events: ...

    def error(self, error: SlimeError, status: int) -> JSON: ...


def event(data: JSON | str, name: str | None = None) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"
