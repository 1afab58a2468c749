"""The limit of samples in flight at one engine, tuned by the engine's own load figures.

A pure object: figures go in, the limit comes out, and it reads no clock. Figures are gathered in windows of at least
`POLLS` polls. A window has turned over when as many samples were answered in it as were in flight when it began; only
then has everything in flight begun under the present limit L. With u, the mean usage of the key-value cache, and q, the
smallest number of waiting requests of a window:

    cut    L <- L (1 - r / 2)        r of the samples begun since the last cut were retracted: r >= 0.1 when the window
                                     has turned over, or r >= 0.2 at once; by 30 % at most
           L <- 0.97 L / u           turned over, and u >= 0.99
    trim   L <- L - q                turned over, and q > 1 + L / 20: these requests never ran, so they gain nothing
    grow   L <- L min(2, 0.97 / u)   turned over, nothing queues, and requests were held back by L
           L <- 2 L                  before that, while 2 L requests fit into the cache at their greatest length
    hold                             otherwise

A cut in proportion to the retractions (as DCTCP's to the marked packets) lets a few of them pass, which cost less than
an engine that is not full. While a cut drains the engine, it is not cut again. L grows by at least 1; from where a trim
has set it, by 2 % each time, until it is 10 % and more than 4 above. A trim that lowered the number of running requests
is undone: what waited was on its way, and as much of it is tolerated from then on.

Does not know: engines, HTTP, time, and tokens per second, which for responses of very different lengths are known only
after many more of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.types.errors import InvalidField

START = 16
POLLS = 4
TARGET, FULL = 0.97, 0.99
FEW, AT_ONCE, MOST_CUT = 0.1, 0.2, 0.3
PROBE = 0.02
FORGOTTEN, FORGOTTEN_STEPS = 1.1, 4
QUEUE_SHARE, MOST_TOLERATED = 0.05, 0.3


@dataclass(frozen=True)
class EngineLoad:
    """Load figures of an engine. usage: the fraction of the key-value cache that running requests hold. capacity: its
    tokens; 0 where the engine does not report them."""

    running: int
    waiting: int
    usage: float
    capacity: int = 0

    @classmethod
    def from_answer(cls, answer: Any) -> EngineLoad:
        """Reads SGLang's answer to `/v1/loads`, which has an entry per data-parallel rank. Raises InvalidField."""
        ranks = answer.get("loads") if isinstance(answer, Mapping) else None
        try:
            if not ranks:
                raise ValueError("no entries")
            return cls(
                running=sum(int(rank["num_running_reqs"]) for rank in ranks),
                waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
                usage=max(float(rank["token_usage"]) for rank in ranks),
                capacity=sum(int(rank.get("max_total_num_tokens", 0)) for rank in ranks),
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InvalidField("loads", str(answer)[:200], "SGLang's load figures, one entry per rank") from None


@dataclass
class _Window:
    """Figures of the polls since the limit was last changed or found right. size: samples in flight at the first."""

    polls: int = 0
    size: int = 0
    answered: int = 0
    retracted: int = 0
    usage_sum: float = 0.0
    running_sum: float = 0.0
    fewest: float = math.inf
    queue: float = math.inf
    held_back: bool = False

    def add(self, load: EngineLoad, in_flight: int, held_back: bool) -> None:
        self.size = self.size or max(1, in_flight)
        self.polls += 1
        self.usage_sum += load.usage
        self.running_sum += load.running
        self.fewest = min(self.fewest, load.running)
        self.queue = min(self.queue, load.waiting)
        self.held_back |= held_back

    @property
    def turned(self) -> bool:
        return self.polls >= POLLS and self.answered >= self.size

    @property
    def retracted_share(self) -> float:
        return self.retracted / max(self.answered, self.size)

    @property
    def usage(self) -> float:
        return self.usage_sum / self.polls

    @property
    def running(self) -> float:
        return self.running_sum / self.polls


@dataclass(frozen=True)
class _Trim:
    """A trim whose effect is still to be seen: the limit before, the fewest that ran, and what queued."""

    limit: float
    running: float
    queue: float


@dataclass
class ConcurrencyLimit:
    """The limit of one engine, between 1 and `most`.

    cuts: counts the cuts, and pauses of the engine; a request notes it when it begins, so that its retraction under an
    earlier limit does not cut the present one.
    """

    most: int
    start: int = START
    cuts: int = 0
    _limit: float = 0.0
    _wall: float = math.inf
    _reached: float = 0.0
    _longest: int = 0
    _draining: bool = False
    _trim: _Trim | None = None
    _tolerated: float = QUEUE_SHARE
    _window: _Window = field(default_factory=_Window)

    def __post_init__(self) -> None:
        self._limit = float(max(1, min(self.start, self.most)))

    @property
    def value(self) -> int:
        return int(self._limit)

    def began(self, tokens: int) -> int:
        """Notes a request whose longest sample may reach `tokens` tokens; returns what `answered` has to be given."""
        self._longest = max(self._longest, tokens)
        return self.cuts

    def answered(self, samples: int, retracted: int, began: int) -> None:
        """Notes the answer to a request. retracted: how many of its samples were retracted, once or more."""
        self._window.answered += samples
        if began == self.cuts:
            self._window.retracted += retracted

    def interrupted(self) -> None:
        """Forgets the present window: the engine was paused, which retracts all requests, or was restarted."""
        self.cuts += 1
        self._begin_window()

    def observe(self, load: EngineLoad, in_flight: int, held_back: bool) -> int:
        """Returns the limit after one more poll. in_flight: samples at this engine. held_back: whether requests waited
        for the limit since the last poll."""
        window = self._window
        window.add(load, in_flight, held_back)
        self._reached = max(self._reached, in_flight)
        if self._draining:
            if in_flight <= self.value or window.turned:
                self._draining = False
                self._begin_window()
        elif window.retracted_share >= (FEW if window.turned else AT_ONCE):
            self._cut(1 - min(MOST_CUT, window.retracted_share / 2))
        elif window.turned and window.usage >= FULL:
            self._cut(TARGET / window.usage)
        elif window.polls >= POLLS:
            self._adjust(load.capacity)
        return self.value

    def _adjust(self, capacity: int) -> None:
        window = self._window
        if window.turned and self._trim is not None:
            trim, self._trim = self._trim, None
            if window.running < trim.running - trim.queue / 2:
                self._tolerated = max(self._tolerated, min(MOST_TOLERATED, trim.queue / trim.limit))
                self._set(trim.limit)
                return
        if window.queue > 1 + self._tolerated * self._limit:
            if window.turned:
                self._trim = _Trim(self._limit, window.fewest, window.queue)
                self._wall = max(1.0, min(self._limit, self._reached) - window.queue)
                self._set(self._wall)
        elif window.held_back and self._limit < self.most:
            self._grow(capacity)
        elif window.turned:
            self._begin_window()

    def _grow(self, capacity: int) -> None:
        window = self._window
        if window.turned:
            factor = min(2.0, TARGET / max(window.usage, 1e-9))
        elif 2 * self._limit * self._longest <= TARGET * capacity:
            factor = 2.0
        else:
            return
        if factor <= 1:
            self._begin_window()
        elif self._limit < self._wall:
            self._set(min(max(self._limit * factor, self._limit + 1), self._wall))
        elif window.turned:
            self._set(self._limit + max(1.0, self._limit * min(PROBE, factor - 1)))
            if self._limit > max(FORGOTTEN * self._wall, self._wall + FORGOTTEN_STEPS):
                self._wall = math.inf

    def _cut(self, factor: float) -> None:
        self.cuts += 1
        self._draining, self._trim = True, None
        self._set(min(self._limit, self._reached) * factor)

    def _set(self, limit: float) -> None:
        self._limit = min(float(self.most), max(1.0, limit))
        self._begin_window()

    def _begin_window(self) -> None:
        self._window = _Window()
        # Decays, because a peak of long ago says little about the present.
        self._reached *= 0.9
