"""Weight updates to engines that hold FP8 or INT4: they get tensors as in the checkpoint, of the trainer's weights."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_fake_sglang import FakeEngine, StandInRollout, digest
from trainer_tiny import (
    BLOCK,
    GROUP,
    Runner,
    alone,
    dequantized,
    make_settings,
    spread,
    write_fp8_model,
    write_int4_model,
)

from slime.converters.convert.quantized import form_of
from slime.trainer.weight_sync.base import buckets, flatten
from slime.trainer.weight_sync.deltas.snapshot import Snapshot
from slime.trainer.weight_sync.sender import WeightSender, refuse_other_layouts
from slime.types.errors import NotAvailable
from slime.types.weight_deltas.buckets import VersionDelta, apply_tensor, read_bucket, write_buckets

BACKENDS: dict[str, dict[str, Any] | None] = {"fsdp": None, "megatron": {}}
MODELS: dict[str, Callable[[Path], Path]] = {
    "fp8 dense": write_fp8_model,
    "fp8 experts": partial(write_fp8_model, experts=4),
    "fp8 minimax": partial(write_fp8_model, fmt="float8_e4m3fn"),
    "fp8 ue8m0": partial(write_fp8_model, scale_fmt="ue8m0"),
    "int4 dense": write_int4_model,
    "int4 experts": partial(write_int4_model, experts=4),
}


@pytest.fixture(autouse=True)
def shared_files() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def fp8_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8_model(tmp_path_factory.mktemp("fp8"))


Updates = Callable[..., tuple[WeightSender, Runner]]


@pytest.fixture
def updates_of(engine: FakeEngine) -> Iterator[Updates]:
    opened: list[WeightSender] = []

    def make(model: Path, backend: str = "fsdp", **values: Any) -> tuple[WeightSender, Runner]:
        values = {"update_weight_dtype": "bfloat16", "update_weight_timeout_seconds": 20.0} | values
        settings = make_settings(str(model), train_backend=backend, update_weight_buffer_size=6_000, **values)
        runner = Runner(settings, megatron=BACKENDS[backend])
        rollout = StandInRollout([engine.describe("engine-0")])
        opened.append(WeightSender(settings, alone(), runner.backend, rollout, model))
        return opened[-1], runner

    yield make
    for updates in opened:
        updates.close()


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def quantized(model: Path, runner: Runner) -> dict[str, torch.Tensor]:
    form = form_of(model)
    assert form is not None
    return dict(form.quantized((name, tensor.bfloat16()) for name, tensor in runner.weights().items()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["fp8 dense", "fp8 experts", "fp8 minimax", "int4 dense", "int4 experts"])
def test_a_directory_is_the_checkpoint_and_then_the_trained_weights(
    tmp_path: Path, engine: FakeEngine, updates_of: Updates, backend: str, kind: str
) -> None:
    model = MODELS[kind](tmp_path / "model")
    shared = {"update_weight_transport": "disk", "update_weight_disk_dir": str(tmp_path / "shared")}
    updates, runner = updates_of(model, backend, **shared, update_weight_disk_keep_files=True)
    published = tensors_of(model)
    # Before any training the engine gets what it has, bit for bit.
    assert updates.push(1) == sum(tensor.nbytes for tensor in published.values())
    assert engine.told()["held"] == digests(published)

    runner.run()
    updates.push(2)
    (directory,) = (tmp_path / "shared").rglob("weight_v000002")
    assert json.loads((directory / "config.json").read_text()) == json.loads((model / "config.json").read_text())
    sent, trained = tensors_of(directory), runner.weights()
    assert {n: (t.dtype, t.shape) for n, t in sent.items()} == {n: (t.dtype, t.shape) for n, t in published.items()}
    assert engine.told()["held"] == digests(sent) != digests(published)
    for name, values in dequantized(sent).items():
        exact = trained[name].bfloat16().double()
        assert bool(((values - exact).abs() <= half_step(sent, name, exact)).all()), name


def half_step(sent: dict[str, torch.Tensor], name: str, exact: torch.Tensor) -> torch.Tensor:
    """Returns how far quantization may move each element of a weight."""
    if f"{name}_packed" in sent:
        return sent[f"{name}_scale"].double().repeat_interleave(GROUP, 1) / 2 * (1 + 1e-6)
    if f"{name}_scale_inv" not in sent:
        return torch.zeros(())
    factor = spread(sent[f"{name}_scale_inv"], exact)
    return torch.maximum(exact.abs() / 2**4, factor / 2**10) * (1 + 1e-6)


@pytest.mark.parametrize("colocate", [True, False], ids=["ipc", "nccl"])
@pytest.mark.parametrize("kind", ["fp8 dense", "fp8 ue8m0", "int4 dense", "int4 experts"])
def test_buckets_hold_what_the_checkpoint_holds(
    tmp_path: Path, engine: FakeEngine, updates_of: Updates, colocate: bool, kind: str
) -> None:
    model = MODELS[kind](tmp_path / "model")
    # With bf16, the tensors are parts of memory that stays, from which nothing may be sent as it is.
    updates, runner = updates_of(model, colocate=colocate, bf16=colocate)
    updates.push(1)
    runner.run()
    expected = quantized(model, runner)
    assert updates.push(2) == sum(tensor.nbytes for tensor in expected.values())
    told = engine.told()
    assert (told["version"], told["held"]) == ("2", digests(expected))
    sent = [body for path, body in told["calls"] if path.startswith("/update_weights_from")]
    # Not one bucket for each weight, each factor and each norm in turn.
    assert len(sent) < len(expected)


def test_every_tensor_of_a_bucket_can_be_viewed_in_its_bytes() -> None:
    dtypes = (torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64)
    weights = {f"w{i}": torch.arange(7).to(dtype) for i, dtype in enumerate(dtypes)}
    ((bucket, last),) = buckets(iter(weights.items()), max_bytes=1 << 10)
    assert last and list(bucket) == ["w4", "w1", "w2", "w0", "w3"]
    names, flat, start = list(bucket), flatten(bucket), 0
    for name in names:
        size = weights[name].nbytes
        assert digest(flat[start : start + size].view(weights[name].dtype)) == digest(weights[name])
        start += size


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("kind", ["fp8 dense", "int4 dense"])
def test_deltas_are_of_the_quantized_tensors(tmp_path: Path, kind: str, encoding: str) -> None:
    model = MODELS[kind](tmp_path)
    runner = Runner(make_settings(str(model)))
    held = Snapshot()
    before = quantized(model, runner)
    held.take(1, iter(before.items()))
    runner.run()
    after = quantized(model, runner)
    about = VersionDelta(2, 1, "a", encoding, "xxh3-128")
    found = dict(before)
    for bucket, _ in write_buckets(about, held.deltas(about, iter(after.items())), 6_000):
        for delta in read_bucket(bucket)[1]:
            old = before[delta.name].reshape(-1).view(torch.uint8).numpy()
            new = torch.from_numpy(apply_tensor(about, delta, old).copy())
            found[delta.name] = new.view(getattr(torch, delta.dtype)).reshape(delta.shape)
    assert 0 < held.changed < held.elements
    assert digests(found) == digests(after) != digests(before)


@pytest.mark.parametrize("kind", ["fp8 dense", "int4 dense"])
def test_the_comparison_is_of_the_quantized_tensors(
    tmp_path: Path, engine: FakeEngine, updates_of: Updates, kind: str
) -> None:
    model = MODELS[kind](tmp_path / "model")
    updates, runner = updates_of(model, check_weight_update_equal=True)
    updates.push(1)
    calls = [path for path, _ in engine.told()["calls"]]
    assert calls[-4:] == ["/weights_checker", "/weights_checker", "/update_weights_from_disk", "/weights_checker"]
    assert engine.told()["held"] == digests(tensors_of(model))


def test_the_comparison_reads_the_layers_that_do_not_train(
    tmp_path: Path, updates_of: Updates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may hold them, and has random numbers in their place before it reads the directory."""
    model = write_fp8_model(tmp_path / "model")
    stored = tensors_of(model)
    extra = {name.replace("layers.0", "mtp"): tensor.clone() for name, tensor in stored.items() if "layers.0" in name}
    save_file(stored | extra, model / "model.safetensors", metadata={"format": "pt"})
    updates, runner = updates_of(model, check_weight_update_equal=True)
    monkeypatch.setattr(runner.backend, "untrained_weights", lambda: [*extra])
    weights = updates._in_form(runner.backend.named_weights(dtype=torch.bfloat16))
    size = updates._write_all(tmp_path / "written", weights)
    assert digests(tensors_of(tmp_path / "written")) == digests(stored | extra)
    assert size == sum(tensor.nbytes for tensor in (stored | extra).values())


