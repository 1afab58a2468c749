"""Pauses between the attempts of one repair: a cause that passes by itself, such as a port in use, ends no run."""

from __future__ import annotations

import socket
import threading

from slime.launcher.faults.repairs import RepairLimits, Repairs
from slime.types.errors import PortInUse, SlimeError


def test_a_port_that_is_in_use_for_a_moment_costs_attempts_and_not_the_run() -> None:
    other, service = socket.socket(), socket.socket()
    other.bind(("127.0.0.1", 0))
    other.listen()
    lost, failures = {"buffer": "died"}, list[SlimeError]()
    begun, settled = threading.Event(), threading.Event()

    def start_again(names: object) -> None:
        begun.set()
        try:
            service.bind(other_address)
        except OSError:
            raise PortInUse("port: in use", field="port") from None
        lost.clear()
        settled.set()

    def fail(error: SlimeError) -> None:
        failures.append(error)
        settled.set()

    other_address = other.getsockname()
    repairs = Repairs(lambda: dict(lost), start_again, fail, RepairLimits(most=8, pause_seconds=0.05))
    repairs.start()
    assert begun.wait(60)
    # The port is free again after a while, in which attempts without a pause would all have been made.
    threading.Timer(0.3, other.close).start()
    assert settled.wait(60)
    repairs.stop()
    service.close()
    assert not failures
    assert 1 < repairs.restarts <= 8


def test_the_end_of_a_run_waits_for_no_pause_of_a_repair() -> None:
    tried = threading.Event()

    def start_again(names: object) -> None:
        if tried.is_set():
            raise AssertionError("nothing is started after the end of the run")
        tried.set()
        raise PortInUse("port: in use", field="port")

    failures: list[SlimeError] = []
    repairs = Repairs(lambda: {"buffer": "died"}, start_again, failures.append, RepairLimits(pause_seconds=600.0))
    repairs.start()
    assert tried.wait(60)
    repairs.stop()
    repairs._thread.join(60)
    assert not repairs._thread.is_alive() and not failures
