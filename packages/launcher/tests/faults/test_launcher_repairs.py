"""Repairs of services: real processes that die, hang or leave others behind, and calls that are repeated."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.buffer.settings import BufferSettings
from slime.launcher.config import run_config
from slime.launcher.faults.repairs import RepairLimits, Repairs
from slime.launcher.faults.restart_points import RestartPoints
from slime.launcher.faults.restarts import ServiceRestarts
from slime.launcher.faults.run_repairs import RunRepairs
from slime.launcher.placement.plan import Placement
from slime.launcher.services.processes import Process, Start
from slime.launcher.services.rollout_calls import RolloutCalls
from slime.launcher.services.supervisor import ServiceDied, Supervisor
from slime.launcher.services.watch import WatchedProcess
from slime.types.clients.rollout import StopSignal
from slime.types.directories import WholeDirectory, whole_directory
from slime.types.errors import InvalidField, SlimeError, Unavailable
from slime.types.pace import TrainerPace
from slime.types.rpc import RpcSettings

# Starts another process in a session of its own, prints its id, and waits.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def family() -> Iterator[tuple[WatchedProcess, psutil.Process]]:
    """A process that is watched, and one that it has started."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    watched = WatchedProcess(parent.pid)
    yield watched, child
    watched.kill()
    parent.wait()
    parent.stdout.close()


