"""Checks the free space on the disks that a run writes to, and the database and object store of its buffer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slime.buffer.store.objects import ObjectPayloads
from slime.buffer.store.postgres_session import look
from slime.buffer.store.urls import PAYLOADS, STORE, check_url
from slime.launcher.doctor.finding import Finding, Subject, fail, ok, warn
from slime.launcher.doctor.needs import checkpoints
from slime.launcher.plan.trainer_memory import byte_size
from slime.launcher.platform import probes
from slime.types.errors import ConfigError

# Space for logs, metrics and the state of the buffer.
LEAST_BYTES = 1 << 30
DIRECTORIES = {
    "output_dir": "--output-dir",
    "buffer_dir": "--buffer-dir",
    "update_weight_disk_dir": "--update-weight-disk-dir",
}


def check_disk(subject: Subject) -> Iterator[Finding]:
    for name, flag in DIRECTORIES.items():
        value = subject.flag(name)
        if value or name == "output_dir":
            yield from _directory(flag, Path(str(value or "runs")), LEAST_BYTES, "logs, metrics and samples")
    yield from _checkpoints(subject)
    if url := subject.flag("buffer_store"):
        yield _database(str(url))
    if url := subject.flag("buffer_payloads"):
        yield _bucket(str(url))


def _database(url: str) -> Finding:
    try:
        check_url(STORE, url)
        user = look(url)
    except ConfigError as error:
        return fail(error.message, "see --buffer-store in docs/operators.md")
    name = f"{STORE} {url.partition('?')[0]}"
    if user:
        return warn(f"{name}: {user} uses it", "wait for its end, or name another database")
    return ok(f"{name}: answers, and no server uses it")


def _bucket(url: str) -> Finding:
    try:
        check_url(PAYLOADS, url)
        ObjectPayloads(url)
    except ConfigError as error:
        return fail(error.message, "see --buffer-payloads in docs/operators.md")
    return ok(f"{PAYLOADS} {url}: the bucket is there")


def _directory(flag: str, directory: Path, needed: float, words: str) -> Iterator[Finding]:
    nearest, free = probes.disk_free(directory)
    text = f"{flag} {directory}: {byte_size(free)} free"
    if not nearest.is_dir():
        yield fail(f"{flag} {directory}: {nearest} is not a directory", "name another, or move the file away")
    elif not probes.writable(nearest):
        yield fail(f"{flag} {directory}: {nearest} is not writable", "name another, or make it writable")
    elif free < needed:
        yield fail(f"{text}, {byte_size(needed)} needed ({words})", "free some, or name a directory on a larger disk")
    else:
        yield ok(text)


def _checkpoints(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    if config is None or config.launcher.save_interval is None:
        return
    directory, flag = config.checkpoint_dir, "--save" if config.launcher.save else "checkpoints below --output-dir"
    needed = checkpoints(subject)
    if needed is None:
        yield from _directory(flag, directory, LEAST_BYTES, "checkpoints")
        return
    size, kept, words = needed
    formula = f"a checkpoint takes {byte_size(size)}, {words}"
    nearest, free = probes.disk_free(directory)
    if nearest.is_dir() and probes.writable(nearest) and size <= free < size * kept:
        yield warn(
            f"{flag} {directory}: {byte_size(free)} free, but the run keeps {kept} checkpoints, "
            f"{byte_size(kept * size)} ({formula})",
            "--save-keep 2 keeps the last two; --no-save-optim makes them smaller",
        )
        return
    yield from _directory(flag, directory, size, formula)
