"""Sampling seeds of requests, also for a function of the user that sends several requests for one sample.

A request of the default generation has the seed of its sample. While a function of the user runs, every request takes
the next seed of the sample instead, so that four requests for one prompt get four answers; the first has the seed of
the default generation. `slime.utils.http_utils.post` does the same with `--deterministic`; without it, what the
function posts has no seed, and the engine draws by itself.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs


def sampling_seed(rollout_seed: int, index: int | None, repeat: int = 0) -> int:
    """Returns a seed of 31 bits, which differs between samples and is the same in every run."""
    digest = hashlib.blake2b(f"{rollout_seed}:{index}:{repeat}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


class Seeds:
    """Seeds of the requests for a sample. index: of the sample that the function was called for."""

    def __init__(self, args: RolloutArgs, index: int | None) -> None:
        self.deterministic = bool(args.deterministic)
        self._rollout_seed = args.rollout_seed
        self._index = index
        self._taken: Counter[int | None] = Counter()

    def next(self, index: int | None = None) -> int:
        """Returns the next seed. index: of another sample than the function was called for."""
        index = self._index if index is None else index
        self._taken[index] += 1
        return sampling_seed(self._rollout_seed, index, self._taken[index] - 1)

    def fill(self, payload: Any) -> Any:
        """Returns `payload` of /generate with a seed for each prompt, where it names none; anything else as it is."""
        params = payload.get("sampling_params") if isinstance(payload, Mapping) else None
        if not self.deterministic or not isinstance(params, (Mapping, list)):
            return payload
        if isinstance(params, Mapping):
            prompts = next((payload[name] for name in ("input_ids", "text") if payload.get(name)), "")
            several = isinstance(prompts, list) and isinstance(prompts[0], (list, str))
            filled: Any = [self._with_seed(params) for _ in prompts] if several else self._with_seed(params)
        else:
            filled = [self._with_seed(entry) for entry in params]
        return {**payload, "sampling_params": filled}

    def _with_seed(self, params: Any) -> dict[str, Any]:
        return dict(params) if "sampling_seed" in params else {**params, "sampling_seed": self.next()}


SEEDS: ContextVar[Seeds | None] = ContextVar("slime_sampling_seeds", default=None)


@contextmanager
def seeds_of(args: RolloutArgs, index: int | None) -> Iterator[None]:
    """Gives requests the seeds of a sample while a user's generate function runs. index: that of the sample."""
    token = SEEDS.set(Seeds(args, index))
    try:
        yield
    finally:
        SEEDS.reset(token)
