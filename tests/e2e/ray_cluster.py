"""A Ray cluster of several nodes on this machine, each with an address of its own; every port is one that was free."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from kept_ports import kept_port

from tiny_runs import command_line, wait_for

START = 300.0
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
HOSTS = """
import sys
from ray._raylet import GcsClient
nodes = GcsClient(address=sys.argv[1]).get_all_node_info(timeout=60).values()
print(*(node.node_manager_address for node in nodes if node.state == 0))
"""


class RayNode:
    """`ray start`, in a session of its own. host: 127.0.0.N; for 127.0.0.1 Ray takes the address of this machine.

    Of this machine's GPUs it has the one that the cluster has for its host, if any.
    """

    def __init__(self, cluster: RayCluster, host: str, *flags: str) -> None:
        self.host = host
        gpu = cluster.gpus.get(host)
        environment = cluster.environment
        if gpu is not None:
            flags, environment = (*flags, "--num-gpus", "1"), environment | {"CUDA_VISIBLE_DEVICES": gpu}
        self.log = cluster.directory / f"{host}.log"
        command = [
            *RAY, "start", "--block", "--node-ip-address", host, "--num-cpus", "2", "--disable-usage-stats",
            "--object-store-memory", str(100 << 20), "--dashboard-agent-listen-port", str(kept_port()), *flags,
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment,
                cwd=cluster.directory,
            )  # fmt: skip
        wait_for(lambda: "Ray runtime started" in self.output(), START, f"{host}: {self.output()}")

    def output(self) -> str:
        assert self.process.poll() is None, self.log.read_text()
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text())

    def lose(self) -> None:
        """Kills its raylet, as the loss of the machine would; `ray start` ends as soon as it sees that."""
        (raylet,) = [p for p in psutil.Process(self.process.pid).children() if p.name() == "raylet"]
        raylet.kill()
        self.process.wait(START)

    def stop(self) -> None:
        if self.process.poll() is not None:
            return
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for process in psutil.wait_procs(family, timeout=10)[1]:
            process.kill()


class RayCluster:
    """The head, and more nodes; a context manager. environment: of commands that use it.

    gpus: by the host of a node, its GPU: an entry of CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, gpus: Mapping[str, str] | None = None) -> None:
        self.gpus = dict(gpus or {})
        # Names of sockets have at most 107 characters: pytest's directories are too long for Ray's.
        self.directory = Path(tempfile.mkdtemp(prefix="ray-"))
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | token
        self.nodes: list[RayNode] = []

    def __enter__(self) -> RayCluster:
        try:
            head = RayNode(
                self, "127.0.0.1", "--head", "--port", "0", "--dashboard-port", str(kept_port()),
                "--ray-client-server-port", str(kept_port()), "--temp-dir", str(self.directory / "ray"),
            )  # fmt: skip
            self.nodes.append(head)
            self.address = re.search(r"--address='([^']+)'", head.output())[1]
            self.api = re.search(r"RAY_API_SERVER_ADDRESS='([^']+)'", head.output())[1]
        except BaseException:
            self.__exit__()
            raise
        return self

    def ensure(self, host: str) -> RayNode:
        """The node with that address, started anew where it was lost."""
        for node in self.nodes:
            if node.host == host and node.process.poll() is None:
                return node
        # Until Ray misses the one that was lost, a run may still be placed on it.
        wait_for(lambda: host not in self.hosts(), START, f"Ray without the lost node {host}")
        node = RayNode(self, host, "--address", self.address)
        self.nodes.append(node)
        return node

    def hosts(self) -> list[str]:
        """Addresses of the nodes that Ray takes for alive."""
        done = subprocess.run(
            [sys.executable, "-c", HOSTS, self.address],
            env=self.environment, capture_output=True, text=True, timeout=START, check=True,
        )  # fmt: skip
        return done.stdout.split()

    def __exit__(self, *exc_info: object) -> None:
        for node in reversed(self.nodes):
            node.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def command(self, *words: str) -> list[str]:
        """`ray job WORDS`, at this cluster."""
        return [*RAY, "job", words[0], "--address", self.api, *words[1:]]

    def job(self, *words: str) -> str:
        done = subprocess.run(
            self.command(*words), env=self.environment, capture_output=True, text=True, timeout=START, check=False
        )
        return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)

    def ended(self, job: str, seconds: float) -> str:
        """Waits until the job has ended; what it printed, and how it ended."""
        deadline = time.monotonic() + seconds
        while True:
            status = self.job("status", job)
            if re.search(r"failed|succeeded|stopped", status, re.IGNORECASE):
                return self.job("logs", job) + status
            assert time.monotonic() < deadline, self.job("logs", job)
            time.sleep(1)

    def workers(self) -> list[psutil.Process]:
        """The processes of jobs on every node, less Ray's own."""
        found = []
        for node in self.nodes:
            if node.process.poll() is None:
                for process in psutil.Process(node.process.pid).children(recursive=True):
                    words = command_line(process)
                    # The command of Ray's dashboard has sys.path, in which an editable installation is named.
                    if ("ServiceActor" in words or "slime" in words) and "ray.dashboard" not in words:
                        found.append(process)
        return found
