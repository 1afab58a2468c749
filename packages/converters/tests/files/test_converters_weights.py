"""Reading, writing, describing and comparing safetensors directories."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slime.converters.cli import main
from slime.converters.files.safetensors_dir import INDEX, SafetensorsDir, read_header, write
from slime.converters.files.scratch import Scratch
from slime.converters.inspection.summary import summarize
from slime.converters.inspection.verify import compare
from slime.types.errors import InvalidFile, MissingFile, NotFound


def some_tensors() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.arange(24, dtype=torch.float32).reshape(6, 4),
        "norm.weight": torch.ones(4, dtype=torch.bfloat16),
        "step": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }


def make(directory: Path, tensors: dict[str, torch.Tensor], **options: int) -> Path:
    directory.mkdir()
    write(directory, tensors.items(), **options)
    return directory


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_weights_have_the_permissions_that_the_user_chose(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        directory = make(tmp_path / "a", some_tensors(), shard_bytes=64)
    finally:
        os.umask(before)
    files = list(directory.iterdir())
    assert len(files) > 2 and {stat.S_IMODE(file.stat().st_mode) for file in files} == {mode}


def test_one_file_round_trip(tmp_path: Path) -> None:
    directory = make(tmp_path / "a", some_tensors())
    assert [path.name for path in directory.iterdir()] == ["model.safetensors"]
    weights = SafetensorsDir(directory)
    loaded = dict(weights)
    assert loaded.keys() == some_tensors().keys()
    for name, tensor in some_tensors().items():
        assert torch.equal(loaded[name], tensor) and torch.equal(weights.load(name), tensor)
        assert weights.tensors[name].shape == tuple(tensor.shape)
    assert weights.num_bytes == 24 * 4 + 4 * 2 + 8
    assert SafetensorsDir(directory / "model.safetensors").tensors.keys() == loaded.keys()
    with pytest.raises(NotFound, match="nope"):
        weights.load("nope")


def test_shards_are_what_hugging_face_writes(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((8, 4), float(i)) for i in range(5)}
    directory = make(tmp_path / "a", tensors, shard_bytes=2 * 8 * 4 * 4)
    names = sorted(path.name for path in directory.iterdir())
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + [INDEX]
    index = json.loads((directory / INDEX).read_text())
    assert index["metadata"]["total_size"] == 5 * 8 * 4 * 4
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(directory / file)[name], tensors[name])
    assert [name for name, _ in SafetensorsDir(directory)] == list(tensors)


def test_transformers_reads_the_shards(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    directory = make(tmp_path / "a", model.state_dict(), shard_bytes=2000)
    config.save_pretrained(directory)
    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_broken_files_and_indexes(tmp_path: Path) -> None:
    with pytest.raises(MissingFile):
        SafetensorsDir(tmp_path / "none")
    with pytest.raises(MissingFile, match="no .safetensors files"):
        SafetensorsDir(tmp_path)
    file = tmp_path / "x.safetensors"
    save_file(some_tensors(), file)
    whole = file.read_bytes()
    for content in (b"", b"abc", b"\xff" * 64, whole[:20], whole[:-1], (4).to_bytes(8, "little") + b"[12]"):
        file.write_bytes(content)
        with pytest.raises(InvalidFile, match="x.safetensors"):
            read_header(file)
    file.unlink()

    directory = make(tmp_path / "a", {f"w{i}": torch.zeros(8) for i in range(3)}, shard_bytes=40)
    index = json.loads((directory / INDEX).read_text())
    (directory / INDEX).write_text(
        json.dumps({"weight_map": {**index["weight_map"], "w9": "model-00001-of-00003.safetensors"}})
    )
    with pytest.raises(InvalidFile, match="w9 is not in"):
        SafetensorsDir(directory)
    (directory / INDEX).write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    with pytest.raises(InvalidFile, match="outside"):
        SafetensorsDir(directory)
    (directory / INDEX).write_text(json.dumps({"weight_map": {"w": 1}}))
    with pytest.raises(InvalidFile, match="outside"):
        SafetensorsDir(directory)
    for text in ("{", "[]", '{"weight_map": ["w0"]}'):
        (directory / INDEX).write_text(text)
        with pytest.raises(InvalidFile, match="weight_map"):
            SafetensorsDir(directory)
    (directory / INDEX).unlink()
    with pytest.raises(MissingFile, match="model-00001-of-00003.safetensors is one of several shards"):
        SafetensorsDir(directory)


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make(tmp_path / "a", some_tensors())
    summary = summarize(directory)
    assert (summary["num_tensors"], summary["num_parameters"], summary["num_files"]) == (4, 29, 1)
    assert summary["parameters_by_dtype"] == {"F32": 24, "BF16": 4, "I64": 1}
    assert main(["inspect", str(directory), "--containing", "weight"]) == 0
    out = capsys.readouterr().out
    assert "embed.weight" in out and "[6, 4]" in out and "2 tensors, 28 parameters" in out and "step" not in out
    assert main(["inspect", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert main(["inspect", str(directory), "--containing", "norn"]) == 2
    assert "--containing 'norn': no tensor of" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert main(["inspect"]) == 2
    assert main(["inspct"]) == 2


@pytest.mark.parametrize("form", ["safetensors", "torch_dist"])
def test_inspect_names_tensors_with_values_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    large = torch.zeros(70, 1000)
    large[3, 4], large[69, 999] = float("nan"), float("-inf")
    tensors = some_tensors() | {"up.weight": large.bfloat16(), "tiny": torch.tensor([1.0, float("nan")])}
    if form == "torch_dist":
        path = str(tmp_path)
        dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)
    else:
        tensors["eight"] = torch.tensor([448.0, float("nan"), 1.0]).to(torch.float8_e4m3fn)
        path = str(make(tmp_path / "a", tensors))
    assert main(["inspect", path, "--finite"]) == 1
    bad = 2 + (form == "safetensors")
    lines = capsys.readouterr().out.splitlines()[-bad - 1 :]
    assert "up.weight: 2 of 70,000 values are infinite or not a number" in lines
    assert lines[-1] == f"{bad} tensors have such values"
    assert main(["inspect", path, "--finite", "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert summary["num_nonfinite"] == bad + 1
    assert {t["name"]: t["num_nonfinite"] for t in summary["tensors"]}["tiny"] == 1
    assert main(["inspect", path, "--finite", "--containing", "norm"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all values are finite"


def test_verify_is_about_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = some_tensors() | {"nan": torch.tensor([float("nan"), 0.0])}
    a = make(tmp_path / "a", tensors, shard_bytes=64)
    b = make(tmp_path / "b", tensors)
    assert list(compare(a, b)) == []
    assert main(["verify", str(a), str(b)]) == 0
    assert "equal: 5 tensors" in capsys.readouterr().out

    changed = dict(tensors)
    changed["embed.weight"] = tensors["embed.weight"].clone()
    changed["embed.weight"][2, 1] += 0.5
    changed["norm.weight"] = tensors["norm.weight"].float()
    changed["nan"] = torch.tensor([float("nan"), -0.0])
    changed["more"] = changed.pop("step")
    changed["empty"] = torch.zeros(4, 0)
    c = make(tmp_path / "c", changed)
    reasons = {difference.name: difference.reason for difference in compare(a, c)}
    assert set(reasons) == {"embed.weight", "norm.weight", "nan", "more", "step", "empty"}
    assert reasons["embed.weight"] == "1 of 24 elements differ, by up to 0.5"
    assert reasons["norm.weight"] == "dtype BF16 and F32"
    assert reasons["nan"] == "bits differ, values do not"
    assert reasons["step"] == f"only in {a}"
    assert reasons["empty"] == "shape [0, 4] and [4, 0]"
    assert {d.name for d in compare(a, c, atol=0.6)} == {"more", "step", "empty"}
    assert {d.name for d in compare(a, c, atol=0.1)} == {"embed.weight", "more", "step", "empty"}

    assert main(["verify", str(a), str(c), "--max-shown", "2"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in out[:2]] == ["embed.weight", "empty"]
    assert out[2] == "6 tensors differ, the first 2 shown"


def test_infinities_and_nan_against_numbers_differ(tmp_path: Path) -> None:
    a = make(tmp_path / "a", {"w": torch.tensor([float("nan"), float("inf"), 1.0])})
    b = make(tmp_path / "b", {"w": torch.tensor([0.0, float("inf"), 1.0])})
    assert [d.reason for d in compare(a, b, atol=1.0)] == ["1 of 3 elements differ, by up to inf"]


def test_import_is_light() -> None:
    code = (
        "import sys\nfrom slime.converters import cli\nfrom slime.converters.convert import gguf_to_hf\n"
        "from slime.converters.inspection import summary, verify\n"
        "print([m for m in ('torch', 'transformers', 'gguf', 'ray', 'sglang', 'grpc') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


TENSORS = st.tuples(st.integers(0, 5), st.integers(1, 7), st.sampled_from([torch.bfloat16, torch.float32, torch.int64]))


@given(st.lists(TENSORS))
def test_memory_that_is_used_again_gives_tensors_of_their_own_size(shapes: list[tuple[int, int, torch.dtype]]) -> None:
    scratch = Scratch()
    for number, (rows, columns, dtype) in enumerate(shapes):
        tensor = scratch.tensor((rows, columns), dtype)
        # torch.save writes the whole storage.
        assert tensor.untyped_storage().nbytes() == tensor.nbytes == rows * columns * dtype.itemsize
        tensor.fill_(number)
        assert tensor.shape == (rows, columns) and (tensor == number).all()
