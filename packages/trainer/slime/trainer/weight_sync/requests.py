"""POST requests of rank 0 to engines, each with a deadline and without retries: no bucket may arrive twice."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import urllib3

from slime.types.clients import Engine
from slime.types.errors import DeadlineExceeded, EngineError

T = TypeVar("T")
# Takes note of an engine's error and returns True, or returns False for one that is to be raised.
Refusal = Callable[[Engine, EngineError], bool]
JSON = "application/json"
BYTES = "application/octet-stream"


class EngineRequests:
    """Sends requests to engines. Raises EngineError and DeadlineExceeded, in which `what` names a request's content."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(timeout_seconds))

    def post(self, engines: Sequence[Engine], path: str, body: bytes, content_type: str, what: str) -> None:
        """Sends the same request to all engines at once; raises the error of the first, in their order, that failed."""
        wait_for(self._start_each(engines, path, body, content_type, what))

    def start_each(self, engines: Sequence[Engine], path: str, body: bytes, what: str) -> list[Future[Any]]:
        """Starts the same request, with a body of bytes, to every engine; returns one future for each."""
        return self._start_each(engines, path, body, BYTES, what)

    def _start_each(
        self, engines: Sequence[Engine], path: str, body: bytes, content_type: str, what: str
    ) -> list[Future[Any]]:
        posts = [functools.partial(self._post, engine, path, body, content_type, what) for engine in engines]
        return [in_background(post) for post in posts]

    def start(
        self, engine: Engine, path: str, body: Mapping[str, Any], what: str, refusal: Refusal | None = None
    ) -> Future[Any]:
        """Starts a request; returns a future of its JSON answer. Nobody has to wait for it: its thread is a daemon.

        refusal: the answer is None in place of an error of the engine for which it returns True.
        """
        data = json.dumps(body).encode()

        def post() -> Any:
            try:
                return self._post(engine, path, data, JSON, what)
            except EngineError as error:
                if refusal is None or not refusal(engine, error):
                    raise
                return None

        return in_background(post)

    def _post(self, engine: Engine, path: str, body: bytes, content_type: str, what: str) -> Any:
        where = f"rank 0 to engine {engine.name} at {engine.url}{path.split('?')[0]}, {what}"
        headers = {"Content-Type": content_type}
        if engine.api_key:
            headers["Authorization"] = f"Bearer {engine.api_key}"
        try:
            answer = self._http.request("POST", engine.url.rstrip("/") + path, body=body, headers=headers)
        except urllib3.exceptions.NewConnectionError as error:
            # urllib3 counts a refused connection among the time-outs.
            raise EngineError(f"{where}: {error}", field=engine.name) from error
        except urllib3.exceptions.TimeoutError as error:
            seconds = self.timeout_seconds
            raise DeadlineExceeded(f"{where}: no answer within {seconds:g} s", field=engine.name) from error
        except urllib3.exceptions.HTTPError as error:
            raise EngineError(f"{where}: {error}", field=engine.name) from error
        text = answer.data.decode(errors="replace")
        content = _parsed(text)
        # SGLang answers 200 with success=false if it could not load the tensors.
        failed = isinstance(content, dict) and content.get("success") is False
        if answer.status != 200 or failed:
            raise EngineError(
                f"{where}: status {answer.status}: {text[:500]}", field=engine.name, value=answer.status, expected="200"
            )
        return content

    def close(self) -> None:
        self._http.clear()


def wait_for(answers: Sequence[Future[Any]]) -> None:
    """Waits for all answers; if any failed, raises the error of the first of them in the order given."""
    wait(answers)
    for answer in answers:
        answer.result()


def in_background(work: Callable[[], T]) -> Future[T]:
    """Runs `work()` on a thread of its own that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return future


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
