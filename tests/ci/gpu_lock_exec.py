"""Runs a command on GPUs that no other job holds: locks them, names them in CUDA_VISIBLE_DEVICES, unlocks at its end.

    gpu_lock_exec.py --count 2 -- python tests/gpu/test_x.py        any two: all or none
    gpu_lock_exec.py --devices 0,3 -- python tests/gpu/test_x.py    these, each waited for in turn
    gpu_lock_exec.py --print-only                                   which are free now; nothing is held

A lock is an exclusive flock on a file of each GPU. It ends with this process, however that ends; the command runs in a
session of its own and, on Linux, does not outlive this process.

Exit status: that of the command, 128 + n where signal n ended it or this process; 1 for no GPUs within --timeout,
2 for wrong arguments or lock files that cannot be made, 126 or 127 for a command that cannot be run.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """A signal asked this process to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class NoLock(Exception):
    """A lock file cannot be opened or made."""


class Signals:
    """The first of SIGINT, SIGTERM and SIGHUP that came; more of them change nothing."""

    def __init__(self) -> None:
        self.received: int | None = None
        for signum in STOPPING:
            signal.signal(signum, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = self.received or signum

    def sleep(self, seconds: float) -> None:
        """Raises Stopped as soon as a signal has come."""
        deadline = time.monotonic() + seconds
        while True:
            if self.received is not None:
                raise Stopped(self.received)
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(POLL_SECONDS, left))


class GpuLocks:
    """Locks held by this process. Closing the stack that `held` registers them in gives them back."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def open(self, gpu: int) -> int:
        """The descriptor of a GPU's lock file, which is made if need be, for every user of the machine."""
        path = self.pattern.format(gpu_id=gpu)
        try:
            return self._open(path)
        except OSError as error:
            raise NoLock(f"--lock-path-pattern {self.pattern}: {error}, expected files that can be made") from error

    def _open(self, path: str) -> int:
        try:
            # Without O_CREAT: the kernel may refuse it for a file of another user in a shared directory.
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if os.fstat(descriptor).st_uid == os.getuid():
                os.fchmod(descriptor, 0o666)
            return descriptor

    def take(self, gpu: int, held: ExitStack) -> bool:
        descriptor = self.open(gpu)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        held.callback(os.close, descriptor)
        return True

    def free(self, gpus: Sequence[int]) -> list[int]:
        with ExitStack() as probing:
            return [gpu for gpu in gpus if self.take(gpu, probing)]


def acquire_count(locks: GpuLocks, count: int, total: int, held: ExitStack, wait: Callable[[], None]) -> list[int]:
    """`count` GPUs of 0..total-1, all or none at a time. wait: between tries; raises when it has been long enough."""
    while True:
        with ExitStack() as attempt:
            gpus: list[int] = []
            for gpu in range(total):
                if len(gpus) == count:
                    break
                if locks.take(gpu, attempt):
                    gpus.append(gpu)
            if len(gpus) == count:
                held.push(attempt.pop_all())
                return gpus
        print(f"[gpu_lock_exec] try_acquire_count failed: {len(gpus)} of {count} GPUs are free", flush=True)
        wait()


def acquire_devices(locks: GpuLocks, devices: Sequence[int], held: ExitStack, wait: Callable[[], None]) -> list[int]:
    """Each of `devices` in turn; those that it has, it keeps while it waits for the next."""
    for gpu in devices:
        while not locks.take(gpu, held):
            wait()
    return list(devices)


def patience(signals: Signals, timeout: float, retry_seconds: float) -> Callable[[], None]:
    deadline = time.monotonic() + timeout

    def wait() -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no GPUs within {timeout:g} s")
        # At random, so that jobs which collided once do not collide again.
        signals.sleep(min(left, random.uniform(0, retry_seconds)))

    return wait


def run(command: Sequence[str], environment: dict[str, str], signals: Signals, grace_seconds: float) -> int:
    """The command's exit status, 128 + n where signal n ended it. Raises Stopped after it has ended the command."""
    child = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_end_with_parent(os.getpid()))
    try:
        while (status := child.poll()) is None:
            signals.sleep(POLL_SECONDS)
    except Stopped as stopped:
        _end(child, stopped.signum, grace_seconds)
        raise
    return 128 - status if status < 0 else status


