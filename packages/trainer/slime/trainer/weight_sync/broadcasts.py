"""Broadcasts from rank 0 to SGLang engines on GPUs of their own, each announced to them by a request.

POST {engine}/init_weights_update_group once, while rank 0 joins the same group; then for each message
/update_weights_from_distributed, while rank 0 broadcasts its bytes. While engines load a message, the next one is made
and announced. The group is reused until the engines change, an update fails, or the trainer ends
(/destroy_weights_update_group).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from slime.trainer.weight_sync.group import UpdateGroup, own_address
from slime.trainer.weight_sync.requests import EngineRequests, Refusal, in_background
from slime.types.clients import Engine
from slime.types.errors import DeadlineExceeded, EngineError

log = logging.getLogger(__name__)

# Seconds to wait for an engine's own report of a failure, and for it to leave the group at the end.
AFTERMATH_SECONDS = 5.0
# A broadcast of this many bytes, more than connections buffer, does not end before its receivers have begun. By then an
# engine has the request for this bucket, and cannot mistake the next request for it.
ACKNOWLEDGED_BYTES = 256 << 20
_numbers = itertools.count()


@dataclass
class Message:
    """Bytes for all engines, uint8 [n] on the device of the broadcasts. body: of the request that announces them. what:
    names them in errors."""

    what: str
    body: dict[str, Any]
    content: torch.Tensor


@dataclass
class PostedRequest:
    """A request to all engines. answers: one for each of them. acknowledged: see ACKNOWLEDGED_BYTES."""

    what: str
    answers: list[Future[Any]] = field(default_factory=list)
    acknowledged: bool = False


class Broadcaster:
    """Sends messages to engines. device: of the messages; on the CPU the group is a gloo group."""

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        self.device = device
        self._timeout = timeout_seconds
        self._requests = EngineRequests(timeout_seconds)
        self._group: UpdateGroup | None = None
        self._members: list[Engine] = []

    def send(self, engines: Sequence[Engine], messages: Iterable[Message], refusal: Refusal | None = None) -> int:
        """Sends the messages, in their order, to all engines; returns the bytes sent.

        refusal: see `EngineRequests.start`; for an engine that has received a message and does not load it. Raises
        EngineError or DeadlineExceeded.
        """
        try:
            return self._send_all(self._join(engines), messages, refusal)
        except BaseException:
            # After a failure the members may be at different places in the sequence of broadcasts.
            if self._group is not None:
                self._group.abort()
            self._group = None
            raise

    def _join(self, engines: Sequence[Engine]) -> UpdateGroup:
        if self._group is not None and _who(engines) == _who(self._members):
            return self._group
        self._leave()
        size = 1 + sum(engine.tp_size for engine in engines)
        name = f"slime-weights-{next(_numbers)}"
        group = UpdateGroup(name, own_address(engines), size, self.device, self._timeout)
        self._group, self._members = group, list(engines)
        what = f"group of {size} ranks at {group.address}:{group.port}"
        joining, offset = PostedRequest(what), 1
        for engine in engines:
            body = {
                "master_address": group.address, "master_port": group.port, "rank_offset": offset, "world_size": size,
                "group_name": group.name, "backend": group.backend,
            }  # fmt: skip
            joining.answers.append(self._requests.start(engine, "/init_weights_update_group", body, what))
            offset += engine.tp_size
        self._supervise(group.join, joining, joining)
        return group

    def _send_all(self, group: UpdateGroup, messages: Iterable[Message], refusal: Refusal | None) -> int:
        sent, loading = 0, PostedRequest("")
        for message in messages:
            posted = PostedRequest(message.what, acknowledged=message.content.nbytes >= ACKNOWLEDGED_BYTES)
            if not loading.acknowledged:
                self._supervise(None, loading, loading)
            body = {"group_name": group.name, "flush_cache": False, **message.body}
            posted.answers = [
                self._requests.start(engine, "/update_weights_from_distributed", body, posted.what, refusal)
                for engine in self._members
            ]
            self._supervise(partial(group.broadcast, message.content), posted, loading)
            loading = posted
            sent += message.content.nbytes
        self._supervise(None, loading, loading)
        return sent

    def _supervise(self, broadcast: Callable[[], None] | None, posted: PostedRequest, needed: PostedRequest) -> None:
        """Returns when `broadcast` is done and `needed` is answered. Gives up on all of them when one of them or an
        answer to `posted` fails, or at the deadline."""
        ours = [] if broadcast is None else [in_background(broadcast)]
        required: set[Future[Any]] = {*ours, *needed.answers}
        waiting = required | set(posted.answers)
        deadline, failed = time.monotonic() + self._timeout, False
        while waiting & required and not failed and (left := deadline - time.monotonic()) > 0:
            done, waiting = wait(waiting, timeout=left, return_when=FIRST_COMPLETED)
            failed = any(future.exception() for future in done)
        if not failed and not waiting & required:
            return
        failures = [future.exception() for future in ours if future.done()]
        if any(failures):
            # The request of the engine that is to blame fails a little later, and names it.
            wait(posted.answers, timeout=AFTERMATH_SECONDS, return_when=FIRST_EXCEPTION)
        for answer in (*needed.answers, *posted.answers):
            if answer.done():
                answer.result()
        names = ", ".join(engine.name for engine in self._members)
        for failure in failures:
            if failure is not None:
                raise EngineError(f"rank 0 to engines {names}, {posted.what}: {failure}", field=names) from failure
        unanswered = posted if all(answer.done() for answer in needed.answers) else needed
        late = [
            engine.name for engine, answer in zip(self._members, unanswered.answers, strict=True) if not answer.done()
        ]
        raise DeadlineExceeded(
            f"rank 0 to engines {names}, {unanswered.what}: not done within {self._timeout:g} s; still waiting for "
            + ("engine " + ", ".join(late) if late else "the broadcast on rank 0"),
            field=", ".join(late) or names,
            value=self._timeout,
        )

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        body = {"group_name": group.name}
        leaving = [
            self._requests.start(engine, "/destroy_weights_update_group", body, f"group {group.name}")
            for engine in self._members
        ]
        group.abort()
        wait(leaving, timeout=min(AFTERMATH_SECONDS, self._timeout))
        for engine, future in zip(self._members, leaving, strict=True):
            failure = future.exception() if future.done() else "no answer"
            if failure is not None:
                # An engine that has ended has left as well.
                log.info("engine %s did not leave group %s: %s", engine.name, group.name, failure)

    def close(self) -> None:
        self._leave()
        self._requests.close()


def _who(engines: Sequence[Engine]) -> list[tuple[str, str, int]]:
    return [(engine.name, engine.url, engine.tp_size) for engine in engines]
