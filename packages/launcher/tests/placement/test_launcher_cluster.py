"""Places on a real Ray whose GPUs are a number that it was told."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.launcher.config.settings import LauncherSettings
from slime.launcher.placement.plan import ServiceNode
from slime.launcher.placement.reserve import Node, cluster_nodes, place_run
from slime.launcher.platform import ray_cluster as ray_cluster_module
from slime.launcher.platform.ray_cluster import ray_cluster
from slime.launcher.services import actors
from slime.launcher.services.supervisor import Supervisor
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import DeadlineExceeded, InvalidSetting, NotAvailable, Unavailable

ROLLOUT = RolloutSettings(hf_checkpoint="m", rollout_num_gpus=1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("slime.launcher.platform.ray_cluster.visible_gpus", lambda: ["0", "1", "2"])
    with ray_cluster(None, num_cpus=2):
        yield


def processes_of_ray() -> list[str]:
    lines = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            lines.append(" ".join(process.cmdline()))
    return lines


def launcher(**values: Any) -> LauncherSettings:
    return LauncherSettings(num_rollout=1, rollout_num_gpus=1, **values)


def test_a_run_holds_its_gpus_or_says_whose_it_waited_for(gpus: None, tmp_path: Path) -> None:
    # Servers that only clusters use take longest to start.
    assert not [line for line in processes_of_ray() if re.search(r"monitor\.py|dashboard\.py", line)]
    reports: list[str] = []
    placement = place_run(launcher(actor_num_gpus_per_node=2), ROLLOUT, reports.append)
    assert reports == [] and [node.free for node in cluster_nodes()] == [0]
    assert {node.host for node in placement.service_nodes.values()} == {ServiceNode.host}
    supervisor = Supervisor(tmp_path, start_seconds=300, stop_seconds=10, nodes=placement.service_nodes)
    try:
        processes = [
            supervisor.spawn(name, options)
            for name, options in [
                *((f"trainer-{rank}", placement.trainer) for rank in range(2)),
                ("rollout", placement.rollout),
            ]
        ]
        for process in processes:
            supervisor.get(process, process.actor.ping.remote())
    finally:
        supervisor.stop()

    with pytest.raises(DeadlineExceeded, match=r"no GPUs within 0.2 s .*: 2 requested, 0 of 3 free"):
        place_run(launcher(actor_num_gpus_per_node=1, start_timeout_seconds=0.2), ROLLOUT, reports.append)
    assert len(reports) == 1 and "waiting for GPUs" in reports[0]
    with pytest.raises(InvalidSetting, match="3 .* = 4 GPUs, but the node has 3"):
        place_run(launcher(actor_num_gpus_per_node=3), ROLLOUT, reports.append)


@pytest.mark.parametrize(
    "colocate, bundles, where",
    [
        (False, [(0, 2), (1, 4), (2, 4)], {"trainer-0": 0, "trainer-1": 0, "engines-0": 1, "engines-1": 2}),
        (True, [(0, 2), (1, 2)], {"trainer-0": 0, "trainer-1": 0, "trainer-2": 1, "trainer-3": 1}),
    ],
)
def test_each_service_holds_what_it_has_on_its_own_node(
    colocate: bool, bundles: list[tuple[int, int]], where: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [f"{number + 1:056x}" for number in range(3)]

    class Group:
        def __init__(self, held: list[dict[str, float]], strategy: str, bundle_label_selector: list[dict]) -> None:
            self.bundles = [
                (ids.index(label["ray.io/node-id"]), int(bundle["GPU"]))
                for label, bundle in zip(bundle_label_selector, held, strict=True)
            ]

        def wait(self, seconds: float) -> bool:
            return True

    monkeypatch.setattr(import_module("ray.util.placement_group"), "placement_group", Group)
    nodes = [Node(id, f"192.0.2.{number}", 4, 4) for number, id in enumerate(ids)]
    monkeypatch.setattr("slime.launcher.placement.reserve.cluster_nodes", lambda: nodes)
    settings = LauncherSettings(
        num_rollout=1, actor_num_gpus_per_node=2, actor_num_nodes=2 if colocate else 1, colocate=colocate
    )
    rollout = RolloutSettings(hf_checkpoint="m", colocate=colocate, rollout_num_gpus=None if colocate else 8)
    placement = place_run(settings, rollout, lambda text: None)
    strategies = {name: node.options["scheduling_strategy"] for name, node in placement.service_nodes.items()}
    held = {name: s for name, s in strategies.items() if hasattr(s, "placement_group")}
    assert {name: s.placement_group_bundle_index for name, s in held.items()} == where
    assert next(iter(held.values())).placement_group.bundles == bundles
    hosts = {"engines-0": 0, "engines-1": 1} if colocate else {"engines-0": 1, "engines-1": 2}
    for name, number in {"rollout": hosts["engines-0"], **hosts}.items():
        assert placement.service_nodes[name].host == f"192.0.2.{number}"
        assert name in held or strategies[name].node_id == ids[number]


def test_a_ray_of_this_run_leaves_no_token_that_other_clusters_would_ask_for(tmp_path: Path) -> None:
    script = """if True:
        import os, ray
        from slime.launcher.platform.ray_cluster import ray_cluster
        before = dict(os.environ)
        for start in range(2):
            with ray_cluster(None, num_cpus=1):
                print("worked", ray.get(ray.remote(lambda: 6 * 7).remote()), flush=True)
        print(sorted(set(os.environ.items()) - set(before.items())))
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.count("worked 42") == 2, done.stderr
    assert "RAY_AUTH" not in done.stdout
    assert not (tmp_path / ".ray" / "auth_token").exists()


