"""Old policies: the weights that generated samples, kept as long as samples of theirs may come."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from slime.trainer.backends.base import POLICY, Backend
from slime.trainer.batching.packing import loss_mask
from slime.types.sample import Sample

log = logging.getLogger(__name__)

# Copies of the model in host memory. Generating one iteration ahead needs three.
MOST_KEPT = 8
# SGLang's name for the weights that it started from.
_FIRST = "default"


class OldPolicies:
    """Weights of `backend` by weight version; the same on every rank, as every method is called on every rank."""

    def __init__(self, backend: Backend, version: int | None) -> None:
        """version: of the weights that the backend has now; None where they have none yet."""
        self._backend = backend
        self._kept: list[int] = []
        self._current: int | None = None
        # Most updates by which the weights were ahead of those of a token that was trained on.
        self._lag = 0
        if version is not None:
            self.keep(version)

    def keep(self, version: int) -> None:
        """Keeps the weights that the backend has now, which the engines get as `version`."""
        self._backend.keep(_name(version))
        self._current = version
        if version in self._kept:
            self._kept.remove(version)
        self._kept.append(version)
        for oldest in self._kept[:-MOST_KEPT]:
            self._drop(oldest)

    def find(self, version: str) -> str | None:
        """Returns the name for `Backend.scores` of the weights of `version`; None if they are not kept (any more)."""
        number = _number(version)
        if number is not None and number == self._current:
            return POLICY
        return _name(number) if number in self._kept and number is not None else None

    def trained(self, versions: Iterable[str]) -> None:
        """Notes that the weights changed, and drops those that are older than any of a token was so far.

        versions: of the tokens trained on. Groups end in any order: the next one may be as late as the latest was.
        """
        self._current = None
        numbers = [number for number in map(_number, versions) if number is not None]
        if not numbers or not self._kept:
            return
        newest = self._kept[-1]
        self._lag = max(self._lag, newest - min(numbers))
        for version in [v for v in self._kept if v < newest - self._lag]:
            self._drop(version)

    def _drop(self, version: int) -> None:
        self._backend.drop(_name(version))
        self._kept.remove(version)


def _name(version: int) -> str:
    return f"version-{version}"


def _number(version: str) -> int | None:
    if version == _FIRST:
        return 0
    return int(version) if version.isdecimal() else None


def token_versions(sample: Sample) -> np.ndarray:
    """[R] text: the weight version that generated each response token; "" where it is not known."""
    versions = set(sample.weight_versions)
    known = versions.pop() if len(versions) == 1 else ""
    found = np.full(sample.response_length, known, dtype=object)
    for span in sample.spans:
        found[span.start : span.end] = span.weight_version
    return found


def trained_versions(samples: Iterable[Sample]) -> set[str]:
    """Returns the weight versions of the tokens whose loss mask is 1."""
    return {str(version) for sample in samples for version in token_versions(sample)[loss_mask(sample) > 0]}
