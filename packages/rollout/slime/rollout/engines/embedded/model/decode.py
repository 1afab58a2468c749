"""A batch of sequences: samples a token for each from its logits, and finishes those that are complete."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.response import Response
from slime.rollout.engines.embedded.model.sampling import sample
from slime.types.errors import EngineError, counted

log = logging.getLogger(__name__)


class Batch(ABC):
    """Sequences that decode together; call `step` until `done`. Callers may finish any of them between two steps."""

    joinable: bool
    """True if `add` may be called after the first step."""
    max_tokens: int
    """The most tokens whose keys and values may be in memory."""

    def __init__(self, loaded: Loaded, rng: np.random.Generator) -> None:
        self._tokenizer = loaded.tokenizer
        self._eos = loaded.eos_ids
        self._rng = rng
        self._left: list[Response] = []

    @property
    @abstractmethod
    def running(self) -> list[Response]: ...

    @property
    def done(self) -> bool:
        return not self.running

    @property
    @abstractmethod
    def free_tokens(self) -> int:
        """The number of tokens of further sequences that fit into memory."""

    @property
    @abstractmethod
    def used_tokens(self) -> int:
        """The number of tokens whose keys and values are in memory."""

    def take_back(self) -> list[Response]:
        """Returns the sequences that left for lack of memory since the last call, to be added again later."""
        left, self._left = self._left, []
        return left

    @abstractmethod
    def add(self, responses: Sequence[Response]) -> None:
        """Adds sequences, which run from the next step on."""

    @abstractmethod
    def step(self) -> None:
        """Generates one more token for every running sequence."""

    def _emit(self, responses: Sequence[Response], logits_BV: torch.Tensor) -> None:
        """Appends a token to each of `responses` that has not finished. Overwrites the logits, float32 [B, V]."""
        self._forbid_eos(responses, logits_BV)
        positions = [len(r.prompt_ids) + len(r.output_ids) for r in responses]
        recorded = {i for i, response in enumerate(responses) if response.records_nuclei}
        ids, log_probs, nuclei = sample(logits_BV, [r.params for r in responses], positions, self._rng, recorded)
        for i, (response, token, log_prob) in enumerate(zip(responses, ids.tolist(), log_probs.tolist(), strict=True)):
            if response.finish_reason is None:
                try:
                    if i in nuclei:
                        response.add_nucleus(nuclei[i])
                    self._check_and_append(response, token, log_prob)
                except Exception as error:
                    log.exception("sequence %s failed", response.rid)
                    response.fail(error)

    def _forbid_eos(self, responses: Sequence[Response], logits_BV: torch.Tensor) -> None:
        for i, r in enumerate(responses):
            if len(r.output_ids) < r.params.min_new_tokens and r.finish_reason is None:
                logits_BV[i, sorted(self._eos | r.params.stop_token_ids)] = -torch.inf

    def _check_and_append(self, r: Response, token: int, log_prob: float) -> None:
        if math.isnan(log_prob):
            raise EngineError(f"the model's logits are not numbers after {counted(len(r.output_ids), 'token')}")
        r.output_ids.append(token)
        r.log_probs.append(log_prob)
        if token in r.params.stop_token_ids or (token in self._eos and not r.params.ignore_eos):
            r.finish({"type": "stop", "matched": token})
        elif r.params.stop and (matched := self._matched_stop(r)) is not None:
            r.finish({"type": "stop", "matched": matched})
        elif len(r.output_ids) >= r.params.max_new_tokens:
            r.finish({"type": "length", "length": r.params.max_new_tokens})
        if r.on_token is not None:
            r.on_token()

    def _matched_stop(self, r: Response) -> str | None:
        # A token holds at least one byte, so no stop string reaches further back than this.
        tail = self._tokenizer.decode(r.output_ids[-max(len(stop.encode()) for stop in r.params.stop) - 1 :])
        return next((stop for stop in r.params.stop if stop in tail), None)
