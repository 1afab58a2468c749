"""The state of one response while it is generated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.rollout.engines.embedded.model.params import SamplingParams
from slime.types.errors import InvalidField

TOKENS_AHEAD = 512
# The most ids in all nuclei of one response, 64 MiB: top-p near 1 leaves most of the vocabulary for each token.
MOST_NUCLEUS_IDS = 1 << 24


@dataclass(eq=False)
class Response:
    """A prompt, and the tokens generated for it so far."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    weight_version: str = ""
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Written after `output_ids`: another thread may read as many tokens as there are log-probs."""
    records_nuclei: bool = False
    nuclei: list[np.ndarray] = field(default_factory=list)
    """One int32 array per token: the ids that top-k and top-p left to sample it from, if these are on and nuclei are
    recorded. Written before `output_ids`."""
    nucleus_ids: int = 0
    """The number of ids in all nuclei."""
    experts: list[np.ndarray] = field(default_factory=list)
    """Arrays [n, layers, k] of the experts of the tokens fed to the model, if it records them."""
    cached_tokens: int = 0
    retractions: int = 0
    """The number of times that it left its batch for lack of memory."""
    finish_reason: dict[str, Any] | None = None
    error: Exception | None = None
    started: float = field(default_factory=time.perf_counter)
    finished: float = 0.0
    on_token: Callable[[], object] | None = None
    """Called on the model's thread after each token, once `finish_reason` is set if it is the last."""
    media: dict[str, np.ndarray] = field(default_factory=dict)
    """The model's arguments for the images of the prompt."""
    media_id: str = ""
    image_places: list[int] = field(default_factory=list)
    """Positions of image tokens in `prompt_ids`."""

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """A key that is equal for responses whose next forward pass is the same."""
        return self.media_id, (*self.prompt_ids, *self.output_ids)

    def add_experts(self, rows: np.ndarray) -> None:
        """Records the experts of tokens fed to the model. rows: [n, layers, k] of the last n tokens; rows of tokens
        whose experts are recorded already are left out."""
        known = sum(map(len, self.experts))
        fed = len(self.prompt_ids) + len(self.output_ids)
        self.experts.append(rows[len(rows) - max(0, fed - known) :])

    def add_nucleus(self, ids: np.ndarray) -> None:
        """Records the nucleus of the next token. ids: int32 [n]. Raises InvalidField if the nuclei get too large."""
        self.nucleus_ids += len(ids)
        if self.nucleus_ids > MOST_NUCLEUS_IDS:
            raise InvalidField(
                "top_p", self.params.top_p, "a smaller top_p, or top_k as well",
                f"the nuclei of a response hold more than {MOST_NUCLEUS_IDS:,} token ids after {len(self.nuclei):,} "
                f"tokens: lower --rollout-top-p {self.params.top_p:g}, or set --rollout-top-k",
            )  # fmt: skip
        self.nuclei.append(ids)

    def start_over(self) -> None:
        """Drops the generated tokens."""
        self.output_ids.clear()
        self.log_probs.clear()
        self.nuclei.clear()
        self.nucleus_ids = 0
        self.experts.clear()

    @property
    def planned_tokens(self) -> int:
        """The number of tokens to reserve memory for when it begins to run: its tokens so far, and the next few."""
        left = max(0, self.params.max_new_tokens - len(self.output_ids))
        return len(self.prompt_ids) + len(self.output_ids) + min(left, TOKENS_AHEAD)

    def fail(self, error: Exception) -> None:
        """Ends the response with an error, with which its request is answered."""
        self.error = error
        self.finish({"type": "abort", "message": str(error)})

    def finish(self, reason: dict[str, Any]) -> None:
        self.finish_reason = reason
        self.finished = time.perf_counter()
