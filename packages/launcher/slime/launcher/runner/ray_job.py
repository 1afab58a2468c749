"""Starts a Ray head for `ray job submit`, and stops commands with every process that they started.

Processes are stopped by their ids, never by name, so that only processes that were started here are stopped.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from slime.launcher.platform.ray_access import AUTH_MODE, AUTH_TOKEN, loopback_variables
from slime.launcher.platform.secret_variables import shown_command
from slime.launcher.platform.signals import uninterrupted
from slime.types.errors import NotAvailable, PortInUse, SlimeError, Unavailable
from slime.types.scratch import ScratchDirectory

LOOPBACK = "127.0.0.1"
START_SECONDS = 120.0
STOP_SECONDS = 60.0
LOG_LINES = 15
PR_SET_PDEATHSIG = 1


class RunFailed(SlimeError, subprocess.CalledProcessError):
    """A command ended with an exit code other than 0. `cmd` is without secrets, and `str()` without the environment."""

    def __init__(self, what: str, returncode: int, command: Sequence[str]) -> None:
        # SlimeError.__init__ would call CalledProcessError.__init__ with the message alone.
        subprocess.CalledProcessError.__init__(self, returncode, [shown_command(word) for word in command])
        # An exception's repr shows the arguments that it was made with.
        self.args = (what, returncode, self.cmd)
        self.message = f"{what} ended with exit code {returncode}"
        self.field, self.value, self.expected = "exit code", str(returncode), "0"
        self.what = what

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return RunFailed, (self.what, self.returncode, self.cmd)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns this process's environment, with `python3` and `ray` of its interpreter first on the PATH."""
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join([here, *(part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part)])
    return os.environ | {"PATH": path, "RAY_USAGE_STATS_ENABLED": "0"} | dict(extra or {})


def module_path() -> str:
    """Returns a PYTHONPATH with the directories that this process has and a new interpreter would not have."""
    prefixes = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    return os.pathsep.join(
        path for path in sys.path if path and not prefixes.intersection(Path(path).resolve().parents)
    )


@contextmanager
def runtime_env_file(runtime_env: Mapping[str, Any]) -> Iterator[str]:
    """Yields a file for `ray job submit --runtime-env` that only this user can read."""
    with tempfile.NamedTemporaryFile("w", prefix="slime-runtime-env-", suffix=".yaml", encoding="utf-8") as file:
        json.dump(runtime_env, file)  # JSON is YAML, too
        file.flush()
        yield file.name


def run_attached(
    command: Sequence[str],
    what: str,
    extra: Mapping[str, str] | None = None,
    show: Callable[[str], object] | None = None,
) -> None:
    """Runs a command to its end; its output goes to the output of this process, or line by line to `show`.

    An interrupt (Ctrl-C) stops the command, and waits until it has cleaned up. On Linux it is also stopped if this
    process is killed. Raises RunFailed naming `what`.
    """
    # In a session of its own the child gets our signal only, and not a second one from Ctrl-C.
    process = subprocess.Popen(
        list(command),
        env=environment(extra),
        start_new_session=True,
        preexec_fn=_stop_with_parent(os.getpid()),
        stdout=None if show is None else subprocess.PIPE,
        stderr=None if show is None else subprocess.STDOUT,
    )
    try:
        if show is not None and process.stdout is not None:
            for line in process.stdout:
                show(line.decode(errors="replace").rstrip("\n"))
        code = process.wait()
    except BaseException:
        with uninterrupted():
            stop_tree(process)
        raise
    if code:
        raise RunFailed(what, code, command)


