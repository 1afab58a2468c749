"""GPU locks, with real processes: that end, fail, hang, and are killed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("gpu_lock_exec.py")
DEADLINE = 30.0
SHOW = 'import os; print("child sees", repr(os.environ["CUDA_VISIBLE_DEVICES"]))'
# Says that it runs, then waits for a signal for ever.
HANG = 'import signal; print("hanging", flush=True); signal.pause()'
STUBBORN = (
    "import signal; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; " + HANG + "\nwhile 1: signal.pause()"
)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    return str(tmp_path / "gpu_{gpu_id}.lock")


@pytest.fixture
def start(pattern: str) -> Iterator[Start]:
    """start(flags..., code=CODE): the program over lock files of this test; what is left of it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*flags: str, code: str | None = SHOW, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, str(PROGRAM), "--lock-path-pattern", pattern, "--retry-seconds", "0.05", *flags]
        command += ["--", sys.executable, "-c", code] if code is not None else []
        process = subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | (environment or {})
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=DEADLINE)


def result(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=DEADLINE)
    return process.returncode, stdout, stderr


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"it ended without {text!r}: {result(process)}")


class Held:
    """GPUs locked by this test."""

    def __init__(self, pattern: str, *gpus: int) -> None:
        self.files = [open(pattern.format(gpu_id=gpu), "w") for gpu in gpus]  # noqa: SIM115
        for file in self.files:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        for file in self.files:
            file.close()


def is_free(pattern: str, gpu: int) -> bool:
    try:
        Held(pattern, gpu).release()
    except BlockingIOError:
        return False
    return True


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_the_command_sees_the_gpus_it_got(start: Start, pattern: str) -> None:
    held = Held(pattern, 0, 2)
    code, stdout, _ = result(start("--count", "2", "--total-gpus", "4"))
    assert code == 0 and stdout == "[gpu_lock_exec] Acquired GPUs: 1,3\nchild sees '1,3'\n"
    held.release()
    code, stdout, _ = result(
        start("--devices", "3,1", "--target-env-name", "MINE", code='import os; print(os.environ["MINE"])')
    )
    assert code == 0 and stdout.splitlines()[-1] == "3,1"


def test_all_or_nothing(start: Start, pattern: str) -> None:
    held = Held(pattern, 1)
    process = start("--count", "2", "--total-gpus", "2")
    read_until(process, "try_acquire_count failed")
    # Between its tries it gives back a lock that it had for a moment.
    wait_for(lambda: is_free(pattern, 0))
    held.release()
    read_until(process, "child sees '0,1'")
    assert result(process)[0] == 0


def test_two_that_want_all_run_one_after_the_other(start: Start, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    code = f"import os; p = {str(marks)!r}; os.close(os.open(p, os.O_CREAT | os.O_EXCL)); os.unlink(p)"
    processes = [start("--count", "2", "--total-gpus", "2", code=code) for _ in range(4)]
    assert [result(process)[0] for process in processes] == [0, 0, 0, 0]


def test_no_gpus_needed_runs_at_once(start: Start, pattern: str) -> None:
    Held(pattern, 0)
    code, stdout, _ = result(start("--count", "0", "--total-gpus", "1", "--timeout", "0"))
    assert code == 0 and "child sees ''" in stdout


def test_devices_that_it_has_it_keeps_while_it_waits(start: Start, pattern: str) -> None:
    held = Held(pattern, 1)
    process = start("--devices", "0,1")
    wait_for(lambda: not is_free(pattern, 0))
    held.release()
    read_until(process, "child sees '0,1'")
    assert result(process)[0] == 0 and is_free(pattern, 0)


@pytest.mark.parametrize("flags", [("--count", "1", "--total-gpus", "1"), ("--devices", "0")])
def test_no_gpus_in_time(start: Start, pattern: str, flags: tuple[str, ...]) -> None:
    held = Held(pattern, 0)
    code, stdout, stderr = result(start(*flags, "--timeout", "0.2"))
    assert code == 1 and "TimeoutError" in stderr and "child" not in stdout
    held.release()


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137), ("1/0", 1)]
)
def test_the_status_is_the_commands(start: Start, pattern: str, code: str, status: int) -> None:
    assert result(start("--count", "1", code=code))[0] == status
    assert is_free(pattern, 0)


