"""The place in the data, kept by a checkpoint so that another buffer continues with the next prompts.

A file of JSON lines:

    {"format": 1, "step": 4, "dataset": "...", "cursor": [epoch, offset], "next_group_index": 20, ...}
    {"group_index": 17, "first_sample": 68, "num_samples": 4, "template": base64, "samples": [base64, ...]}
    {"key": "mine-1", "added": 3, "first": 5, "digest": "..."}

The first line describes the dataset and the numbers that never repeat. Then come the groups that were drawn and are in
no step up to `step`, with the samples of those that were returned unfinished; then the keys of prompts that clients
added.
"""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.buffer.groups.prompts import TRAIN, Prompts
from slime.buffer.groups.samples import encoded_samples
from slime.buffer.store.base import Group, Payloads, State, Store
from slime.types.errors import DataLoss, InvalidFile, InvalidSetting, MissingFile

FLAG = "--data-place"
FORMAT = 1
NUMBERS = ("next_group_index", "next_sample_index")
# Groups to generate again; they keep the samples that were returned unfinished.
UNFINISHED = (State.READY, State.LEASED)
OVER = (State.REJECTED, State.QUARANTINED, State.COMMITTED)
# In the store: groups below this index are being restored, with their samples.
RESTORING = "restoring"

log = logging.getLogger(__name__)


def place_lines(store: Store, prompts: Prompts, payloads: Payloads, step: int) -> Iterator[bytes]:
    """Returns the lines of the file, all as of the call; later changes are not in them."""
    with store.transaction():
        cursor = prompts.cursor
        header = {
            "format": FORMAT,
            "step": step,
            "dataset": None if prompts.dataset is None else prompts.dataset.identity,
            "cursor": [cursor.epoch, cursor.offset],
            **{name: store.get(name, 0) for name in NUMBERS},
        }
        states = [state for state in State if state not in OVER]
        lines = [_group_line(group, payloads) for group in store.groups(states=states) if _waits(group, step)]
        names = ("key", "added", "first", "digest")
        batches = [dict(zip(names, batch, strict=True)) for batch in store.prompt_batches()]
    return ((json.dumps(line) + "\n").encode() for line in [header, *lines, *batches])


def _waits(group: Group, step: int) -> bool:
    return group.step is None or group.step > step


def _group_line(group: Group, payloads: Payloads) -> dict[str, Any]:
    samples: list[bytes] = []
    if group.state in UNFINISHED and group.payload is not None:
        # A group whose samples cannot be read is leased again as its prompt alone.
        with contextlib.suppress(DataLoss):
            samples = encoded_samples(group, payloads, range(len(group.sizes)))
    return {
        "group_index": group.group_index,
        "first_sample": group.first_sample,
        "num_samples": group.num_samples,
        "template": b64encode(group.template).decode(),
        "samples": [b64encode(sample).decode() for sample in samples],
    }


def restore_place(path: str, store: Store, prompts: Prompts, payloads: Payloads) -> None:
    """Sets a new buffer to the place in `path`; a buffer that has handed out groups continues where it was.

    Raises MissingFile or InvalidFile naming --data-place, InvalidSetting if the buffer is behind that place.
    """
    header, groups, batches = _read(Path(path))
    handed_out = store.get("next_group_index", 0)
    if handed_out or store.get("run_id") is not None:
        if handed_out < header["next_group_index"]:
            raise InvalidSetting(
                f"--buffer-dir has handed out {handed_out} groups, the checkpoint continues after "
                f"{header['next_group_index']}: prompts would repeat; use an empty directory",
                field="--buffer-dir", value=handed_out, expected=f"{header['next_group_index']} groups",
            )  # fmt: skip
        return
    identity = None if prompts.dataset is None else prompts.dataset.identity
    with store.transaction():
        # If this start ends before the next transaction does, the next start finds samples that no group names.
        store.put(RESTORING, header["next_group_index"])
    with store.transaction():
        store.put(RESTORING, 0)
        for name in NUMBERS:
            store.put(name, header[name])
        for batch in batches:
            store.insert_prompt_batch(batch["key"], batch["added"], batch["first"], batch.get("digest"))
        if identity != header["dataset"]:
            log.warning("%s: it is a place in %s, but the prompts here are %s; starting with the first prompt", path,
                        header["dataset"], identity)  # fmt: skip
            return
        store.put("cursor", header["cursor"])
        for group in groups:
            _restore_group(group, store, prompts, payloads)


def _restore_group(line: dict[str, Any], store: Store, prompts: Prompts, payloads: Payloads) -> None:
    template, samples = b64decode(line["template"]), [b64decode(sample) for sample in line["samples"]]
    if line["num_samples"] != prompts.samples_per_prompt:
        # The group size has changed: the prompt is kept, and its samples get new indexes.
        prompts.insert([template])
        return
    group = Group(
        group_index=line["group_index"],
        dataset=TRAIN,
        state=State.READY,
        template=template,
        first_sample=line["first_sample"],
        num_samples=line["num_samples"],
        sizes=tuple(map(len, samples)),
        checksums=tuple(map(zlib.crc32, samples)),
    )
    if samples:
        (group.payload,) = payloads.write([(group.group_index, samples)])
        payloads.flush([group.payload])
    store.insert_groups([group])


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    if not path.is_file():
        raise MissingFile(f"{FLAG}: no such file {path}", field=FLAG, value=str(path), expected="data_place.jsonl")
    try:
        header, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}, expected {FORMAT}")
        for name in ("dataset", "cursor", *NUMBERS):
            header[name]
        return header, [line for line in lines if "template" in line], [line for line in lines if "key" in line]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidFile(
            f"{FLAG}: {path} is not a place in the data: {type(error).__name__}: {error}",
            field=FLAG, value=str(path), expected="data_place.jsonl of a checkpoint",
        ) from error  # fmt: skip
