"""Waiting calls, and the changes that wake them."""

from __future__ import annotations

import threading

from slime.buffer.waits import Caller, Waits

WAIT = 20.0


def test_a_call_that_needs_more_changes_sleeps_through_the_others() -> None:
    waits, caller = Waits(4), Caller()
    complete = 0
    attempts: list[int] = []
    waiting = threading.Event()

    def attempt() -> str | None:
        attempts.append(complete)
        caller.changes_needed = 3 - complete
        if len(attempts) == 2:
            waiting.set()
        return "sealed" if complete >= 3 else None

    results: list[str | None] = []
    thread = threading.Thread(target=lambda: results.append(waits.wait("completed", attempt, WAIT, caller)))
    thread.start()
    assert waiting.wait(WAIT)
    for _ in range(3):
        complete += 1
        # Not set by the first two, so the thread cannot have tried again.
        assert not caller.wake_event.is_set()
        waits.wake("completed")
    thread.join(WAIT)
    assert (results, attempts) == (["sealed"], [0, 0, 3])


def test_a_change_that_one_call_does_not_need_yet_wakes_the_next() -> None:
    waits, callers = Waits(4), [Caller(), Caller()]
    entered = [threading.Event(), threading.Event()]
    woken: list[int] = []

    def wait(number: int, changes: int) -> None:
        tries = 0

        def attempt() -> bool | None:
            nonlocal tries
            tries += 1
            callers[number].changes_needed = changes
            if tries == 2:
                entered[number].set()
            elif tries == 3:
                woken.append(number)
                return True
            return None

        waits.wait("completed", attempt, WAIT, callers[number])

    threads = [threading.Thread(target=wait, args=(number, changes)) for number, changes in enumerate((2, 1))]
    for number, thread in enumerate(threads):
        thread.start()
        assert entered[number].wait(WAIT)
    waits.wake("completed")
    threads[1].join(WAIT)
    # The call that leaves wakes the first, which may need what it did not take.
    threads[0].join(WAIT)
    assert woken == [1, 0]
