"""The doctor's checks of versions, GPUs, ports, Ray and disks."""

from __future__ import annotations

import socket
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
from launcher_machines import CONFIG, GIB, make_well, write_model, write_rows

from slime.launcher.doctor import versions
from slime.launcher.doctor.command import CHECKS, examine
from slime.launcher.doctor.finding import Finding
from slime.launcher.platform import probes

H200 = {
    "torch": "2.11.0+cu130", "sglang": "0.5.17", "sglang-kernel": "0.4.5", "transformers": "5.12.1",
    "tokenizers": "0.22.2", "megatron-core": "0.16.1", "mbridge": "0.15.1", "ray": "2.60.0",
    "flashinfer-python": "0.6.15.post1", "xgrammar": "0.2.1", "torch-memory-saver": "0.0.10", "grpcio": "1.80.0",
    "protobuf": "6.33.1", "numpy": "2.3.0", "pyyaml": "6.0", "pyarrow": "20.0", "safetensors": "0.6",
}  # fmt: skip


def look(check: str, *words: str) -> list[Finding]:
    return [f for f in examine(words, 60, {check: CHECKS[check]}) if f.check == check]


def lines(check: str, status: str, *words: str) -> list[str]:
    return [f.line() for f in look(check, *words) if f.status == status]


def test_every_combination_of_the_table_fits_by_its_own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    for combination in versions.table()["combinations"]:
        installed = H200 | {name: str(version) for name, version in combination["packages"].items()}
        if not combination.get("gpu"):
            installed = {name: v for name, v in installed.items() if name not in ("sglang", "sglang-kernel")}
        make_well(monkeypatch, package_version=installed.get, python_version=lambda c=combination: f"{c['python']}.1")
        found = look("versions")
        assert {f.status for f in found} == {"ok"}, [f.line() for f in found if f.status != "ok"]
        assert combination["name"] in found[-1].what


def test_the_table_asks_for_no_less_than_the_packages_do() -> None:
    """The doctor knows the bounds of packages/*/pyproject.toml."""
    import tomllib

    from packaging.requirements import Requirement

    rows = versions.table()["packages"]
    seen = set()
    for file in Path(versions.__file__).parents[4].glob("*/pyproject.toml"):
        for text in tomllib.loads(file.read_text())["project"]["dependencies"]:
            requirement = Requirement(text)
            row = rows.get(requirement.name)
            if row is not None and requirement.specifier:
                seen.add(requirement.name)
                assert str(row["minimum"]) in str(requirement.specifier), (file, text)
    if not seen:
        pytest.skip("installed without the projects' files")


