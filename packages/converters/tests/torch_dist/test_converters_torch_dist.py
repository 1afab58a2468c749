"""torch_dist checkpoints as files: what PyTorch writes is read and the other way round; damage is told."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from converters_tiny import hf_directory
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import WriteItemType

from slime.converters.convert.hf_to_torch_dist import convert
from slime.converters.files import rectangles
from slime.converters.files.rectangles import Stored
from slime.converters.inspection.verify import compare
from slime.converters.torch_dist.keys import Layout, Place, extra_states, other_keys, singletons
from slime.converters.torch_dist.reader import TorchDist
from slime.converters.torch_dist.writer import ChunkFile, write_common, write_metadata
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, NotFound


def index_of(*parts: tuple[int, int]) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in parts)


def test_a_checkpoint_of_pytorch_is_read(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(6, 5),
        "half": torch.randn(4, 3).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "number": torch.arange(7),
        "view": torch.randn(8, 8)[2:4, 1:3],
    }
    dcp.save({**tensors, "plain": {"a": 1}}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = TorchDist(tmp_path)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.load(name), tensor)
    assert torch.equal(checkpoint.load("matrix", index_of((1, 4), (2, 3))), tensors["matrix"][1:4, 2:3])
    assert checkpoint.common() == {} and checkpoint.description == {} and checkpoint.hf_dir is None
    with pytest.raises(NotFound, match="nothing"):
        checkpoint.load("nothing")


def test_pytorch_reads_what_is_written_here(tmp_path: Path) -> None:
    whole = torch.randn(2, 6, 4)
    with ChunkFile(tmp_path, 0) as first, ChunkFile(tmp_path, 1) as second:
        for layer in range(2):
            place = Place("decoder.layers.mlp.linear_fc2.weight", (layer,), (2,))
            first.add(place, (6, 4), whole[layer, :4], (0, 0))
            stored = second.reserve(place, (6, 4), (2, 4), whole.dtype, (4, 0))
            for row in (1, 0):
                second.fill(stored, (slice(row, row + 1), slice(0, 4)), whole[layer, 4 + row : 5 + row])
    write_metadata(tmp_path, first.chunks + second.chunks)
    found = {"decoder.layers.mlp.linear_fc2.weight": torch.zeros(2, 6, 4)}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found["decoder.layers.mlp.linear_fc2.weight"], whole)
    assert TorchDist(tmp_path).objects == [f"decoder.layers.mlp.linear_fc2._extra_state/shard_{i}_2" for i in (0, 1)]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_rectangle_is_read_from_any_chunks(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    steps = [data.draw(st.integers(1, size)) for size in shape]
    index = tuple(
        slice(first, data.draw(st.integers(first + 1, size)))
        for size in shape
        for first in [data.draw(st.integers(0, size - 1))]
    )
    whole = torch.randn(shape)
    directory = tmp_path_factory.mktemp("chunks")
    with ChunkFile(directory, 0) as file:
        starts = torch.cartesian_prod(*(torch.arange(0, n, step) for n, step in zip(shape, steps, strict=True)))
        for start in starts.reshape(-1, len(shape)).tolist():
            part = whole[tuple(slice(a, a + step) for a, step in zip(start, steps, strict=True))]
            file.add(Place("x"), shape, part, tuple(start))
    write_metadata(directory, file.chunks)
    checkpoint = TorchDist(directory)
    assert torch.equal(checkpoint.load("x", index), whole[index])
    wide = torch.zeros([part.stop - part.start for part in index], dtype=torch.float64)
    checkpoint.read("x", index, wide)
    assert torch.equal(wide, whole[index].double())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_rectangle_is_written_to_its_place(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    index = tuple(
        slice(first, data.draw(st.integers(first + 1, size)))
        for size in shape
        for first in [data.draw(st.integers(0, size - 1))]
    )
    path = tmp_path_factory.mktemp("file") / "x"
    whole = torch.randn(shape)
    path.write_bytes(b"head" + bytes(rectangles.as_bytes(whole)))
    stored = Stored(path, 4, torch.float32, shape)
    part = torch.randn([part.stop - part.start for part in index], dtype=torch.float64)
    whole[index] = part.float()
    with path.open("r+b") as file:
        rectangles.write(file.fileno(), stored, index, part)
        out = torch.empty(shape)
        rectangles.read(file.fileno(), stored, rectangles.whole(shape), out)
    assert torch.equal(out, whole)


def test_writes_end_at_multiples_of_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rectangles, "WRITE_BYTES", 64)
    pwrite, ends = os.pwrite, []

    def write(fd: int, data: memoryview, offset: int) -> int:
        ends.append(offset + len(data))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    stored = Stored(tmp_path / "x", 40, torch.float32, (50,))
    with stored.file.open("w+b") as file:
        rectangles.write(file.fileno(), stored, (slice(0, 50),), torch.arange(50.0))
    assert ends == [64, 128, 192, 240]
    assert torch.frombuffer(stored.file.read_bytes(), dtype=torch.float32, offset=40).tolist() == list(range(50))


def test_a_part_that_is_saved_whole_is_written_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rectangles, "WRITE_BYTES", 64)
    write, crossed, sizes = os.write, [], []

    def spy(fd: int, data: memoryview) -> int:
        start = os.lseek(fd, 0, os.SEEK_CUR)
        crossed.append(start // 64 != (start + len(data) - 1) // 64)
        sizes.append(len(data))
        return write(fd, data)

    tensor = torch.arange(200.0).view(50, 4)
    with ChunkFile(tmp_path, 0) as file:
        monkeypatch.setattr(os, "write", spy)
        file.add(Place("x"), (50, 4), tensor, (0, 0))
        monkeypatch.setattr(os, "write", write)
    assert sum(sizes) > tensor.nbytes and not any(crossed)
    write_metadata(tmp_path, file.chunks)
    assert torch.equal(TorchDist(tmp_path).load("x"), tensor)


def test_room_that_is_not_filled_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="6 reserved elements were not filled"):
        with ChunkFile(tmp_path, 0) as file:
            stored = file.reserve(Place("x"), (4, 2), (4, 2), torch.float32, (0, 0))
            file.fill(stored, (slice(0, 1), slice(0, 2)), torch.ones(1, 2))


def test_a_tensor_without_elements_is_kept(tmp_path: Path) -> None:
    with ChunkFile(tmp_path, 0) as file:
        file.reserve(Place("x"), (4, 0), (4, 0), torch.bfloat16, (0, 0))
    write_metadata(tmp_path, file.chunks)
    assert TorchDist(tmp_path).load("x").shape == (4, 0)


def test_parts_must_make_up_the_tensor(tmp_path: Path) -> None:
    with ChunkFile(tmp_path, 0) as file:
        file.add(Place("x"), (4, 2), torch.zeros(2, 2), (0, 0))
    with pytest.raises(InvalidFile, match="x: 4 of 8 elements were written"):
        write_metadata(tmp_path, file.chunks)
    with pytest.raises(InvalidFile, match="parts do not fit together"):
        write_metadata(tmp_path, [*file.chunks, *file.chunks])


def test_keys_of_layers_experts_and_norms() -> None:
    stacked, layers = Layout(3, 4, True, False), Layout(3, 4, False, False)
    name = "decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight"
    assert stacked.place(name) == Place("decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 1), (3, 4))
    assert layers.place(name) == Place("decoder.layers.2.mlp.experts.experts.linear_fc1.weight", (1,), (4,))
    assert singletons(name) == tuple(f"decoder.layers.2.mlp.experts.experts.1.linear_fc1.weight_{x}" for x in "wv")
    norm = "decoder.layers.1.pre_mlp_layernorm.weight"
    assert stacked.place(norm) == Place("decoder.layers.mlp.linear_fc1.layer_norm_weight", (1,), (3,))
    assert stacked.aliases(norm) == [Place("decoder.layers.pre_mlp_layernorm.weight", (1,), (3,))]
    latent = Layout(3, None, True, True)
    assert latent.place(norm).key == "decoder.layers.pre_mlp_layernorm.weight"
    moment = "optimizer.state.exp_avg.decoder.layers"
    assert other_keys(f"{moment}.pre_mlp_layernorm.weight", latent=True) == [
        f"{moment}.mlp.linear_fc1.layer_norm_weight"
    ]
    fused = f"{moment}.self_attention.linear_q_up_proj.layer_norm_weight"
    assert other_keys(fused, latent=True) == [f"{moment}.self_attention.q_layernorm.weight"]
    # Without latent attention these are norms of heads, in layers of either kind.
    assert other_keys(f"{moment}.self_attention.q_layernorm.weight", latent=False) == []
    assert other_keys(f"{moment}.input_layernorm.weight", latent=True) == []
    across = Layout(3, 4, True, False, across_heads=True)
    assert across.aliases("decoder.layers.1.self_attention.k_layernorm.weight") == [
        Place("decoder.layers.self_attention.k_norm.weight", (1,), (3,))
    ]
    original = f"{moment}.self_attention.q_norm.weight"
    assert other_keys(f"{moment}.self_attention.q_layernorm.weight", latent=False, across_heads=True) == [original]
    assert other_keys(original, latent=False, across_heads=True) == [f"{moment}.self_attention.q_layernorm.weight"]
    inner = "mtp.layers.0.transformer_layer.input_layernorm.weight"
    assert stacked.place(inner) == Place("mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_weight")
    with pytest.raises(InvalidSetting, match="--num-experts"):
        latent.place(name)
    assert list(extra_states({"decoder.layers.3.mlp.experts.experts.linear_fc2.weight": (2, 8, 8)})) == [
        f"decoder.layers.3.mlp.experts.experts.linear_fc2._extra_state/shard_{expert}_2" for expert in (0, 1)
    ]
    assert not list(extra_states({"optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": (3, 8, 8)}))


class Harm:
    def __reduce__(self) -> Any:
        return (print, ("harm was done",))


def test_a_pickle_that_calls_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = convert(hf_directory(tmp_path / "hf"), tmp_path / "td")
    good = (directory / ".metadata").read_bytes()
    (directory / ".metadata").write_bytes(pickle.dumps({"a": Harm()}))
    with pytest.raises(InvalidFile, match=r"\.metadata: refused to load builtins\.print"):
        TorchDist(directory)
    (directory / ".metadata").write_bytes(good[:300])
    with pytest.raises(InvalidFile, match=r"\.metadata: damaged"):
        TorchDist(directory)
    (directory / ".metadata").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(InvalidFile, match="cannot be read as the metadata of a checkpoint"):
        TorchDist(directory)
    (directory / ".metadata").write_bytes(good)
    torch.save({"args": Harm()}, directory / "common.pt")
    with pytest.raises(InvalidFile, match=r"common\.pt: refused to load builtins\.print"):
        TorchDist(directory).common()
    key = "decoder.final_layernorm.weight"
    chunk = TorchDist(directory).tensors[key].chunks[0]
    buffer = io.BytesIO()
    torch.save(Harm(), buffer)
    data = bytearray((directory / chunk.file).read_bytes())
    data[chunk.offset : chunk.offset + chunk.length] = buffer.getvalue().ljust(chunk.length, b"\0")[: chunk.length]
    (directory / chunk.file).write_bytes(data)
    with pytest.raises(InvalidFile, match=key):
        TorchDist(directory).load(key)
    assert "harm" not in capsys.readouterr().out


class Attribute:
    """Pickles as `getattr(OBJECT, NAME)`, as Python 3.11.2 does the members of an enum."""

    def __init__(self, kind: Any, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> Any:
        return getattr, (self.kind, self.name)


def test_a_checkpoint_that_was_written_by_debian_12s_python_is_read(tmp_path: Path) -> None:
    directory = convert(hf_directory(tmp_path / "hf"), tmp_path / "td")
    metadata = dcp.FileSystemReader(directory).read_metadata()
    metadata.planner_data = [Attribute(WriteItemType, "SHARD")]
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert TorchDist(directory).tensors
    for kind, name in ((dict, "fromkeys"), ("text", "format"), (torch.float32, "to_real")):
        (directory / ".metadata").write_bytes(pickle.dumps({"a": Attribute(kind, name)}))
        with pytest.raises(InvalidFile, match=r"\.metadata: damaged: UnpicklingError: getattr of .*, expected an enum"):
            TorchDist(directory)


def test_settings_of_megatron_are_read_without_megatron(tmp_path: Path) -> None:
    from megatron.core.transformer.enums import AttnBackend

    write_common(tmp_path, {"num_layers": 3, "object": object()}, 5, {"optimizer": {"param_groups": [{"lr": 1e-6}]}})
    convert(hf_directory(tmp_path / "hf"), tmp_path / "td")
    directory = tmp_path / "td" / "release"
    shutil.copy(tmp_path / "common.pt", directory)
    common = TorchDist(directory).common()
    assert vars(common["args"]) == {"num_layers": 3} and common["iteration"] == 5
    torch.save({"args": argparse.Namespace(backend=AttnBackend.local, dtype=torch.bfloat16, x=torch.zeros(2, 3))},
               directory / "common.pt")  # fmt: skip
    args = TorchDist(directory).common()["args"]
    assert args.backend.kind == "megatron.core.transformer.enums.AttnBackend" and args.dtype == torch.bfloat16
    assert args.x.arguments == ((2, 3),)


def test_damaged_copies_are_told_from_good_ones(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf")
    directory = convert(source, tmp_path / "td")
    shutil.copytree(directory, tmp_path / "copy")
    assert not list(compare(directory, tmp_path / "copy"))
    key = "decoder.layers.mlp.linear_fc2.weight"
    chunk = TorchDist(directory).tensors[key].chunks[1]
    file = tmp_path / "copy" / chunk.file
    data = bytearray(file.read_bytes())
    position = data.index(bytes(rectangles.as_bytes(TorchDist(directory).load(key)[1])), chunk.offset)
    data[position + 5] ^= 64
    file.write_bytes(data)
    assert [d.name for d in compare(directory, tmp_path / "copy")] == [key]
    assert [d.name for d in compare(source, tmp_path / "copy")] == ["model.layers.1.mlp.down_proj.weight"]

    file.write_bytes(data[:-1000])
    with pytest.raises(InvalidFile, match=rf"{chunk.file}: .*: cut short"):
        TorchDist(tmp_path / "copy")
    file.unlink()
    with pytest.raises(MissingFile, match=f"{chunk.file}: no such file, .* is in it"):
        TorchDist(tmp_path / "copy")


def test_the_directory_is_found_by_its_tracker(tmp_path: Path) -> None:
    convert(hf_directory(tmp_path / "hf"), tmp_path / "td")
    tracker = tmp_path / "td" / "latest_checkpointed_iteration.txt"
    tracker.write_text("12\n")
    with pytest.raises(MissingFile, match=r"iter_0000012: no \.metadata"):
        TorchDist(tmp_path / "td")
    (tmp_path / "td" / "release").rename(tmp_path / "td" / "iter_0000012")
    assert TorchDist(tmp_path / "td").directory.name == "iter_0000012"
    tracker.write_text("../elsewhere")
    with pytest.raises(InvalidFile, match="expected a number or release"):
        TorchDist(tmp_path / "td")
    with pytest.raises(MissingFile, match="no torch_dist checkpoint"):
        TorchDist(tmp_path / "hf")
