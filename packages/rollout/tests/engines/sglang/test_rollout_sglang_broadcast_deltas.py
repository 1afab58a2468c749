"""Deltas that are broadcast to an engine: applied by the loader of a model, in parts, as SGLang's are modelled on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from slime.rollout.engines.sglang import broadcast_deltas
from slime.rollout.engines.sglang.broadcast_deltas import apply_bucket, update_weights
from slime.types.errors import DataLoss
from slime.types.weight_deltas import BROADCAST, REFUSED
from slime.types.weight_deltas.buckets import VersionDelta, encode_tensor, write_buckets

NUM_GPUS = 0
HIDDEN, HEADS, EXPERTS, WORDS = 4, 6, 4, 10
Weights = dict[str, Tensor]


class Rank:
    """One rank of a model: fused and divided queries and keys, a padded embedding, experts, a norm in float32."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.qk = nn.Parameter(torch.zeros(2 * HEADS // ranks, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.words = nn.Parameter(torch.zeros(12 // ranks, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.experts = nn.Parameter(torch.zeros(EXPERTS // ranks, HIDDEN, 2), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)
        self.loads = 0

    def parameters(self) -> list[Tensor]:
        return [self.qk, self.words, self.experts, self.norm]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with ThreadPoolExecutor(2) as threads:
            for future in [threads.submit(self.load, name, weight) for name, weight in weights]:
                future.result()
        self.loads += 1

    def load(self, name: str, weight: Tensor) -> None:
        if name in ("q", "k"):
            rows = HEADS // self.ranks
            part = self.qk.data.narrow(0, rows * (name == "k"), rows)
            part.copy_(weight.narrow(0, self.rank * rows, rows))
        elif name == "words":
            size = len(self.words)
            part = weight[self.rank * size : (self.rank + 1) * size]
            self.words.data[: len(part)].copy_(part)
            self.words.data[len(part) :].fill_(0)
        elif name.startswith("expert."):
            number, first = int(name.rpartition(".")[2]), self.rank * EXPERTS // self.ranks
            if first <= number < first + EXPERTS // self.ranks:
                self.experts.data[number - first].copy_(weight.t())
        elif name == "norm":
            assert weight.shape == self.norm.shape
            self.norm.data.copy_(weight.to(weight.dtype))


def weights_of(seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(torch.bfloat16)

    experts = {f"expert.{number}": tensor(2, HIDDEN).float() for number in range(EXPERTS)}
    named = {"q": tensor(HEADS, HIDDEN), "k": tensor(HEADS, HIDDEN), "words": tensor(WORDS, HIDDEN)}
    return named | experts | {"norm": tensor(HIDDEN)}


def buckets_of(old: Weights, new: Weights, encoding: str = "xor", max_bytes: int = 1 << 20) -> list[bytes]:
    about = VersionDelta(2, 1, "a", encoding, "xxh3-128")
    deltas = (
        encode_tensor(about, name, str(old[name].dtype)[6:], old[name].shape, bytes_of(old[name]), bytes_of(new[name]))
        for name in old
    )
    return [bucket for bucket, _ in write_buckets(about, deltas, max_bytes)]


def bytes_of(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def apply(rank: Any, buckets: Iterable[bytes]) -> None:
    for bucket in buckets:
        apply_bucket(rank.load_weights, bucket, torch.device("cpu"))


def loaded(weights: Weights, rank: int = 0, ranks: int = 1) -> Rank:
    model = Rank(rank, ranks)
    model.load_weights(weights.items())
    return model


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), changed=st.sets(st.sampled_from(sorted(weights_of(0)))), data=st.data())
def test_a_model_holds_the_new_weights_bit_for_bit(seed: int, changed: set[str], data: st.DataObject) -> None:
    encoding = data.draw(st.sampled_from(["xor", "overwrite"]))
    old, other = weights_of(seed), weights_of(seed + 1)
    new = {name: other[name] if name in changed else old[name] for name in old}
    model, wanted = loaded(old), loaded(new)
    apply(model, buckets_of(old, new, encoding, data.draw(st.sampled_from([1, 900, 1 << 20]))))
    assert all(map(torch.equal, model.parameters(), wanted.parameters()))


def test_signs_of_zero_infinities_and_payloads_of_nans_are_kept() -> None:
    old = weights_of(0)
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["q"].view(torch.int16).view(-1)[:4] = torch.tensor([-0x8000, 0x7F80, 0x7FC1, 0x7FA5], dtype=torch.int16)
    model = loaded(old)
    apply(model, buckets_of(old, new))
    assert torch.equal(model.qk[:HEADS].view(torch.int16), new["q"].view(torch.int16))