def test_the_table_has_what_the_tests_run_with() -> None:
    pins = Path(versions.__file__).parents[5] / "constraints.txt"
    if not pins.is_file():
        pytest.skip("installed without the repository")
    pinned = dict(line.split("==") for line in pins.read_text().splitlines() if "==" in line and line[0] != "#")
    (combination,) = (c for c in versions.table()["combinations"] if not c.get("gpu"))
    assert {name: pinned[name] for name in combination["packages"]} == combination["packages"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"torch": "2.13.0"}, "sglang 0.5.17 and torch 2.13.0 do not fit together"),
        ({"sglang": "0.5.18"}, "sglang 0.5.18 and torch 2.11.0+cu130 do not fit together"),
        ({"transformers": "5.17.0"}, "sglang 0.5.17 and transformers 5.17.0 do not fit together"),
        ({"protobuf": "5.29.0"}, "protobuf 5.29.0, for the services' messages, is not >=6.30,<8"),
        ({"grpcio": None}, "grpcio is not installed"),
    ],
)
def test_versions_that_do_not_fit_fail(
    changes: dict[str, str | None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_well(monkeypatch, package_version=(H200 | changes).get, python_version=lambda: "3.12.3")
    failed = lines("versions", "FAIL")
    assert len(failed) == 1 and words in failed[0] and " -> " in failed[0], failed


def test_what_a_run_does_not_use_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {name: version for name, version in H200.items() if name not in ("sglang", "megatron-core")}
    make_well(monkeypatch, package_version=installed.get, python_version=lambda: "3.12.3")
    assert lines("versions", "FAIL") == []
    (failed,) = lines("versions", "FAIL", "--train-backend", "megatron")
    assert "megatron-core is not installed" in failed and "pip install 'megatron-core>=0.16.1,<0.17'" in failed
    (failed,) = lines("versions", "FAIL", "--rollout-engine", "sglang")
    assert "sglang is not installed" in failed


def test_a_mix_that_nobody_tried_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {name: version for name, version in H200.items() if name != "sglang"} | {"torch": "2.12.0"}
    make_well(monkeypatch, package_version=installed.get, python_version=lambda: "3.12.3")
    (warned,) = lines("versions", "warn")
    assert "were not tested together" in warned and "torch 2.13.0 (here 2.12.0)" in warned


def gpus(*free: float, total: float = 80) -> list[probes.Gpu]:
    return [probes.Gpu(str(n), "NVIDIA H100", int(total * GIB), int(each * GIB)) for n, each in enumerate(free)]


def test_gpus_are_named_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    make_well(monkeypatch, gpus=lambda: gpus(79.5, 40), torch_sees_gpus=lambda: True)
    found = look("gpus")
    assert [f.status for f in found] == ["ok", "warn"] and "nvidia-smi" in found[1].todo
    make_well(monkeypatch, gpus=lambda: gpus(79.5), torch_sees_gpus=lambda: False, visible_devices=lambda: "0,7")
    failed = lines("gpus", "FAIL")
    assert len(failed) == 2 and "names 2 GPUs, 1 are there" in failed[0] and "torch sees none" in failed[1]
    make_well(monkeypatch, gpus=lambda: [probes.Gpu("0", "unknown", -1, -1)], torch_sees_gpus=lambda: True)
    assert "does not answer" in lines("gpus", "FAIL")[0]


def run_words(tmp_path: Path, **config: int) -> list[str]:
    model = tmp_path / "model"
    if not model.exists():
        write_model(model, CONFIG | config)
    return ["--hf-checkpoint", str(model), "--prompt-data", str(write_rows(tmp_path / "p.jsonl")), "--num-rollout", "4",
            "--rm-type", "math", "--label-key", "label"]  # fmt: skip


def test_gpus_are_held_against_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_well(monkeypatch, gpus=lambda: gpus(80, 80), torch_sees_gpus=lambda: True)
    words = run_words(tmp_path)
    assert lines("gpus", "FAIL", *words) == []
    (failed,) = lines("gpus", "FAIL", *words, "--actor-num-gpus-per-node", "2")
    assert "= 3 GPUs, but the node has 2" in failed
    small = 0.5
    make_well(monkeypatch, gpus=lambda: gpus(small, small, total=small), torch_sees_gpus=lambda: True)
    (failed,) = lines("gpus", "FAIL", *words)
    assert "training takes about 1.0 of 0.5 GiB" in failed and "--dry-run" in failed


def test_fp8_fails_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_well(monkeypatch)
    words = [*run_words(tmp_path), "--train-backend", "megatron", "--bf16"]
    assert lines("gpus", "FAIL", *words) == []
    fp8 = ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
    (failed,) = lines("gpus", "FAIL", *words, *fp8)
    assert "--fp8-format hybrid requires a GPU" in failed
    make_well(monkeypatch, gpus=lambda: gpus(80, 80), torch_sees_gpus=lambda: True)
    assert lines("gpus", "FAIL", *words, *fp8) == []


def test_memory_is_held_against_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_well(monkeypatch, memory_available=lambda: 4 * GIB + (1 << 28))
    words = run_words(tmp_path)
    assert lines("limits", "FAIL", *words) == []
    (failed,) = lines("limits", "FAIL", *words, "--actor-num-gpus-per-node", "2")
    assert "memory: 4.2 GiB available, 5.0 needed (2 trainer ranks, 1 engine" in failed


def test_a_disk_too_small_for_the_checkpoints_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*run_words(tmp_path), "--save-interval", "1", "--save", str(tmp_path / "saves")]
    one = 12 * 4_976
    make_well(monkeypatch, disk_free=lambda directory: (tmp_path, 2 * GIB))
    assert lines("disk", "FAIL", *words) == [] and lines("disk", "warn", *words) == []
    make_well(monkeypatch, disk_free=lambda directory: (tmp_path, 3 * one))
    (warned,) = lines("disk", "warn", *words)
    assert "--save" in warned and "the run keeps 4 checkpoints" in warned and "--save-keep" in warned
    assert lines("disk", "warn", *words, "--save-keep", "1") == []
    make_well(monkeypatch, disk_free=lambda directory: (tmp_path, one - 1))
    failed = [line for line in lines("disk", "FAIL", *words) if "--save " in line]
    assert len(failed) == 1 and "a checkpoint takes" in failed[0] and "weights and optimizer: 12 x" in failed[0]


def test_a_directory_that_is_a_file_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = probes.disk_free
    make_well(monkeypatch)
    monkeypatch.setattr(probes, "disk_free", real)
    file = tmp_path / "file"
    file.write_text("")
    (failed,) = lines("disk", "FAIL", "--output-dir", str(file / "runs"))
    assert f"{file} is not a directory" in failed


def test_a_port_that_is_taken_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not probes.port_is_free(port) and probes.answers("127.0.0.1", port)
    assert probes.port_is_free(port) and not probes.answers("127.0.0.1", port, 0.5)
    assert probes.free_ports(3) == 3


def test_ports_of_ray_that_others_hold_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    make_well(monkeypatch, port_is_free=lambda port: port != 6379, answers=lambda host, port: True)
    (warned,) = lines("ports", "warn")
    assert "port 6379 of `ray start --head` is in use" in warned and "--port N" in warned
    make_well(monkeypatch, port_is_free=lambda port: False, local_ray_address=lambda: "10.0.0.1:6379")
    assert lines("ports", "warn") == []


def test_addresses_that_a_run_calls_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    make_well(monkeypatch, answers=lambda host, port: port == 1)
    words = ["--rollout-external-engine-addrs", "there:1", "there:2", "--rm-url", "http://judge/score"]
    failed = lines("ports", "FAIL", *words)
    assert len(failed) == 2 and "there:2: no server answers" in failed[0] and "judge:80" in failed[1]


@pytest.mark.parametrize(
    "address, local, alive, status, words",
    [
        (None, None, False, "ok", "starts one of its own"),
        (None, "10.0.0.1:6379", True, "ok", "beside it"),
        (None, "10.0.0.1:6379", False, "warn", "was left behind"),
        ("auto", None, False, "FAIL", "no Ray was started"),
        ("auto", "10.0.0.1:6379", False, "FAIL", "does not answer"),
        ("auto", "10.0.0.1:6379", True, "ok", "Ray answers at 10.0.0.1:6379"),
        ("10.0.0.9:6379", None, False, "FAIL", "--ray-address 10.0.0.9:6379: no server answers"),
        ("10.0.0.9:6379", None, True, "ok", "a server listens"),
        ("nonsense", None, True, "FAIL", "no server answers"),
    ],
)
def test_ray_is_looked_for_where_the_run_would(
    address: str | None, local: str | None, alive: bool, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = set() if local is None else {local}
    here = {"local_ray_address": lambda: local, "own_ray_addresses": lambda: own}
    make_well(monkeypatch, **here, answers=lambda host, port: alive)
    (found,) = look("ray", *(["--ray-address", address] if address else []))
    assert found.status == status and words in found.what


def test_a_ray_that_another_user_may_run_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    make_well(monkeypatch, local_ray_address=lambda: "10.0.0.1:6379")
    (found,) = look("ray", "--ray-address", "auto")
    assert found.status == "FAIL" and "another user runs it" in found.what


def test_several_nodes_need_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    make_well(monkeypatch)
    (failed,) = lines("ray", "FAIL", "--actor-num-nodes", "2")
    assert "--actor-num-nodes 2: no Ray cluster" in failed


def test_shared_memory_is_missed_on_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    make_well(monkeypatch, shared_memory=lambda: None)
    (warned,) = lines("limits", "warn")
    assert "there is no /dev/shm" in warned
    make_well(monkeypatch, shared_memory=lambda: None, on_linux=lambda: False)
    assert lines("limits", "warn") == []


def test_the_driver_is_asked_for_names_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        """Answers as libnvidia-ml does: 0 for success, results in what is passed by reference."""

        def nvmlInit_v2(self) -> int:
            return 0

        nvmlShutdown = nvmlInit_v2

        def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
            return int(index > 1)

        def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
            return 0

        def nvmlDeviceGetName(self, handle: Any, model: Any, length: int) -> int:
            model.value = b"NVIDIA H200"
            return 0

        def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
            memory._obj.total, memory._obj.free = 141 * GIB, 140 * GIB
            return 0

    monkeypatch.setattr(probes, "visible_gpus", lambda: ["1", "GPU-5a", "7"])
    monkeypatch.setattr(probes.ctypes, "CDLL", lambda name: Driver())
    known = probes.Gpu("1", "NVIDIA H200", 141 * GIB, 140 * GIB)
    assert probes.gpus() == [known, probes.Gpu("GPU-5a", *astuple(known)[1:]), probes.Gpu("7", "unknown", -1, -1)]
