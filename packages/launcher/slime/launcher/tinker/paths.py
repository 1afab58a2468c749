"""Checkpoints of the service on disk: `tinker://RUN/KIND/NAME` is OUTPUT_DIR/RUN/KIND/NAME.

    RUN/run.json            base model, user metadata and LoRA adapter
    RUN/weights/NAME        weights and optimizer (save_state)
    RUN/sampler_weights/NAME    weights only (save_weights_for_sampler)

A name from a client is one plain word, so no path leads out of the directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slime.types.directories import remove_directory
from slime.types.errors import InvalidField, NotFound
from slime.types.files import write_whole

SCHEME = "tinker://"
TRAINING, SAMPLER = "weights", "sampler_weights"
TYPES = {TRAINING: "training", SAMPLER: "sampler"}
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")
RUN_FILE = "run.json"


class CheckpointStore:
    """The checkpoints below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add_run(
        self, run: str, base_model: str, metadata: Mapping[str, Any] | None, lora: Mapping[str, Any] | None = None
    ) -> None:
        """Writes the run.json of a training run. lora: None where all weights train. Raises InvalidField."""
        directory = self.root / _word("training_run_id", run)
        directory.mkdir(parents=True, exist_ok=True)
        about = {"base_model": base_model, "user_metadata": dict(metadata or {}), "time": _now(), "lora": lora}
        write_whole(directory / RUN_FILE, json.dumps(about, indent=1) + "\n")

    def run(self, run: str) -> dict[str, Any]:
        """Returns the content of a training run's run.json. Raises NotFound."""
        file = self.root / _word("training_run_id", run) / RUN_FILE
        if not file.is_file():
            raise NotFound(f"there is no training run {run}", field="training_run_id", value=run)
        return dict(json.loads(file.read_text()))

    def new(self, run: str, kind: str, name: str) -> tuple[str, Path]:
        """Returns the address and the directory of a checkpoint, which may exist already. Raises InvalidField."""
        return f"{SCHEME}{run}/{kind}/{name}", self.root / run / kind / _word("path", name)

    def find(self, address: str) -> tuple[str, Path]:
        """Returns the run and the directory of a checkpoint. Raises InvalidField, NotFound."""
        parts = address.removeprefix(SCHEME).split("/")
        if not address.startswith(SCHEME) or len(parts) != 3 or parts[1] not in TYPES:
            raise InvalidField("path", address, f"{SCHEME}RUN/{TRAINING}/NAME or {SCHEME}RUN/{SAMPLER}/NAME")
        run, kind, name = _word("path", parts[0]), parts[1], _word("path", parts[2])
        directory = self.root / run / kind / name
        if not (directory / "config.json").is_file():
            raise NotFound(f"there is no checkpoint {address}", field="path", value=address)
        return run, directory

    def checkpoints(self, run: str) -> Iterator[dict[str, Any]]:
        """Yields the run's checkpoints in the SDK's form `Checkpoint`, the oldest first. Raises NotFound."""
        self.run(run)
        found = [path for kind in TYPES for path in (self.root / run / kind).glob("[!.]*") if path.is_dir()]
        for path in sorted(found, key=lambda path: path.stat().st_mtime):
            kind = path.parent.name
            yield {
                "checkpoint_id": f"{kind}/{path.name}",
                "checkpoint_type": TYPES[kind],
                "time": datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(),
                "tinker_path": f"{SCHEME}{run}/{kind}/{path.name}",
                "size_bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
            }

    def remove(self, address: str) -> None:
        """Deletes a checkpoint that this service wrote. Raises NotFound."""
        remove_directory(self.find(address)[1])


def _word(field: str, value: str) -> str:
    if not _WORD.fullmatch(value) or ".." in value:
        raise InvalidField(field, value, "at most 128 letters, digits and _ . : -, not beginning with . : or -")
    return value


def _now() -> str:
    return datetime.now(UTC).isoformat()