def test_a_command_that_does_not_exist(start: Start, pattern: str) -> None:
    code, _, stderr = result(start("--count", "1", "--", "no-such-command", code=None))
    assert code == 127 and "no-such-command" in stderr and is_free(pattern, 0)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_first(start: Start, pattern: str, signum: int) -> None:
    process = start("--count", "1", code=f"import os; print('pid', os.getpid(), flush=True); {HANG}")
    pid = int(read_until(process, "pid").split()[1])
    read_until(process, "hanging")
    assert os.getsid(pid) == pid != os.getsid(process.pid)
    process.send_signal(signum)
    assert result(process)[0] == 128 + signum
    assert not lives(pid) and is_free(pattern, 0)


def test_what_ignores_signals_is_killed_with_all_that_it_started(start: Start) -> None:
    family = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], stdout=subprocess.PIPE)\n"
        f"child.stdout.readline(); print('pid', child.pid, flush=True)\n{STUBBORN}"
    )
    process = start("--count", "1", "--grace-seconds", "0.1", code=family)
    pid = int(read_until(process, "pid").split()[1])
    read_until(process, "hanging")
    process.terminate()
    process.terminate()
    assert result(process)[0] == 128 + signal.SIGTERM
    wait_for(lambda: not lives(pid))


def test_a_signal_while_it_waits(start: Start, pattern: str) -> None:
    held = Held(pattern, 0)
    process = start("--count", "1", "--total-gpus", "1", "--retry-seconds", "600")
    read_until(process, "failed")
    process.terminate()
    assert result(process)[0] == 128 + signal.SIGTERM
    held.release()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the command lives on")
def test_killed_it_takes_the_command_with_it_and_frees_the_gpu(start: Start, pattern: str) -> None:
    process = start("--count", "1", code=f"import os; print('pid', os.getpid(), flush=True); {HANG}")
    pid = int(read_until(process, "pid").split()[1])
    process.kill()
    assert result(process)[0] == -signal.SIGKILL
    wait_for(lambda: not lives(pid))
    assert is_free(pattern, 0)


def test_print_only_holds_nothing(start: Start, pattern: str) -> None:
    held = Held(pattern, 1)
    code, stdout, _ = result(start("--print-only", "--total-gpus", "4", code=None))
    assert (code, stdout) == (0, "Free GPUs: 0,2,3\n")
    assert result(start("--print-only", "--devices", "1,2", code=None))[1] == "Free GPUs: 2\n"
    held.release()
    assert all(is_free(pattern, gpu) for gpu in range(4))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--count N, --devices 0,1 or --print-only"),
        (("--count", "9"), "expected 0 to --total-gpus 8"),
        (("--count", "-1"), "--count: got -1"),
        (("--count", "1", "--timeout", "nan"), "--timeout: got nan"),
        (("--count", "1", "--target-env-name", "A=B"), "--target-env-name: got 'A=B'"),
        (("--count", "1", "--lock-path-pattern", "/dev/shm/{gpu_id.x}"), "expected {gpu_id} in it"),
        (("--count", "1", "--devices", "0"), "not allowed with"),
        (("--devices", "0,0"), "--devices: got '0,0', expected different numbers"),
        (("--devices", "a"), "--devices: got 'a', expected"),
        (("--count", "1", "--lock-path-pattern", "/no/such/place/{gpu_id}"), "--lock-path-pattern /no/such/place/"),
        (("--count", "1", "--lock-path-pattern", "/dev/shm/one.lock"), "{gpu_id}"),
        (("--count", "1", "--lock-path-pattern", "/dev/shm/{other}.lock"), "{gpu_id}"),
    ],
)
def test_wrong_arguments_are_said_at_once(start: Start, flags: tuple[str, ...], said: str) -> None:
    code, stdout, stderr = result(start(*flags))
    assert code == 2 and said in stderr and not stdout


def test_a_missing_command(start: Start) -> None:
    code, _, stderr = result(start("--count", "1", code=None))
    assert code == 2 and "a command" in stderr
