"""Directories that conversions write: kept, replaced, shared by processes, and whole however a conversion ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from converters_tiny import QWEN3, all_files, hf_directory, names
from safetensors.torch import save_file

from slime.converters.cli import main
from slime.converters.convert import hf_to_hf, hf_to_torch_dist, torch_dist_to_hf
from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.converters.inspection.verify import compare
from slime.converters.torch_dist import writer
from slime.converters.torch_dist.reader import TorchDist
from slime.types.directories import WholeDirectory, whole_directory
from slime.types.errors import InvalidSetting, MissingFile, NotAvailable, OutOfSpace

NUM_GPUS = 0


def test_a_directory_of_a_lora_adapter_is_no_model(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf")
    for file in source.glob("*.safetensors*"):
        file.unlink()
    save_file({"base_model.model.a.lora_A.weight": torch.zeros(1, 1)}, source / "adapter_model.safetensors")
    with pytest.raises(NotAvailable, match="as a model is not supported yet: it holds a LoRA adapter"):
        hf_to_hf.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_was_made_of_the_same_files_is_kept(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf")
    notes: list[str] = []

    def run(**options: Any) -> None:
        hf_to_torch_dist.convert(source, tmp_path / "td", progress=notes.append, **options)
        torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back", progress=notes.append, **options)

    run()
    before = {path: path.stat().st_mtime_ns for path in all_files(tmp_path / "td")}
    (tmp_path / "td" / "latest_checkpointed_iteration.txt").unlink()
    notes.clear()
    hf_to_torch_dist.convert(source, tmp_path / "td")
    run()
    assert [note.endswith("kept") for note in notes] == [True, True]
    assert {path: path.stat().st_mtime_ns for path in before if path.name.startswith("__")}.items() <= before.items()

    (source / "config.json").write_text(json.dumps(QWEN3))
    with pytest.raises(InvalidSetting, match="--overwrite"):
        run()
    run(overwrite=True)
    run()
    with pytest.raises(InvalidSetting, match="other flags"):
        run(dtype="float32")


@pytest.mark.parametrize("name", ["common.pt", "metadata.json", "hf/config.json", ".metadata"])
def test_a_conversion_that_lost_a_file_is_not_kept(tmp_path: Path, name: str) -> None:
    source = hf_directory(tmp_path / "hf")
    directory = hf_to_torch_dist.convert(source, tmp_path / "td")
    back = torch_dist_to_hf.convert(directory, tmp_path / "back")
    (directory / name).unlink()
    with pytest.raises(InvalidSetting, match=rf"damaged.*{name}.*--overwrite"):
        hf_to_torch_dist.convert(source, tmp_path / "td")
    hf_to_torch_dist.convert(source, tmp_path / "td", overwrite=True)
    torch_dist_to_hf.convert(directory, back, overwrite=True)
    (back / "config.json").unlink()
    with pytest.raises(InvalidSetting, match=r"damaged.*config\.json.*--overwrite"):
        torch_dist_to_hf.convert(directory, back)


def test_directories_of_others_are_never_replaced(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf")
    run = tmp_path / "run"
    (run / "iter_0000004").mkdir(parents=True)
    with pytest.raises(InvalidSetting, match=r"checkpoints of a run \(iter_0000004\)"):
        hf_to_torch_dist.convert(source, run, overwrite=True)
    hf_to_torch_dist.convert(source, tmp_path / "td")
    with pytest.raises(InvalidSetting, match="did not write"):
        torch_dist_to_hf.convert(tmp_path / "td", source, overwrite=True)
    with pytest.raises(InvalidSetting, match="something else"):
        hf_to_torch_dist.convert(source, tmp_path / "hf", overwrite=True)


# Memory of a process of its own.
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


KILL = """
import os, signal, sys
from slime.converters.convert import hf_to_torch_dist, torch_dist_to_hf
from slime.converters.files.hf_writer import HfFiles
from slime.converters.torch_dist.writer import ChunkFile

def dying(function):
    calls = []
    def call(*arguments, **options):
        calls.append(1)
        if len(calls) == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