def test_ranks_put_their_parts_together() -> None:
    old, new = weights_of(0), weights_of(1)
    models = [loaded(old, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(run_rank, rank, old, new) for rank in range(2)]:
            models[future.result()[0]] = future.result()[1]
    for rank, model in enumerate(models):
        assert all(map(torch.equal, model.parameters(), loaded(new, rank, 2).parameters()))


class Together:
    """The largest of each element over two threads."""

    def __init__(self) -> None:
        import threading

        self.barrier = threading.Barrier(2, timeout=20)
        self.given: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> None:
        self.given.append(tensor.clone())
        self.barrier.wait()
        tensor.copy_(torch.stack(self.given).amax(0))
        if self.barrier.wait() == 0:
            self.given.clear()
        self.barrier.wait()


GATHER = Together()


def run_rank(rank: int, old: Weights, new: Weights) -> tuple[int, Rank]:
    model = loaded(old, rank, 2)
    for bucket in buckets_of(old, new):
        apply_bucket(model.load_weights, bucket, torch.device("cpu"), GATHER)
    return rank, model


def test_no_rank_waits_for_one_that_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out, asked = broadcast_deltas._lay_out, iter([True, False])

    def on_one(*given: Any) -> Any:
        if next(asked):
            raise torch.OutOfMemoryError("out of memory")
        return lay_out(*given)

    monkeypatch.setattr(broadcast_deltas, "_lay_out", on_one)
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(run_rank, rank, weights_of(0), weights_of(1)) for rank in range(2)]
        errors = sorted(str(future.exception()) for future in ranks)
    assert errors == ["another rank of the engine has no memory for a bucket", "out of memory"]


def test_weights_that_are_not_the_base_are_refused_and_stay() -> None:
    old, new = weights_of(0), weights_of(1)
    model = loaded(weights_of(2))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(DataLoss, match="tensor q has checksum"):
        apply(model, buckets_of(old, new))
    assert all(map(torch.equal, model.parameters(), before))


def test_a_tensor_that_the_model_leaves_out_may_stay_and_not_change() -> None:
    old = weights_of(0)
    new = weights_of(1)
    extra = {"inv_freq": torch.ones(3)}
    model = loaded(old)
    apply(model, buckets_of(old | extra, new | extra))
    assert torch.equal(model.norm, new["norm"].float())
    with pytest.raises(DataLoss, match="inv_freq has changed, and the model's loader leaves it out"):
        apply(model, buckets_of(new | extra, new | {"inv_freq": torch.zeros(3)}))


LOADERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "cat": lambda target, weight: target.copy_(torch.cat([weight, weight])[:HIDDEN]),
    "add": lambda target, weight: target.copy_(weight + 1),
    "to": lambda target, weight: target.copy_(weight.to(torch.float64)),
    "item": lambda target, weight: target.fill_(weight.max().item()),
    "__setitem__": lambda target, weight: target.__setitem__(slice(None), weight),
    "spread": lambda target, weight: target.copy_(weight[:1]),
    "numpy": lambda target, weight: target.copy_(torch.from_numpy(weight.float().numpy())),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_that_does_more_than_copy_is_refused_before_it_writes(name: str) -> None:
    old, new = weights_of(0), weights_of(1)
    target = torch.full((HIDDEN,), 7.0)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            LOADERS[name](target, weight)

    (bucket,) = buckets_of({"norm": old["norm"].float()}, {"norm": new["norm"].float()})
    with pytest.raises(DataLoss, match="norm cannot be read back"):
        apply_bucket(load, bucket, torch.device("cpu"))
    assert target.tolist() == [7.0] * HIDDEN
    assert not broadcast_deltas._readings


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An engine's group of one rank, and a broadcast that fills in `sent`."""
    distributed: Any = ModuleType("sglang.srt.distributed")
    distributed.get_tp_group = lambda: SimpleNamespace(world_size=1)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", distributed)
    engine = SimpleNamespace(sent=b"")
    filled = lambda tensor, src, group: tensor.copy_(torch.frombuffer(bytearray(engine.sent), dtype=torch.uint8))  # noqa: E731
    monkeypatch.setattr(broadcast_deltas.dist, "broadcast", filled)
    return engine


def test_an_engine_tells_a_refusal_from_a_failure_and_leaves_other_updates_alone(sglang: SimpleNamespace) -> None:
    old, new = weights_of(0), weights_of(1)
    model = loaded(old)
    updater = SimpleNamespace(device="cpu", _model_update_group={"g": None}, get_model=lambda: model)

    def update(load_format: str = BROADCAST, group: str = "g") -> tuple[bool, str]:
        (sglang.sent,) = buckets_of(old, new)
        shapes, kinds = [[len(sglang.sent)]], [BROADCAST]
        return update_weights(lambda *args: (True, "own"), updater, kinds, kinds, shapes, group, load_format)

    assert update("flattened_bucket") == (True, "own")
    assert update() == (True, "Success") and torch.equal(model.norm, new["norm"].float())
    success, message = update()
    assert not success and message.startswith(f"{REFUSED}weight version 2 as a delta of 1: tensor q has checksum")
    success, message = update(group="another")
    assert not success and message == "a weight delta could not be loaded: KeyError: 'another'"
