"""One response while it is generated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.rollout.engines.embedded.model.params import SamplingParams
from slime.types.errors import InvalidField

TOKENS_AHEAD = 512
# Ids in the nuclei of one response, 64 MiB: top-p near 1 leaves most of the vocabulary for each token.
MOST_NUCLEUS_IDS = 1 << 24


@dataclass(eq=False)
class Response:
    """A prompt, and the tokens that were generated for it so far."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    weight_version: str = ""
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Written after `output_ids`: another thread may read as many tokens as there are log-probs."""
    records_nuclei: bool = False
    nuclei: list[np.ndarray] = field(default_factory=list)
    """int32 each: the ids that top-k and top-p left to draw a token from, where these are on and it is asked for.
    Written before `output_ids`."""
    nucleus_ids: int = 0
    """In all nuclei."""
    experts: list[np.ndarray] = field(default_factory=list)
    """[n, layers, k] each: of the tokens that the model was fed with, where it records them."""
    cached_tokens: int = 0
    finish_reason: dict[str, Any] | None = None
    error: Exception | None = None
    started: float = field(default_factory=time.perf_counter)
    finished: float = 0.0
    on_token: Callable[[], object] | None = None
    media: dict[str, np.ndarray] = field(default_factory=dict)
    """The model's arguments for the images of the prompt."""
    media_id: str = ""
    image_places: list[int] = field(default_factory=list)
    """Places of image tokens in `prompt_ids`."""

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Equal where what is computed first is."""
        return self.media_id, (*self.prompt_ids, *self.output_ids)

    def add_experts(self, rows: np.ndarray) -> None:
        """Adds the experts of tokens that were fed. rows: [n, layers, k] of the last n tokens fed; those of tokens that
        are known already are left out."""
        known = sum(map(len, self.experts))
        fed = len(self.prompt_ids) + len(self.output_ids)
        self.experts.append(rows[len(rows) - max(0, fed - known) :])

    def add_nucleus(self, ids: np.ndarray) -> None:
        """Records what the next token is drawn from. ids: int32 [n]. Raises InvalidField where that is too much."""
        self.nucleus_ids += len(ids)
        if self.nucleus_ids > MOST_NUCLEUS_IDS:
            raise InvalidField(
                "top_p", self.params.top_p, "a smaller top_p, or top_k as well",
                f"the nuclei of a response hold more than {MOST_NUCLEUS_IDS:,} token ids after {len(self.nuclei):,} "
                f"tokens: lower --rollout-top-p {self.params.top_p:g}, or set --rollout-top-k",
            )  # fmt: skip
        self.nuclei.append(ids)

    def start_over(self) -> None:
        """Forgets what was generated."""
        self.output_ids.clear()
        self.log_probs.clear()
        self.nuclei.clear()
        self.nucleus_ids = 0
        self.experts.clear()

    @property
    def planned_tokens(self) -> int:
        """Tokens that room is kept for when it begins to run: those it has, and the next few."""
        left = max(0, self.params.max_new_tokens - len(self.output_ids))
        return len(self.prompt_ids) + len(self.output_ids) + min(left, TOKENS_AHEAD)

    def fail(self, error: Exception) -> None:
        """Ends it with an error of its own, which its request is answered with."""
        self.error = error
        self.finish({"type": "abort", "message": str(error)})

    def finish(self, reason: dict[str, Any]) -> None:
        self.finish_reason = reason
        self.finished = time.perf_counter()