def test_engines_with_another_config_get_plain_weights(
    fp8_model: Path, engine: FakeEngine, updates_of: Updates
) -> None:
    updates, runner = updates_of(fp8_model, update_weight_quantization="none")
    updates.push(1)
    assert engine.told()["held"] == {n: digest(t.bfloat16()) for n, t in runner.weights().items()}


@pytest.mark.parametrize("kind", ["fp8 dense", "int4 dense", "int4 experts"])
def test_both_backends_read_the_same_weights(tmp_path: Path, kind: str) -> None:
    model = MODELS[kind](tmp_path)
    values = dequantized(tensors_of(model), BLOCK)
    for backend, megatron in BACKENDS.items():
        weights = Runner(make_settings(str(model), train_backend=backend), megatron=megatron).weights()
        assert weights.keys() == values.keys()
        assert all(torch.equal(tensor, values[name].bfloat16().float()) for name, tensor in weights.items())


def test_a_checkpoint_that_is_quantized_in_another_way_is_refused_at_the_start(model: str, tmp_path: Path) -> None:
    runner = Runner(make_settings(model))
    config = json.loads((Path(model) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rollout = StandInRollout([])
    settings = make_settings(str(tmp_path))
    with pytest.raises(NotAvailable, match="--hf-checkpoint .* with quantization_config .* not to pack-quantized"):
        WeightSender(settings, alone(), runner.backend, rollout, tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "possible", "others"),
    [("fp8 dense", "FP8", "8.9 9.0", "8.0 10.0 12.0"), ("int4 dense", "INT4", "8.0 8.6 8.9 9.0", "7.5 10.0 12.0")],
)
def test_gpus_where_sglang_keeps_weights_in_another_layout_are_refused(
    tmp_path: Path, kind: str, name: str, possible: str, others: str
) -> None:
    form = form_of(MODELS[kind](tmp_path))
    assert form is not None

    def check(number: str) -> None:
        major, minor = map(int, number.split("."))
        refuse_other_layouts(form, (major, minor))

    for number in possible.split():
        check(number)
    for number in others.split():
        with pytest.raises(
            NotAvailable, match=f"in {name} to GPUs of compute capability {number} is not supported yet"
        ):
            check(number)
