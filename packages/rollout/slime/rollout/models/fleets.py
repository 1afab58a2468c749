"""Fleets of the models of a run that keep their weights, beside the fleet of the trained one.

Each has its own router, and its engines are watched and restarted as those of the trained model are; one that starts
again has the weights of its directory, and serves at once. A fleet that fails ends the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from slime.rollout.engines.base import RunningEngine
from slime.rollout.fleet.fleet import Fleet
from slime.types.errors import EngineError


class ModelFleets:
    """The fleet of the trained model, and those of the others. engines: of each other model, by its name."""

    def __init__(self, trained: Fleet, engines: Mapping[str, Sequence[RunningEngine]]) -> None:
        self._trained = trained
        # Answers without what only training needs.
        options = dataclasses.replace(trained.options, routed_experts=False, nuclei=False)
        self.by_name = {name: Fleet(each, trained.loop, options) for name, each in engines.items()}
        self._ending: set[asyncio.Task[EngineError]] = set()

    @property
    def all(self) -> list[Fleet]:
        return [self._trained, *self.by_name.values()]

    def start(self) -> None:
        """Does what `Fleet.start` does, for the models that are not trained."""
        for name, fleet in self.by_name.items():
            self._end_with(name, fleet)
            fleet.start()

    def _end_with(self, name: str, fleet: Fleet) -> None:
        def end(error: EngineError) -> None:
            reason = EngineError(f"model {name}: {error.message}", field=error.field, expected=error.expected)
            task = asyncio.get_running_loop().create_task(self._trained.end(reason))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

        fleet.on_failure(end)

    def stop(self) -> None:
        stop_fleets(self.all)


def stop_fleets(fleets: Sequence[Fleet]) -> None:
    """Stops fleets that share an event loop, at the same time, and then the loop."""
    try:
        if len(fleets) == 1:
            fleets[0].stop()
            return
        with ThreadPoolExecutor(len(fleets), thread_name_prefix="stop-model") as pool:
            for stopped in [pool.submit(fleet.stop) for fleet in fleets]:
                stopped.result()
    finally:
        fleets[0].loop.stop()
