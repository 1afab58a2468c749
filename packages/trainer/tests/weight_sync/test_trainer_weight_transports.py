"""Transports ipc and nccl to a process that speaks SGLang's protocol; shared memory and gloo stand for theirs."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_fake_sglang import TRANSPORTS, FakeEngine, StandInRollout, digest
from trainer_processes import results_of
from trainer_tiny import Runner, alone, make_settings, write_fp8_model, write_model

from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.weight_sync import broadcasts
from slime.trainer.weight_sync.ipc import ranks_of_engines
from slime.trainer.weight_sync.sender import WeightSender, transport_for
from slime.types.clients import Engine
from slime.types.errors import DeadlineExceeded, EngineError, InvalidSetting, NotAvailable, SlimeError

BUCKET = 6_000


Start = Callable[..., FakeEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[FakeEngine] = []

    def one(fault: str = "") -> FakeEngine:
        engines.append(FakeEngine(fault))
        return engines[-1]

    yield one
    for engine in engines:
        engine.stop()


@pytest.fixture(autouse=True)
def shared_files() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def updates_of(model: str, rollout: StandInRollout, **values: Any) -> tuple[WeightSender, Runner]:
    values = {"update_weight_buffer_size": BUCKET, "update_weight_timeout_seconds": 20.0} | values
    runner = Runner(make_settings(model, **values))
    return WeightSender(runner.settings, alone(), runner.backend, rollout, Path(model)), runner


def expected(runner: Runner, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    return {name: digest(tensor.to(dtype)) for name, tensor in runner.weights().items()}


@pytest.mark.parametrize("colocate", [True, False], ids=["ipc", "nccl"])
def test_engines_hold_what_was_sent(model: str, start: Start, colocate: bool):
    fakes = [start()] if colocate else [start(), start()]
    rollout = StandInRollout([fake.describe(f"engine-{i}") for i, fake in enumerate(fakes)])
    updates, runner = updates_of(model, rollout, colocate=colocate, update_weight_dtype="bfloat16")
    sent = updates.push(3)
    runner.run()
    assert updates.push(4) == sent == 2 * runner.backend.num_parameters
    updates.close()
    assert rollout.calls == ["begin 3", "onload", "commit 3", "begin 4", "onload", "commit 4"]
    for fake in fakes:
        told = fake.told()
        assert (told["version"], told["held"]) == ("4", expected(runner, torch.bfloat16))
        calls = [path for path, _ in told["calls"]]
        update = "/update_weights_from_tensor" if colocate else "/update_weights_from_distributed"
        assert calls.count(update) > 4
        # One group for both updates.
        assert [path for path in calls if path != update] == (
            [] if colocate else ["/init_weights_update_group", "/destroy_weights_update_group"]
        )
        bodies = [body for path, body in told["calls"] if path == update]
        # A version is named by the bucket that completes it, and no other.
        versions = [body["weight_version"] for body in bodies if "weight_version" in body]
        assert versions == ["3", "4"] and bodies[-1]["weight_version"] == "4"


def test_engines_read_weights_that_lie_in_one_piece_of_memory_where_they_lie(model: str, start: Start):
    fake = start()
    rollout = StandInRollout([fake.describe("engine-0")])
    updates, runner = updates_of(model, rollout, colocate=True, bf16=True)
    places = [parameter.data_ptr() for parameter in runner.backend.policy.parameters()]
    for version in (1, 2):
        assert updates.push(version) == 2 * runner.backend.num_parameters
        assert (fake.told()["version"], fake.told()["held"]) == (str(version), expected(runner, torch.bfloat16))
        runner.run()
    updates.close()
    assert [parameter.data_ptr() for parameter in runner.backend.policy.parameters()] == places
    bodies = [body for _, body in fake.told()["calls"]]
    # Matrices and vectors, however small the buckets for what is copied.
    assert [body.get("weight_version") for body in bodies] == [None, "1", None, "2"]


def test_the_group_is_made_anew_for_other_engines(model: str, start: Start):
    first, second = start(), start()
    rollout = StandInRollout([first.describe("engine-0")])
    updates, runner = updates_of(model, rollout)
    updates.push(1)
    rollout.engines = [first.describe("engine-0"), second.describe("engine-1")]
    updates.push(2)
    updates.close()
    groups = [body["group_name"] for path, body in first.told()["calls"] if path == "/init_weights_update_group"]
    assert len(set(groups)) == 2
    assert all(fake.told()["held"] == expected(runner) for fake in (first, second))


@pytest.mark.parametrize("colocate", [True, False], ids=["ipc", "nccl"])
@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("die:1", EngineError, ""),
        ("refuse:1", EngineError, "status 400.*no memory"),
        ("silent:1", DeadlineExceeded, ""),
    ],
)
def test_a_failing_engine_is_named_and_nothing_hangs(
    model: str, start: Start, colocate: bool, fault: str, error: type[SlimeError], words: str
):
    engines = [start(fault).describe("engine-0")]
    if not colocate:
        engines.insert(0, start().describe("engine-9"))
    rollout = StandInRollout(engines)
    updates, _ = updates_of(model, rollout, colocate=colocate, update_weight_timeout_seconds=4.0)
    with pytest.raises(error, match=f"rank 0 to engine.*engine-0.*bucket 1 .*model.*of weight version 8.*{words}"):
        updates.push(8)
    assert rollout.calls[0] == "begin 8" and rollout.calls[1].startswith(f"abort 8: {error.__name__}: rank 0 to engine")
    updates.close()


class LargeWeights:
    """Stands for a backend: tensors that no socket buffers."""

    device = torch.device("cpu")
    tensors = {f"model.{i}": torch.full((4 << 20,), float(i)) for i in range(3)}

    def weights_stay(self, dtype: torch.dtype) -> bool:
        return False

    def named_weights(self, **_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


def test_a_bucket_is_announced_while_engines_load_the_one_before(
    model: str, start: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(broadcasts, "ACKNOWLEDGED_BYTES", 16 << 20)
    fakes = [start("slow:0"), start()]
    rollout = StandInRollout([fake.describe(f"engine-{i}") for i, fake in enumerate(fakes)])
    settings = make_settings(model, update_weight_buffer_size=16 << 20, update_weight_timeout_seconds=60.0)
    weights: Any = LargeWeights()
    updates = WeightSender(settings, alone(), weights, rollout, Path(model))
    updates.push(1)
    updates.close()
    for fake in fakes:
        told = fake.told()
        assert (told["version"], told["held"]) == ("1", {name: digest(t) for name, t in weights.tensors.items()})
        names = [body["names"] for path, body in told["calls"] if path == "/update_weights_from_distributed"]
        assert names == [["model.0"], ["model.1"], ["model.2"]]


def test_an_engine_that_is_gone_before_the_group_is_made(model: str, start: Start):
    gone = start()
    gone.stop()
    updates, _ = updates_of(model, StandInRollout([gone.describe("engine-0")]), update_weight_timeout_seconds=4.0)
    with pytest.raises(EngineError, match="rank 0 to engine engine-0 .*init_weights_update_group, group of 2 ranks at"):
        updates.push(1)


def test_after_a_failure_the_next_update_works(model: str, start: Start):
    fake = start("refuse:0")
    updates, runner = updates_of(model, StandInRollout([fake.describe("engine-0")]), update_weight_timeout_seconds=4.0)
    with pytest.raises(EngineError):
        updates.push(1)
    updates.push(2)
    assert (fake.told()["version"], fake.told()["held"]) == ("2", expected(runner))
    updates.close()


def test_every_rank_shares_the_bucket_on_its_own_gpu(start: Start, tmp_path: Path):
    """Two ranks, an engine over both: FSDP and tensor-parallel Megatron give the weights of one rank, in FP8 too."""
    models = {
        "dense": Path(write_model(tmp_path / "models" / "dense")),
        "fp8": write_fp8_model(tmp_path / "models/fp8"),
    }
    fakes = {name: start() for name in models}
    for name, fake in fakes.items():
        (tmp_path / "models" / f"{name}.json").write_text(json.dumps(dataclasses.asdict(fake.describe("engine-0", 2))))
    (tmp_path / "run").mkdir()
    results = results_of("trainer_weight_ranks.py", 2, tmp_path / "run", tmp_path / "models")
    runner = Runner(make_settings(str(models["dense"])))
    published = dict(SafetensorsDir(models["fp8"]))
    sizes = {"dense": 2 * runner.backend.num_parameters, "fp8": sum(tensor.nbytes for tensor in published.values())}
    for case in ("fsdp", "megatron", "fsdp_fp8", "megatron_fp8"):
        first, second = results[case]
        size = sizes["fp8" if case.endswith("fp8") else "dense"]
        assert first == {"sent": size, "error": "", "calls": ["begin", "onload", "commit"]}
        assert second == {**first, "calls": []}
    told = fakes["dense"].told()
    assert (told["version"], told["held"]) == ("6", expected(runner, torch.bfloat16))
    told = fakes["fp8"].told()
    assert (told["version"], told["held"]) == ("4", {name: digest(tensor) for name, tensor in published.items()})


def test_an_engine_over_more_gpus_than_the_trainer_has(model: str, start: Start):
    updates, _ = updates_of(model, StandInRollout([start().describe("engine-0", 2)]), colocate=True)
    with pytest.raises(InvalidSetting, match="engines on 2 GPUs cannot be used together.*the trainer has 1"):
        updates.push(1)


def test_an_engine_that_was_started_again_reads_the_memory_of_its_own_gpus():
    lost, first = (
        dataclasses.replace(describe(f"engine-{n}", "sglang"), tp_size=tp_size, first_rank=rank)
        for n, tp_size, rank in ((1, 2, 1), (0, 1, 0))
    )
    assert ranks_of_engines([lost], 3) == [(lost, range(1, 3))]
    assert ranks_of_engines([first, lost], 3) == [(first, range(1)), (lost, range(1, 3))]
    # A rollout service from before there were such numbers says 0 for each.
    with pytest.raises(InvalidSetting, match="ipc and engines on the same GPUs cannot be used together"):
        ranks_of_engines([first, dataclasses.replace(lost, first_rank=0)], 3)


def describe(name: str, kind: str) -> Engine:
    return Engine(name, "http://h:1", kind, True, 0, weight_transports=TRANSPORTS[kind])


@pytest.mark.parametrize(
    ("kinds", "values", "transport"),
    [
        ([], {}, "tensor"),
        (["embedded"], {}, "tensor"),
        (["embedded"], {"colocate": True}, "tensor"),
        (["sglang", "sglang"], {"colocate": True}, "ipc"),
        (["sglang"], {}, "nccl"),
        (["sglang"], {"colocate": True, "rollout_external_engine_addrs": ["h:1"]}, "nccl"),
        (["sglang"], {"update_weight_transport": "disk", "update_weight_disk_dir": "d"}, "disk"),
    ],
)
def test_what_auto_chooses(kinds: list[str], values: dict[str, Any], transport: str):
    engines = [describe(f"engine-{i}", kind) for i, kind in enumerate(kinds)]
    assert transport_for(engines, TrainerSettings(hf_checkpoint="m", **values)) == transport


def test_mixed_engines_and_engines_of_another_kind_are_refused(model: str):
    engines = [describe("engine-0", "embedded"), describe("engine-1", "sglang")]
    updates, _ = updates_of(model, StandInRollout(engines))
    with pytest.raises(NotAvailable, match="embedded, sglang"):
        updates.push(1)
    updates, _ = updates_of(model, StandInRollout(engines), update_weight_transport="nccl")
    with pytest.raises(
        NotAvailable, match=r"transport nccl and engine engine-0 \(embedded\) .*: it takes weights by tensor or disk"
    ):
        updates.push(1)
