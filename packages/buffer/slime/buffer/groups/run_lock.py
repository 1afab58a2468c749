"""The right to write: held by the current run and its incarnation."""

from __future__ import annotations

from typing import NamedTuple

from slime.buffer.store.base import Store
from slime.types.errors import InvalidField, NotFound, StaleWriter, WrongState


class WriterId(NamedTuple):
    run_id: str
    incarnation: int


class RunLock:
    """Admits writes of the current run only. A buffer holds one run, because its steps have the numbers of that run."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def raise_incarnation(self, run_id: str) -> WriterId:
        """Starts a new incarnation and returns its writer. Inside a transaction.

        Raises WrongState if the buffer holds another run.
        """
        if not run_id:
            raise InvalidField("run_id", run_id, "a name")
        known = self.store.get("run_id")
        if known not in (None, run_id):
            raise WrongState(
                f"this buffer holds run {known!r}: open that, or start run {run_id!r} with a --buffer-dir of its own",
                field="run_id",
                value=run_id,
                expected=known,
            )
        writer = WriterId(run_id, self.store.get("incarnation", 0) + 1)
        self.store.put("run_id", run_id)
        self.store.put("incarnation", writer.incarnation)
        return writer

    def find(self) -> WriterId | None:
        """Returns the writer of the current incarnation; None if no run was opened."""
        run_id = self.store.get("run_id")
        return None if run_id is None else WriterId(run_id, self.store.get("incarnation"))

    def current(self) -> WriterId:
        """Returns what `find` does. Raises NotFound if no run was opened."""
        writer = self.find()
        if writer is None:
            raise NotFound("no run is open in this buffer", field="run_id", expected="OpenRun before this call")
        return writer

    def check(self, writer: WriterId) -> None:
        """Raises StaleWriter for any writer but the current one."""
        current = self.find()
        if writer != current:
            open_run = "no run is open" if current is None else f"the current one is {_show(current)}"
            raise StaleWriter(
                f"{_show(writer)} may not write: {open_run}",
                field="writer",
                value=_show(writer),
                expected="OpenRun before this call" if current is None else _show(current),
            )


def _show(writer: WriterId) -> str:
    return f"run {writer.run_id!r} incarnation {writer.incarnation}"