def _stop_with_parent(parent: int) -> Callable[[], None] | None:
    """Returns a function for the child to call first, so that it gets SIGTERM when `parent` ends."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)

    def arrange() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    return arrange


def stop_tree(process: subprocess.Popen[bytes], grace: float = STOP_SECONDS) -> None:
    """Ends a child process with SIGTERM, and after `grace` seconds it and all its descendants with SIGKILL."""
    import psutil

    try:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(family, timeout=5)
    for child in left:
        try:
            child.kill()  # psutil compares the start time, so a process that reused the id is safe
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=5)


def listens(host: str, port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(2)
        return client.connect_ex((host, port)) == 0


class RayHead:
    """A Ray cluster of one node that accepts jobs. Use `start` and `stop`, or a `with` block.

    num_gpus: None lets Ray count them. dashboard_port: 0 takes a free one.
    variables: environment variables that `ray job submit` needs besides `url`. inherited: environment variables of the
    processes of all jobs.
    """

    def __init__(
        self,
        num_gpus: int | None = None,
        *,
        host: str = LOOPBACK,
        dashboard_port: int = 0,
        inherited: Mapping[str, str] | None = None,
    ) -> None:
        self.num_gpus = num_gpus
        self.host = host
        self.dashboard_port = dashboard_port
        self._inherited = dict(inherited or {})
        self.variables = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
        # Other users of this machine must not be able to submit jobs.
        if os.environ.get(AUTH_MODE) != "token":
            self.variables |= {AUTH_MODE: "token", AUTH_TOKEN: secrets.token_hex(32)}
        if host == LOOPBACK:
            self.variables |= loopback_variables()
        self._agent_port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: ScratchDirectory | None = None

    def __enter__(self) -> RayHead:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL at which jobs are submitted."""
        return f"http://{LOOPBACK}:{self.dashboard_port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, seconds: float = START_SECONDS) -> None:
        """Starts the head unless it is running, and waits until it accepts jobs.

        On Linux, the head also ends when the thread that called this ends: a process that is killed leaves no Ray
        behind, and the next head of this user removes its directory.

        Raises PortInUse if something listens on `dashboard_port`, Unavailable with the end of the log if Ray does not
        start within `seconds`, and NotAvailable if the packages that jobs need are missing.
        """
        if self.running:
            return
        check_jobs_available()
        if self.dashboard_port and listens(LOOPBACK, self.dashboard_port):
            raise in_use(self.dashboard_port)
        # The path of a Unix socket has at most 107 characters; Ray's are longer below a long TMPDIR.
        self._scratch = ScratchDirectory("slime-ray-", "/tmp" if os.path.isdir("/tmp") else None)
        try:
            # Every user of the machine may enter Ray's directory, so it is put into one that only this user may enter.
            (self._scratch.path / "ray").mkdir()
            command = self._command(self._scratch.path / "ray")
            variables = environment(self._inherited | self.variables)
            variables.pop("RAY_ADDRESS", None)
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    preexec_fn=_stop_with_parent(os.getpid()),
                )  # fmt: skip
            self._wait(time.monotonic() + seconds, seconds)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops the head, if it is running, and every job on it."""
        with uninterrupted():
            if self._process is not None:
                stop_tree(self._process)
                self._process = None
            if self._scratch is not None:
                self._scratch.close()
                self._scratch = None

    @property
    def _log(self) -> Path:
        assert self._scratch is not None, "the head has not been started"
        return self._scratch.path / "head.log"

    def _command(self, directory: Path) -> list[str]:
        with ExitStack() as held:
            # All ports are held until the last one is chosen, so that they differ.
            gcs, dashboard, self._agent_port, client = (_bind(held) for _ in range(4))
        self.dashboard_port = self.dashboard_port or dashboard
        gpus = [] if self.num_gpus is None else ["--num-gpus", str(self.num_gpus)]
        return [
            "ray", "start", "--head", *gpus, "--disable-usage-stats", "--block",
            "--node-ip-address", self.host, "--port", str(gcs),
            "--dashboard-host", LOOPBACK, "--dashboard-port", str(self.dashboard_port),
            "--dashboard-agent-listen-port", str(self._agent_port), "--ray-client-server-port", str(client),
            "--temp-dir", str(directory),
        ]  # fmt: skip

    def _wait(self, deadline: float, seconds: float) -> None:
        assert self._process is not None
        while not self._answers():
            if self._process.poll() is not None:
                raise Unavailable(f"Ray ended while it started{self._last_lines()}", field="ray", expected="a Ray head")
            if time.monotonic() > deadline:
                raise Unavailable(f"Ray did not start in {seconds:g} s{self._last_lines()}", field="ray")
            time.sleep(0.2)

    def _answers(self) -> bool:
        token = environment(self.variables).get("RAY_AUTH_TOKEN")
        # A list of jobs shows that the dashboard accepts jobs.
        request = urllib.request.Request(
            f"{self.url}/api/jobs/", headers={"Authorization": f"Bearer {token}"} if token else {}
        )
        # A proxy cannot reach our loopback interface.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=5):
                pass
        except urllib.error.HTTPError as error:
            # A token in a file is found by Ray itself, and by `ray job submit`.
            if error.code not in (401, 403):
                return False
        except OSError:
            return False
        # The dashboard hands jobs to this agent, and refuses one if the agent does not listen within 10 s.
        return listens(LOOPBACK, self._agent_port)

    def _last_lines(self) -> str:
        return "".join(f"\n    {line}" for line in self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def _bind(held: ExitStack) -> int:
    listener = held.enter_context(socket.socket())
    listener.bind((LOOPBACK, 0))
    return int(listener.getsockname()[1])


def check_jobs_available() -> None:
    """Raises NotAvailable if the packages of ray[default] are missing, without which Ray accepts no jobs."""
    missing = [name for name in ("aiohttp_cors", "opencensus", "virtualenv") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotAvailable.requires("`ray job submit`", f"the package {missing[0]}", "pip install 'ray[default]'")


def in_use(port: int) -> PortInUse:
    return PortInUse(
        f"something that was not started here listens at {LOOPBACK}:{port}, where a Ray head takes jobs. Stop it first "
        "(`ray stop` ends every Ray of this user on this machine), or give the run to it: "
        f"`ray job submit --address=http://{LOOPBACK}:{port} -- slime train ...`",
        field="port", value=port, expected="a free port",
    )  # fmt: skip