ChunkFile.fill, HfFiles.write = dying(ChunkFile.fill), dying(HfFiles.write)
module = {"there": hf_to_torch_dist, "back": torch_dist_to_hf}[sys.argv[1]]
module.convert(sys.argv[2], sys.argv[3])
"""


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_killed_conversion_leaves_nothing_that_looks_complete_and_runs_again(way: str, tmp_path: Path) -> None:
    source = given = hf_directory(tmp_path / "hf")
    convert: Any = hf_to_torch_dist.convert
    if way == "back":
        given, convert = hf_to_torch_dist.convert(source, tmp_path / "td"), torch_dist_to_hf.convert
    target = tmp_path / "out" / "target"
    command = [sys.executable, "-c", KILL, way, str(given), str(target)]
    done = subprocess.run(command, timeout=120, check=False, env=ENVIRONMENT)
    assert done.returncode == -signal.SIGKILL
    left = target if way == "there" else target.parent
    assert len(names(left)) == 1 and ".partial-" in names(left)[0]
    with pytest.raises(MissingFile):
        TorchDist(target) if way == "there" else SafetensorsDir(target)
    convert(given, target)
    assert not list(compare(source, target))
    assert not [name for name in names(left) if name.startswith(".")]


def test_two_at_once_are_one_too_many(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf")
    other = WholeDirectory(tmp_path / "td" / "release")
    with pytest.raises(InvalidSetting, match="another process is writing"):
        hf_to_torch_dist.convert(source, tmp_path / "td")
    other.discard()
    hf_to_torch_dist.convert(source, tmp_path / "td")


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hf_directory(tmp_path / "hf")
    hf_to_torch_dist.convert(source, tmp_path / "td")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 0))
        with pytest.raises(OutOfSpace, match="--output-dir"):
            torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back")
        with pytest.raises(OutOfSpace, match="--save"):
            hf_to_torch_dist.convert(source, tmp_path / "td2")

    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutOfSpace):
        torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back")
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(OutOfSpace):
            hf_to_torch_dist.convert(source, tmp_path / "td2")
    monkeypatch.setattr(writer._Whole, "write", full)
    with pytest.raises(OutOfSpace, match=r"__0_0\.distcp"):
        hf_to_torch_dist.convert(source, tmp_path / "td2")
    assert names(tmp_path) == ["hf", "td"]


def test_a_place_that_takes_no_files_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = hf_directory(tmp_path / "hf")
    inside = str(source / "config.json" / "out")
    hf_to_torch_dist.convert(source, tmp_path / "td")
    for words in (
        ["hf-to-torch-dist", "--hf-checkpoint", str(source), "--save", inside],
        ["torch-dist-to-hf", "--input-dir", str(tmp_path / "td"), "--output-dir", inside],
        ["model-args", "--hf-checkpoint", str(source), "--output", inside],
    ):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert "cannot write" in told and "Not a directory" in told and str(source / "config.json") in told


# A thread of gloo that outlives its group may abort the process when it exits.
LEAVING_NO_THREADS = """
import pathlib, sys
from slime.converters.cli import main
code = main(sys.argv[1:])
left = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
sys.exit(code or next((f"{left} were left" for name in left if "gloo" in name), 0))
"""


def test_ranks_of_torchrun_share_the_work(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun.append(str(tmp_path / "convert.py"))
    (tmp_path / "convert.py").write_text(LEAVING_NO_THREADS)

    def run(*words: object) -> tuple[int, str]:
        done = subprocess.run(
            [*torchrun, *map(str, words)],
            timeout=200,
            check=False,
            env=ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
        return done.returncode, done.stderr

    code, told = run("hf-to-torch-dist", "--hf-checkpoint", source, "--save", tmp_path / "td")
    assert code == 0, told
    assert sorted(p.name for p in (tmp_path / "td" / "release").glob("*.distcp"))[:2] == [
        "__0_0.distcp",
        "__1_0.distcp",
    ]
    code, told = run("to-hf", "--load", tmp_path / "td", "--output-dir", tmp_path / "back")
    assert code == 0, told
    assert not list(compare(source, tmp_path / "back"))
    code, told = run("to-hf", "--load", tmp_path / "td", "--output-dir", source)
    assert code != 0 and "holds what slime did not write" in told


def test_a_failure_is_told_whatever_became_of_the_directory_around_it(tmp_path: Path) -> None:
    for number, change in enumerate((shutil.rmtree, lambda parent: (parent / "mine").touch())):
        parent = tmp_path / str(number)
        with pytest.raises(KeyError, match="told"), whole_directory(parent / "out", "test"):
            change(parent)
            raise KeyError("told")
    assert names(tmp_path) == ["1"] and names(tmp_path / "1") == ["mine"]