def until(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_process_that_dies_takes_those_with_it_that_it_started(
    family: tuple[WatchedProcess, psutil.Process],
) -> None:
    watched, child = family
    assert watched.look() is None
    # Its parent cannot be asked any more, and it is stopped itself.
    child.suspend()
    watched.process.kill()
    until(lambda: watched.look() == "died")
    watched.kill()
    assert ended(child)


def test_a_stopped_process_counts_as_lost_unless_it_goes_on(family: tuple[WatchedProcess, psutil.Process]) -> None:
    watched, child = family
    watched.process.send_signal(signal.SIGSTOP)
    assert watched.look() is None
    until(lambda: watched.look() == "was stopped by a signal")
    watched.process.send_signal(signal.SIGCONT)
    until(lambda: watched.look() is None)
    watched.process.send_signal(signal.SIGSTOP)
    watched.kill()
    assert watched.look() == "died"
    assert ended(child)


class Parts:
    """Services of which some are lost until they are started again."""

    def __init__(self, most: int = 5, fails: int = 0) -> None:
        self.lost: dict[str, str] = {}
        self.started: list[list[str]] = []
        self.fails = fails
        self.ended: list[SlimeError] = []
        limits = RepairLimits(most, 600.0, pause_seconds=0.01)
        self.repairs = Repairs(lambda: dict(self.lost), self.start_again, self.ended.append, limits)

    def start_again(self, lost: dict[str, str]) -> None:
        self.started.append(sorted(lost))
        if self.fails:
            self.fails -= 1
            raise Unavailable("the port is in use")
        self.lost.clear()


@pytest.fixture
def parts() -> Iterator[Parts]:
    parts = Parts()
    parts.repairs.start()
    yield parts
    parts.repairs.stop()


def test_calls_that_fail_while_a_service_is_lost_are_repeated_and_others_are_not(parts: Parts, tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, start_seconds=1.0, stop_seconds=1.0)
    supervisor.repeats = parts.repairs
    calls: list[str] = []

    def breaks() -> int:
        calls.append("breaks")
        if calls.count("breaks") == 1:
            # The connection breaks before the death is known.
            threading.Timer(0.3, parts.lost.update, [{"buffer": "died"}]).start()
            raise Unavailable("connection reset")
        return len(parts.started)

    assert supervisor.call(breaks) == 1
    assert parts.started == [["buffer"]] and parts.repairs.restarts == 1

    def refuses() -> None:
        calls.append("refuses")
        raise InvalidField("step", 3, "4")

    with pytest.raises(InvalidField):
        supervisor.call(refuses)
    assert calls.count("refuses") == 1


def test_a_service_that_does_not_start_is_started_again_a_bounded_number_of_times() -> None:
    parts = Parts(most=3, fails=99)
    parts.lost["rollout"] = "was stopped by a signal"
    parts.repairs.start()
    until(lambda: parts.ended)
    expected = "rollout was started again 3 times within 600 s.*--service-max-restarts.*did not start again: the port"
    with pytest.raises(ServiceDied, match=expected):
        raise parts.ended[0]
    with pytest.raises(ServiceDied):
        parts.repairs.wait_until_whole()
    assert parts.started == [["rollout"]] * 3


def test_the_end_of_a_run_waits_for_no_repair() -> None:
    parts = Parts(most=10**9, fails=10**9)
    parts.lost["trainer-0"] = "died"
    parts.repairs.start()
    until(lambda: parts.started)
    parts.repairs.stop()
    parts.repairs.wait_until_whole()
    assert not parts.ended


def checkpoint(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_directory(path, "slime-trainer") as directory:
        (directory / "trainer.json").write_text("{}")
    return path


def test_restart_points_take_a_bounded_share_of_the_time_and_of_the_disk(tmp_path: Path) -> None:
    now = [100.0]
    points = RestartPoints(
        tmp_path, first=2, load="model", backend="fsdp", checkpoints=tmp_path / "checkpoints", interval_seconds=10,
        first_seconds=3.0, multiple_of=2, clock=lambda: now[0],
    )  # fmt: skip
    assert points.newest(5) == (2, "model") and points.due(3) is None
    now[0] += 59
    assert points.due(3) is None  # 3 s of 59 s are more than 5 %
    now[0] += 2
    # After an odd number of iterations the state is not whole.
    assert points.due(4) is None
    path = points.due(3)
    assert path == tmp_path / "recovery" / "step_000003"
    points.written(checkpoint(path), seconds=2.0)
    assert points.newest(5) == (3, str(path))
    now[0] += 39
    assert points.due(5) is None  # 2 s of 39 s are more than 5 %
    now[0] += 2
    later = points.due(5)
    assert later is not None
    points.written(checkpoint(later), seconds=2.0)
    assert [each.name for each in (tmp_path / "recovery").iterdir()] == ["step_000005"]
    # A checkpoint of the run is a restart point, too; one of an earlier start, or beyond what was trained, is not.
    for step in (1, 6, 7, 9):
        checkpoint(tmp_path / "checkpoints" / f"step_{step:06d}")
    assert points.newest(8) == (7, str(tmp_path / "checkpoints" / "step_000007"))
    points.clear()
    assert not (tmp_path / "recovery").exists() and points.newest(5) == (2, "model")


def test_generation_that_was_cut_off_goes_on_with_its_sums(parts: Parts, tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, start_seconds=1.0, stop_seconds=1.0)
    supervisor.repeats = parts.repairs
    events: list[str] = []

    class Buffer:
        def requeue_groups(self, worker: str) -> None:
            events.append(f"requeue {worker}")

    class Weights:
        def restore(self) -> None:
            events.append("restore")

    class Rollout:
        def generate_on(self, step: int, pace: TrainerPace, stop: StopSignal, note: Any) -> None:
            events.append("generate")
            note({"groups": 2.0})
            if len(events) == 1:
                parts.lost["rollout"] = "died"
                raise Unavailable("connection reset")
            note({"groups": 3.0, "dropped": 1.0})

    calls = RolloutCalls(supervisor, Buffer(), Rollout(), Weights(), lambda *_: None, 1.0)  # type: ignore[arg-type]
    sums: list[dict[str, float]] = []
    calls.generate_on(0, TrainerPace(1, 1, 1), StopSignal(), sums.append)
    assert events == ["generate", "requeue rollout", "restore", "generate"]
    assert sums == [{"groups": 2.0}, {"groups": 4.0}, {"groups": 5.0, "dropped": 1.0}]


def test_checkpoints_that_an_earlier_run_left_behind_are_no_restart_points(tmp_path: Path) -> None:
    # Resumed from step 3 with --ckpt-step, where another run went on to step 7.
    own = tmp_path / "checkpoints"
    for step in (3, 5, 7):
        checkpoint(own / f"step_{step:06d}")
    load = str(own / "step_000003")
    points = RestartPoints(tmp_path, first=3, load=load, backend="fsdp", checkpoints=own, interval_seconds=0)
    assert points.newest(8) == (3, load)
    # This run has written its own in the place of one.
    checkpoint(own / "step_000005")
    assert points.newest(8) == (5, str(own / "step_000005"))


class Started:
    """A supervisor of one buffer, with the settings that it is started with again."""

    def __init__(self, settings: BufferSettings) -> None:
        start = Start("slime.buffer.service", settings, RpcSettings(), {})
        self.process = Process("buffer", None, None, "127.0.0.1", start=start)
        self.settings: list[BufferSettings] = []

    def named(self, prefix: str) -> list[Process]:
        return [self.process]

    def end(self, processes: list[Process]) -> None: ...
    def spawn_again(self, processes: list[Process]) -> None: ...

    def start_again(self, processes: list[Process], **changes: Any) -> None:
        assert self.process.start is not None
        self.settings.append(changes.get("settings", self.process.start.settings))


def test_a_buffer_that_is_started_again_needs_no_checkpoint(tmp_path: Path) -> None:
    class Client:
        address = "127.0.0.1:1"

        def is_serving(self, timeout: float) -> bool:
            return True

    # --save-keep has deleted the checkpoint that the run began with.
    started = Started(BufferSettings(buffer_dir=str(tmp_path), data_place=str(tmp_path / "gone" / "data_place.jsonl")))
    restarts = ServiceRestarts(started, Client(), None, None, lambda: None)  # type: ignore[arg-type]
    restarts.start_again({"buffer": "died"})
    assert [(each.buffer_dir, each.data_place) for each in started.settings] == [(str(tmp_path), None)]


def test_tries_of_one_repair_are_bounded_however_long_each_takes() -> None:
    parts = Parts(fails=99)
    # Each try takes longer than the window, as one does that ends by a timeout.
    repairs = Repairs(lambda: dict(parts.lost), parts.start_again, parts.ended.append, RepairLimits(3, 1e-9, 0.01))
    parts.lost["rollout"] = "died"
    repairs.start()
    until(lambda: parts.ended or len(parts.started) > 10)
    repairs.stop()
    assert parts.started == [["rollout"]] * 3 and len(parts.ended) == 1


def test_a_look_that_fails_keeps_no_call_waiting_for_ever() -> None:
    parts = Parts()
    failures = [OSError(24, "Too many open files")] * 3

    def lost() -> dict[str, str]:
        if parts.lost and failures:
            raise failures.pop()
        return dict(parts.lost)

    repairs = Repairs(lost, parts.start_again, parts.ended.append, RepairLimits())
    repairs.start()
    parts.lost["buffer"] = "died"
    until(lambda: not parts.lost)
    repairs.stop()
    assert parts.started == [["buffer"]] and not parts.ended


def test_a_repair_that_the_end_of_the_run_cuts_off_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    begun, ended = threading.Event(), threading.Event()

    def start_again(lost: object) -> None:
        begun.set()
        ended.wait(60)
        raise RuntimeError("cannot schedule new futures after shutdown")

    failures: list[SlimeError] = []
    repairs = Repairs(lambda: {"buffer": "died"}, start_again, failures.append, RepairLimits())
    repairs.start()
    assert begun.wait(60)
    repairs.stop()
    ended.set()
    until(lambda: repairs.count == 1)
    assert not failures and "cannot be started again" not in caplog.text


def test_a_service_that_is_ended_while_it_is_looked_at_is_no_error(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, start_seconds=1.0, stop_seconds=1.0)

    class EndedMeanwhile:
        silent = False

        def look(self) -> None:
            # The repair, in its own thread, has ended it by now.
            process.watched = process.probe = None

    process = Process("rollout", None, None, "127.0.0.1", watched=EndedMeanwhile(), probe=EndedMeanwhile())  # type: ignore[arg-type]
    supervisor._processes.append(process)
    assert supervisor.lost() == {}


def test_a_restart_point_that_was_cut_off_leaves_nothing(tmp_path: Path) -> None:
    def points() -> RestartPoints:
        return RestartPoints(tmp_path, first=-1, load=None, backend="fsdp", checkpoints=None, interval_seconds=0)

    path = points().due(0)
    assert path is not None
    # Killed: the lock of the directory that it writes is gone, the directory is not.
    writing = WholeDirectory(checkpoint(path))
    (writing.partial / "model.safetensors").write_text("weights")
    os.close(writing._handle)
    points().clear()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_lost_while_steps_are_trained_again_is_noticed(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, start_seconds=1.0, stop_seconds=1.0)

    class Stopped:
        silent = False

        def look(self) -> str:
            return "was stopped by a signal"

    rank = Process("trainer-1", None, None, "127.0.0.1", watched=Stopped(), probe=Stopped())  # type: ignore[arg-type]
    supervisor._processes.append(rank)
    ended = threading.Event()
    with pytest.raises(ServiceDied, match="trainer-1 was stopped by a signal"):
        supervisor.call_once([lambda: ended.wait(60)], without=[rank])
    ended.set()


@pytest.mark.parametrize("trainer", [{"no_save_optim": True}, {"ref_update_interval": 4, "use_kl_loss": True}])
def test_samples_that_are_deleted_cannot_be_trained_again(trainer: dict[str, Any]) -> None:
    def reason(release_committed: bool) -> str | None:
        config = run_config.parse(["--hf-checkpoint", "m", "--prompt-data", "p", "--num-rollout", "1"], check=False)
        config = dataclasses.replace(
            config,
            buffer=dataclasses.replace(config.buffer, release_committed=release_committed),
            trainer=dataclasses.replace(config.trainer, **trainer),
        )
        return RunRepairs.reason_against(config, Placement(1))

    assert reason(False) is None
    assert "--release-committed" in str(reason(True))


@pytest.mark.parametrize(
    "more", [["--debug-rollout-only"], ["--no-save-optim"], ["--ref-update-interval", "2", "--use-kl-loss"]]
)
def test_samples_that_are_needed_after_a_commit_are_kept(more: list[str]) -> None:
    words = ["--hf-checkpoint", "m", "--prompt-data", "p", "--num-rollout", "1", *more]
    assert run_config.parse(words, check=False).buffer.release_committed is False
    assert run_config.parse([*words, "--release-committed"], check=False).buffer.release_committed is True