def _end(child: subprocess.Popen[bytes], signum: int, grace_seconds: float) -> None:
    """First the command alone, then its whole session by the signal that came, then by SIGKILL."""
    child.terminate()
    if _gone(child, grace_seconds):
        return
    for signal_number in (signum, signal.SIGKILL):
        _signal_session(child.pid, signal_number)
        if _gone(child, grace_seconds):
            return


def _gone(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Tells if the command and all processes of its session end within that time."""
    deadline = time.monotonic() + seconds
    while True:
        if child.poll() is not None and not _signal_session(child.pid, 0):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)


def _signal_session(group: int, signum: int) -> bool:
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _end_with_parent(parent: int) -> Callable[[], None] | None:
    """In the child before its command: ends with `parent`, whose death would free the GPUs under a running command."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def arrange() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)

    return arrange


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="gpu_lock_exec.py", description=description)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--count", type=int, metavar="N", help="Lock any N GPUs; 0 runs at once")
    which.add_argument("--devices", type=_devices, metavar="0,1", help="Lock these GPUs")
    parser.add_argument("--total-gpus", type=int, default=8, metavar="N", help="GPUs of the machine (default 8)")
    parser.add_argument(
        "--timeout", type=float, default=86400, metavar="SECONDS", help="Seconds to wait for the locks (default: 86400)"
    )
    parser.add_argument(
        "--target-env-name", default="CUDA_VISIBLE_DEVICES", metavar="NAME", help="Environment variable to set"
    )
    parser.add_argument(
        "--lock-path-pattern",
        default=os.environ.get("GPU_LOCK_PATH_PATTERN", "/dev/shm/custom_gpu_lock_{gpu_id}.lock"),
        metavar="PATH",
        help="Lock file of a GPU, with {gpu_id}; default: GPU_LOCK_PATH_PATTERN, or files in /dev/shm",
    )
    parser.add_argument("--print-only", action="store_true", help="Print the free GPUs and end")
    parser.add_argument("--retry-seconds", type=float, default=5.0, help=argparse.SUPPRESS)
    parser.add_argument("--grace-seconds", type=float, default=5.0, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="Command to run, after --")
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    _check(parser, options)
    return options


def _devices(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts) or len(set(map(int, parts))) != len(parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected different numbers of GPUs such as 0,3")
    return [int(part) for part in parts]


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    try:
        differ = options.lock_path_pattern.format(gpu_id=0) != options.lock_path_pattern.format(gpu_id=1)
    except (KeyError, IndexError, ValueError, AttributeError):
        differ = False
    if not differ:
        parser.error(f"--lock-path-pattern {options.lock_path_pattern}: expected {{gpu_id}} in it")
    if options.print_only:
        return
    if options.count is None and options.devices is None:
        parser.error("expected --count N, --devices 0,1 or --print-only")
    if options.count is not None and not 0 <= options.count <= options.total_gpus:
        parser.error(f"--count: got {options.count}, expected 0 to --total-gpus {options.total_gpus}")
    if not options.timeout >= 0:
        parser.error(f"--timeout: got {options.timeout:g}, expected at least 0")
    if not options.target_env_name or "=" in options.target_env_name:
        parser.error(f"--target-env-name: got {options.target_env_name!r}, expected the name of a variable")
    if not options.command:
        parser.error("expected -- and a command")


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    locks = GpuLocks(options.lock_path_pattern)
    if options.print_only:
        try:
            gpus = locks.free(options.devices or range(options.total_gpus))
        except NoLock as error:
            return _complain(error, 2)
        print("Free GPUs: " + ",".join(map(str, gpus)))
        return 0
    signals = Signals()
    wait = patience(signals, options.timeout, options.retry_seconds)
    with ExitStack() as held:
        try:
            if options.devices is not None:
                gpus = acquire_devices(locks, options.devices, held, wait)
            else:
                gpus = acquire_count(locks, options.count, options.total_gpus, held, wait)
            visible = ",".join(map(str, gpus))
            print(f"[gpu_lock_exec] Acquired GPUs: {visible}", flush=True)
            environment = os.environ | {options.target_env_name: visible}
            return run(options.command, environment, signals, options.grace_seconds)
        except Stopped as stopped:
            return 128 + stopped.signum
        except NoLock as error:
            return _complain(error, 2)
        except (TimeoutError, OSError) as error:
            return _complain(error, {FileNotFoundError: 127, PermissionError: 126}.get(type(error), 1))


def _complain(error: Exception, status: int) -> int:
    print(f"[gpu_lock_exec] {type(error).__name__}: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