def test_a_ray_that_does_not_start_is_named_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def time_out(**options: Any) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]))
        raise Exception("The current node timed out during startup.\nand much more")

    monkeypatch.setattr("ray.init", time_out)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    message = r"Ray did not start on this machine: The current node timed out during startup\. \(load "
    with pytest.raises(Unavailable, match=message) as told, ray_cluster(None):
        pass
    assert "--ray-address auto" in str(told.value) and "more" not in str(told.value)
    assert len(started) == 1 and not any(psutil.pid_exists(process.pid) for process in started)


def test_ray_is_given_the_time_that_a_busy_machine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    answers = iter([False, False, True])
    monkeypatch.setattr(ray_cluster_module, "_has_nodes", lambda address: next(answers))
    monkeypatch.setattr(services, "get_node", lambda *arguments: " ".join(arguments))
    monkeypatch.setattr(ray_cluster_module, "LOOK_SECONDS", 0)
    look_up = services.get_node
    monkeypatch.setattr(ray_cluster_module, "_raylets", lambda: [psutil.Process()])
    with ray_cluster_module._patient(time.monotonic() + 60):
        assert services.get_node("gcs", "node") == "gcs node"
    assert services.get_node is look_up and next(answers, None) is None
    # Ray reports a process that is missing by then.
    with ray_cluster_module._patient(time.monotonic() - 1):
        assert services.get_node("gcs", "node") == "gcs node"


def test_a_raylet_that_ends_while_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    has_nodes, killed = ray_cluster_module._has_nodes, []

    def kill_the_first(address: str) -> bool:
        if killed:
            return has_nodes(address)
        killed.extend(ray_cluster_module._raylets())
        killed[0].kill()
        return False

    monkeypatch.setattr(ray_cluster_module, "_has_nodes", kill_the_first)
    with ray_cluster(None, num_cpus=1):
        assert len(cluster_nodes()) == 1 and killed[0] not in ray_cluster_module._raylets()
    assert "Ray did not start (its raylet ended, load " in caplog.text


def test_a_start_that_is_told_to_end_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def hang(**options: Any) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]))
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait(60)

    monkeypatch.setattr("ray.init", hang)
    monkeypatch.setattr("slime.launcher.platform.ray_cluster.PATIENCE_SECONDS", 0.01)
    # Where this thread is slow to answer the last resort comes beside it; it would end the tests.
    monkeypatch.setattr("slime.launcher.platform.ray_cluster._leave", lambda signum: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(KeyboardInterrupt), ray_cluster(None):
        pass
    assert len(started) == 1 and not psutil.pid_exists(started[0].pid)


def test_a_signal_that_comes_when_ray_has_set_its_own_handlers_ends_a_start() -> None:
    script = """if True:
        import os, signal
        from ray import _raylet
        from slime.launcher.platform.ray_cluster import ray_cluster
        from slime.launcher.platform.signals import Terminated, terminate_as_interrupt
        connect = _raylet.CoreWorker
        def connect_and_be_told_to_end(*args):
            worker = connect(*args)
            os.kill(os.getpid(), signal.SIGTERM)
            return worker
        _raylet.CoreWorker = connect_and_be_told_to_end
        try:
            with terminate_as_interrupt(), ray_cluster(None, num_cpus=1):
                print("started")
        except Terminated:
            print("terminated, to be aborted in", signal.alarm(0), "s")  # by Ray's handler; 0 for never
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "terminated, to be aborted in 0 s\n"), done.stderr


def test_a_cluster_that_is_not_there_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster\nand much more")

    monkeypatch.setattr("ray.init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"--ray-address {there}: .*Failed to connect"), ray_cluster(there):
            pass
    with pytest.raises(Unavailable, match=f"--ray-address {there}: .*refused"), ray_cluster(there):
        pass
    for wrong in ("there", "there:port", "there:70000"):
        with (
            pytest.raises(InvalidSetting, match=f"--ray-address must be HOST:PORT.*got '{wrong}'"),
            ray_cluster(wrong),
        ):
            pass
    with pytest.raises(NotAvailable, match="ray job submit"), ray_cluster("ray://there:10001"):
        pass


def test_the_interface_of_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Address:
        def __init__(self, address: str) -> None:
            self.address = address

    interfaces = {"lo": [Address("127.0.0.1")], "net0": [Address("fe80::1%net0"), Address("192.0.2.7")]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: interfaces)
    assert actors.interface_of("192.0.2.7") == "net0" and actors.interface_of("192.0.2.8") is None
    assert actors.interface_of("127.0.0.1") == actors.interface_of("127.0.0.2") == "lo"
