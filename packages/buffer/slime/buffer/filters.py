"""`--buffer-filter-path`: a function of the user chooses among the waiting groups.

    def newest_first(args, rollout_id, buffer, num_samples):    # rollout_id is always None
        chosen = buffer[-num_samples:]
        del buffer[-num_samples:]
        return chosen

`buffer` is a list of groups, each a list of Samples, lowest group index first. The function removes the groups that it
returns from `buffer`; they are leased with the samples that it returns. Groups that it removes and does not return are
rejected ("buffer_filter"); the others keep waiting. Every waiting group is decoded for each call, which takes time if
many wait. Calls for groups take turns with the function; other calls go on meanwhile, and a group that one of them
takes away is left out of what the function chose. Groups of the dataset that were never leased do not exist yet, so the
function does not see them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from slime.types import Sample
from slime.types.errors import Busy, PluginError, counted

FLAG = "--buffer-filter-path"
# Time that a call for groups waits for its turn with the function, less than the deadline of the call.
TURN_SECONDS = 30.0


def pop_first(args: Any, rollout_id: None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Implements the default filter: takes the first `num_samples` groups out of `buffer`."""
    taken = buffer[:num_samples]
    del buffer[: len(taken)]
    return taken


@dataclass
class Choice:
    """Groups that a filter chose and dropped. chosen: samples by the group's position; dropped: positions of groups."""

    chosen: dict[int, list[Sample]]
    dropped: list[int]


class BufferFilter:
    """Calls the function at `path`. Raises PluginError if it breaks the contract above."""

    def __init__(self, path: str, args: Any) -> None:
        from slime.types.plugins import load_plugin

        self.path = path
        self.args = args
        self.function: Callable[..., Any] = load_plugin(path, flag=FLAG)
        self._turn = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Lets one call at a time use the filter. Raises Busy if the turn of another one does not end in time."""
        if not self._turn.acquire(timeout=TURN_SECONDS):
            raise Busy(
                f"{FLAG} {self.path}: the function has run for more than {TURN_SECONDS:g} s for another call: call "
                "again later",
                field=FLAG, value=self.path, expected="a function that returns sooner",
            )  # fmt: skip
        try:
            yield
        finally:
            self._turn.release()

    def choose(self, groups: Sequence[list[Sample]], count: int) -> Choice:
        position_of = {id(group): position for position, group in enumerate(groups)}
        buffer = list(groups)
        returned = self.function(self.args, None, buffer, count)
        if not isinstance(returned, list):
            raise self._broken(f"returned {type(returned).__name__}, expected a list of groups")
        if len(returned) > count:
            raise self._broken(f"returned {counted(len(returned), 'group')}, expected at most {count}")
        chosen: dict[int, list[Sample]] = {}
        for group in returned:
            position = position_of.get(id(group))
            if position is None or position in chosen:
                raise self._broken("returned a group that is not in the buffer, or one twice")
            chosen[position] = group
        left = {position_of.get(id(group)) for group in buffer}
        if left & chosen.keys():
            raise self._broken("must remove the groups that it returns from the buffer")
        if None in left:
            raise self._broken("put a group into the buffer that was not there")
        return Choice(chosen, [p for p in range(len(groups)) if p not in chosen and p not in left])

    def _broken(self, problem: str) -> PluginError:
        return PluginError(f"{FLAG} {self.path}: the function {problem}", field=FLAG, value=self.path)
