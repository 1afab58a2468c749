"""Weights for engines that were started again, and updates that are repeated after the loss of one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from slime.launcher.services import returning
from slime.launcher.services.returning import MOST_FAILURES, ReturningEngines
from slime.launcher.services.supervisor import Supervisor
from slime.launcher.services.weight_updates import TrainerRanks, WeightUpdates
from slime.types.clients.rollout import Engine, RolloutStatus
from slime.types.errors import DeadlineExceeded, EngineError, Unavailable


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returning, "POLL_SECONDS", 0.0)


def status(*awaits: bool, restarts: int = 0) -> RolloutStatus:
    engines = [Engine(f"engine-{i}", "", "", True, 0, awaits_weights=value) for i, value in enumerate(awaits)]
    return RolloutStatus(engines, 0, 0, restarts, trained_engine_restarts=restarts)


def watch(statuses: list[Any], send: Any = lambda: None) -> list[int]:
    """Watches while there are statuses; returns how many were left at each call of `send`."""
    sent: list[int] = []

    def next_status() -> RolloutStatus:
        found = statuses.pop(0)
        if not statuses:
            watcher.stop()
        if isinstance(found, Exception):
            raise found
        return found

    def count() -> None:
        sent.append(len(statuses))
        send()

    watcher = ReturningEngines(next_status, count)
    thread = threading.Thread(target=watcher.watch)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return sent


def test_weights_are_sent_while_an_engine_waits_for_them() -> None:
    statuses = [status(False, False), status(False, True, restarts=1), Unavailable("gone"), status(True), status(False)]
    assert watch(statuses) == [3, 1]


def test_a_transfer_that_fails_is_repeated_a_bounded_number_of_times() -> None:
    def fail() -> None:
        raise EngineError("it died again")

    watcher = ReturningEngines(lambda: status(True), fail)
    with pytest.raises(EngineError, match="it died again"):
        watcher.watch()
    assert len(watch([status(True)] * (MOST_FAILURES - 1), lambda: None)) == MOST_FAILURES - 1


class Rollout:
    def __init__(self) -> None:
        self.restarts = self.of_judges = self.asked = 0

    def status(self) -> RolloutStatus:
        self.asked += 1
        return RolloutStatus([], 0, 0, self.restarts + self.of_judges, trained_engine_restarts=self.restarts)


class Trainer:
    """Fails `failures` times; engine_dies: because an engine is lost. judge_dies: one of another model is, too."""

    def __init__(self, rollout: Rollout, failures: int, engine_dies: bool, judge_dies: bool = False) -> None:
        self.rollout, self.failures = rollout, failures
        self.engine_dies, self.judge_dies = engine_dies, judge_dies
        self.versions: list[int] = []

    def update_weights(self, version: int, timeout: float) -> dict[str, float]:
        self.versions.append(version)
        if len(self.versions) <= self.failures:
            self.rollout.restarts += self.engine_dies
            self.rollout.of_judges += self.judge_dies
            raise EngineError("rank 0 to engine engine-0: connection reset")
        return {"perf/update_weights_bytes": 1.0}


def updates_of(
    directory: Path, ranks: list[Any], rollout: Any = None, version: int = 0
) -> tuple[WeightUpdates, TrainerRanks]:
    supervisor = Supervisor(directory, start_seconds=1.0, stop_seconds=1.0)
    trainer = TrainerRanks(ranks, supervisor)
    updates = WeightUpdates(
        trainer, rollout or Rollout(), supervisor, version=version, restarts_engines=True, timeout_seconds=1.0
    )
    return updates, trainer


@pytest.mark.parametrize("engine_dies, judge_dies", [(True, False), (True, True), (False, False), (False, True)])
def test_an_update_is_repeated_where_an_engine_was_lost_in_it(
    tmp_path: Path, engine_dies: bool, judge_dies: bool
) -> None:
    rollout = Rollout()
    ranks = [Trainer(rollout, 2, engine_dies, judge_dies), Trainer(rollout, 2, False)]
    updates, _ = updates_of(tmp_path, ranks, rollout)
    if engine_dies:
        assert updates.send(4) == {"perf/update_weights_bytes": 1.0}
        assert [rank.versions for rank in ranks] == [[4] * 3] * 2
    else:
        with pytest.raises(EngineError, match="connection reset"):
            updates.send(4)
        assert [rank.versions for rank in ranks] == [[4]] * 2


def test_the_rollout_service_is_asked_for_restarts_only_where_an_update_fails(tmp_path: Path) -> None:
    rollout = Rollout()
    updates, _ = updates_of(tmp_path, [Trainer(rollout, 1, True)], rollout)
    updates.send(4)
    assert rollout.asked == 1
    updates.send(5)
    assert rollout.asked == 1


def test_an_engine_that_was_lost_before_an_update_saves_it_from_an_error_once(tmp_path: Path) -> None:
    rollout = Rollout()
    rollout.restarts = 3
    rank = Trainer(rollout, 9, False)
    updates, _ = updates_of(tmp_path, [rank], rollout)
    for attempts in (2, 3):
        with pytest.raises(EngineError, match="connection reset"):
            updates.send(4)
        assert len(rank.versions) == attempts


def test_engines_that_are_lost_as_they_have_got_weights_get_them_again(tmp_path: Path) -> None:
    versions: list[int] = []

    class Sends:
        def update_weights(self, version: int, timeout: float) -> dict[str, float]:
            versions.append(version)
            if len(versions) == 1:
                updates.engines_lost()
            return {}

    updates, _ = updates_of(tmp_path, [Sends()], version=4)
    updates.send(4)
    updates.restore()
    updates.restore()
    assert versions == [4, 4]


def test_no_rank_is_called_again_before_all_have_answered(tmp_path: Path) -> None:
    failed, held = threading.Event(), []

    class Fails:
        def update_weights(self, version: int, timeout: float, joining: bool) -> Any:
            failed.set()
            raise DeadlineExceeded("it hangs")

    class Works:
        def update_weights(self, version: int, timeout: float, joining: bool) -> Any:
            failed.wait(60)
            sending.join(0.5)
            held.append(not trainer.turn.acquire(blocking=False))
            return {}

    updates, trainer = updates_of(tmp_path, [Fails(), Works()])
    raised: list[Exception] = []

    def send() -> None:
        try:
            updates.send_to_returning()
        except DeadlineExceeded as error:
            raised.append(error)

    sending = threading.Thread(target=send)
    sending.start()
    sending.join(60)
    assert held == [True] and [str(error) for error in raised] == ["it hangs"]
