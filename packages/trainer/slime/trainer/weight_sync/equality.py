"""Compares an engine's weights after an update with the same weights from a directory (--check-weight-update-equal).

An engine has its own names, fused matrices and shards, so values are compared inside it: it computes checksums after
the transfer, fills its tensors with random numbers, loads the same weights with its own loader from a directory that is
written here, and computes checksums again. A tensor that the transfer missed, moved or rounded differs, and so does one
that neither way reaches. The engine is left with the weights of the version. The check costs a copy of the model on
disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.trainer.weight_sync.base import Weights
from slime.trainer.weight_sync.requests import EngineRequests
from slime.types.clients import Engine
from slime.types.errors import EngineError, counted

Checksums = dict[tuple[str, str], str]
CHECKER = "/weights_checker"


class EqualityCheck:
    """Compares the weights of engines with those sent. directory: where the weights are written, readable by the
    engines too; None for the system's directory of temporary files.

    write_directory(path, weights) writes a whole Hugging Face directory.
    """

    def __init__(
        self, directory: str | None, write_directory: Callable[[Path, Weights], int], timeout_seconds: float
    ) -> None:
        self._directory = directory
        self._write = write_directory
        self._requests = EngineRequests(timeout_seconds)

    def run(self, engines: Sequence[Engine], version: int, weights: Weights) -> int:
        """Returns the number of tensors compared, over all engines and their ranks.

        Raises EngineError naming engine, version and the tensors that differ.
        """
        with tempfile.TemporaryDirectory(prefix="slime-check-", dir=self._directory) as parent:
            path = Path(os.path.realpath(parent)) / f"weight_v{version:06d}"
            self._write(path, weights)
            what = f"check of weight version {version}"
            sent = self._each(engines, CHECKER, {"action": "checksum"}, what)
            self._each(engines, CHECKER, {"action": "reset_tensors"}, what)
            body = {"model_path": str(path), "weight_version": str(version), "flush_cache": False}
            self._each(engines, "/update_weights_from_disk", body, what)
            read = self._each(engines, CHECKER, {"action": "checksum"}, what)
        return sum(
            _compare(engine, version, _checksums(engine, a), _checksums(engine, b))
            for engine, a, b in zip(engines, sent, read, strict=True)
        )

    def _each(self, engines: Sequence[Engine], path: str, body: dict[str, Any], what: str) -> list[Any]:
        return [answer.result() for answer in [self._requests.start(e, path, body, what) for e in engines]]

    def close(self) -> None:
        self._requests.close()


def _checksums(engine: Engine, answer: Any) -> Checksums:
    """Reads checksums by (tensor, place among the ranks of the engine)."""
    try:
        return {
            (name, "/".join(f"{part} {rank['parallelism_info'][f'{part}_rank']}" for part in ("tp", "pp", "dp"))): value
            for rank in answer["ranks"]
            for name, value in rank["checksums"].items()
        }
    except (TypeError, KeyError, AttributeError) as error:
        raise EngineError(
            f"engine {engine.name} at {engine.url}{CHECKER}: no checksums ({error}) in {str(answer)[:300]}",
            field=engine.name,
            expected='{"ranks": [{"checksums": {...}, "parallelism_info": {...}}]}',
        ) from error


def _compare(engine: Engine, version: int, sent: Checksums, read: Checksums) -> int:
    different = [key for key in sorted(sent.keys() | read.keys()) if sent.get(key) != read.get(key)]
    if different or not sent:
        (name, place), more = different[0] if different else ("(none)", "any rank"), max(0, len(different) - 1)
        others = counted(more, "other tensor differs", "other tensors differ")
        raise EngineError(
            f"engine {engine.name}, weight version {version}: tensor {name} ({place}) is not what was sent: checksum "
            f"{sent.get((name, place))} after the update, {read.get((name, place))} of the same weights from disk"
            + (f"; {others}: {', '.join(key[0] for key in different[1:6])}" if more else ""),
            field=name,
            value=sent.get((name, place)),
            expected=read.get((name, place)) or "a checksum",
        )
    return len(sent)
