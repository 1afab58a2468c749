"""Updates of layers that are repacked after loading: by layers that SGLang's are modelled on, with torch on the CPU.

A dense layer gets new parameters when it is repacked, one with experts keeps and resizes its own; both get a workspace,
and are repacked from the shapes of the checkpoint only.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slime.rollout.engines.sglang import repacked

NUM_GPUS = 0
IN, OUT, GROUP, EXPERTS = 32, 6, 16, 3
SHARDS = {"q": slice(0, 2), "k": slice(2, 4), "v": slice(4, 6)}


@pytest.fixture(autouse=True)
def nothing_is_open() -> Iterator[None]:
    repacked._open.clear()
    yield
    repacked._open.clear()


class LoadedParameter(nn.Parameter):
    """A parameter with a dimension that repacking moves, and a loader that is a property."""

    def __new__(cls, data: Tensor, loader: Callable[..., None]) -> LoadedParameter:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Tensor, loader: Callable[..., None]) -> None:
        self._weight_loader = loader
        self._output_dim = 0

    @property
    def weight_loader(self) -> Callable[..., None]:
        return self._weight_loader


def load_shard(parameter: LoadedParameter, loaded: Tensor, shard: str | None = None) -> None:
    if shard is None or parameter.dim() == 1:
        parameter.data.copy_(loaded)
    else:
        assert parameter._output_dim == 0
        parameter.data[SHARDS[shard]].copy_(loaded)


class DenseScheme:
    def create_weights(self, layer: nn.Module, weight_loader: Callable[..., None]) -> None:
        packed = torch.empty(OUT, IN // 8, dtype=torch.int32)
        layer.register_parameter("weight_packed", LoadedParameter(packed, weight_loader))
        layer.register_parameter("weight_scale", LoadedParameter(torch.empty(OUT, IN // GROUP), weight_loader))
        layer.register_parameter("weight_shape", LoadedParameter(torch.empty(2, dtype=torch.int64), weight_loader))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.workspace = torch.zeros(4, dtype=torch.int32)
        layer.weight_g_idx = nn.Parameter(torch.empty(0), requires_grad=False)
        for name in ("weight_packed", "weight_scale"):
            old = layer.get_parameter(name)
            assert isinstance(old, LoadedParameter) and old._output_dim == 0, "repacked twice"
            old.data, old._output_dim = old.data.t(), 1
            old.data = old.data.contiguous().flip(0).reshape(IN // 8 if name == "weight_packed" else 2, -1)
            layer.register_parameter(name, nn.Parameter(old.data, requires_grad=False))


class ExpertsScheme:
    def create_weights(self, layer: nn.Module, weight_loader: Callable[..., None], **attributes: Any) -> None:
        for name, tensor in (
            ("w2_weight_packed", torch.empty(EXPERTS, IN // 8, OUT, dtype=torch.int32)),
            ("w2_weight_scale", torch.ones(EXPERTS, IN // GROUP, OUT)),
            ("w2_weight_shape", torch.empty(EXPERTS, 2)),
            ("w2_weight_g_idx", torch.empty(EXPERTS, IN)),
        ):
            parameter = nn.Parameter(tensor, requires_grad=False)
            for key, value in ({"weight_loader": weight_loader, "is_transposed": True} | attributes).items():
                setattr(parameter, key, value)
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if getattr(layer, "is_marlin_converted", False):
            return
        layer.w2_weight_g_idx = nn.Parameter(torch.empty(EXPERTS, 0), requires_grad=False)
        packed, scale = layer.w2_weight_packed, layer.w2_weight_scale
        assert packed.shape == (EXPERTS, IN // 8, OUT), "repacked twice"
        new = packed.flip(1).reshape(EXPERTS, IN // 16, OUT * 2)
        packed.resize_(new.shape).copy_(new)
        scale.copy_(scale.flip(2).clone())
        layer.workspace = torch.zeros(4, dtype=torch.int32)
        layer.is_marlin_converted = True


def load_expert(parameter: nn.Parameter, loaded: Tensor, weight_name: str, shard_id: str, expert_id: int) -> None:
    loaded = loaded if "shape" in weight_name else loaded.t()
    parameter.data[expert_id].copy_(loaded)


class Model(nn.Module):
    """A dense layer of three shards, and one with experts. SGLang calls schemes through the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.experts = nn.Module(), nn.Module()
        self.schemes: dict[str, Any] = {"qkv": DenseScheme(), "experts": ExpertsScheme()}
        for (name, scheme), loader in zip(self.schemes.items(), (load_shard, load_expert), strict=True):
            create = type(scheme).create_weights
            repacked.create_weights(create, scheme, layer=getattr(self, name), weight_loader=loader)

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights.items():
            layer, part, leaf = name.split(".")
            if layer == "qkv":
                parameter: Any = parameters[f"qkv.{leaf}"]
                parameter.weight_loader(parameter, tensor, part)
            else:
                parameter = parameters[f"experts.w2_{leaf}"]
                parameter.weight_loader(parameter, tensor, leaf, shard_id="w2", expert_id=int(part))

    def process(self) -> None:
        """Does what SGLang does at the end of any load from a directory."""
        for name, scheme in self.schemes.items():
            repacked.process_weights(type(scheme).process_weights_after_loading, scheme, getattr(self, name))

    def computes_with(self) -> dict[str, Tensor]:
        found = {f"{n}.{k}": p for n in self.schemes for k, p in getattr(self, n).named_parameters(recurse=False)}
        return found | {"dense workspace": self.schemes["qkv"].workspace, "workspace": self.experts.workspace}


def checkpoint(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    parts = [(f"qkv.{shard}", 2) for shard in SHARDS] + [(f"experts.{i}", OUT) for i in range(EXPERTS)]
    for name, rows in parts:
        weights[f"{name}.weight_packed"] = torch.randint(-99, 99, (rows, IN // 8), generator=random, dtype=torch.int32)
        weights[f"{name}.weight_scale"] = torch.rand(rows, IN // GROUP, generator=random)
        weights[f"{name}.weight_shape"] = torch.tensor([rows, IN])
    return weights


def loaded(seed: int) -> Model:
    model = Model()
    model.load_weights(checkpoint(seed))
    model.process()
    return model


class Manager:
    """Answers like SGLang's manager of weight updates in a scheduler."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def update(self, request: Any) -> Any:
        self.model.load_weights(request.weights)
        return Namespace(success=True, message="Success")

    def send(self, weights: dict[str, Tensor], version: str | None) -> Any:
        request = SimpleNamespace(weights=weights, weight_version=version)
        return repacked.update_weights(Manager.update, self, request)


def values(model: Model) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.computes_with().items()}


def places(model: Model) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """Returns where each tensor is, its shape, and which object it is."""
    return {name: (t.data_ptr(), tuple(t.shape), id(t)) for name, t in model.computes_with().items()}


@pytest.mark.parametrize("order", ["as loaded", "backwards"])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_an_update_in_parts_leaves_what_a_new_engine_would_have(size: int, order: str) -> None:
    model = loaded(1)
    before = places(model)
    for seed in (2, 3):
        items = list(checkpoint(seed).items())[:: 1 if order == "as loaded" else -1]
        buckets = [dict(items[i : i + size]) for i in range(0, len(items), size)]
        for bucket in buckets:
            assert Manager(model).send(bucket, str(seed) if bucket is buckets[-1] else None).success
        if order == "as loaded":
            assert values(model) == values(loaded(seed))
        assert places(model) == before


def test_the_first_load_is_that_of_sglang() -> None:
    model, scheme, layer = loaded(1), DenseScheme(), nn.Module()
    scheme.create_weights(layer, load_shard)
    for name, tensor in checkpoint(1).items():
        if name.startswith("qkv"):
            _, shard, leaf = name.split(".")
            load_shard(layer.get_parameter(leaf), tensor, shard)  # type: ignore[arg-type]
    scheme.process_weights_after_loading(layer)
    for name, tensor in layer.named_parameters():
        assert torch.equal(tensor, model.qkv.get_parameter(name))


def test_checksums_of_weights_leave_out_what_no_checkpoint_fills() -> None:
    left_out = {n for n, p in loaded(1).named_parameters() if getattr(p, "_skip_weight_check", False)}
    assert left_out == {"qkv.weight_g_idx", "experts.w2_weight_g_idx"}


def test_a_load_from_a_directory_repacks_by_itself() -> None:
    model = loaded(1)
    before = places(model)
    model.load_weights(checkpoint(2))
    model.process()
    assert (values(model), places(model)) == (values(loaded(2)), before)
    # A directory without tensors of these layers changes nothing.
    model.process()
    assert (values(model), places(model)) == (values(loaded(2)), before)


def test_memory_that_was_released_is_filled_again_with_the_workspaces_of_kernels() -> None:
    model = loaded(1)
    for tensor in model.computes_with().values():
        tensor.data.fill_(77)
    assert Manager(model).send(checkpoint(2), "2").success
    assert values(model) == values(loaded(2))


def test_layers_of_which_nothing_was_sent_stay_as_they_are() -> None:
    model = loaded(1)
    old, new = values(model), values(loaded(2))
    assert Manager(model).send({n: t for n, t in checkpoint(2).items() if n.startswith("qkv")}, "2").success
    assert values(model) == {name: (new if name.startswith("qkv") else old)[name] for name in old}


@pytest.mark.parametrize("gone", ["qkv.k.weight_scale", "experts.1.weight_packed"])
def test_a_layer_that_came_in_part_fails_the_update(gone: str) -> None:
    model = loaded(1)
    answer = Manager(model).send({n: t for n, t in checkpoint(2).items() if n != gone}, "2")
    assert not answer.success
    assert "a weight update lacks 1 tensor of a Module" in answer.message and gone.split(".")[-1] in answer.message, (
        answer.message
    )
    # The next update is whole.
    assert Manager(model).send(checkpoint(3), "3").success
    assert values(model) == values(loaded(3))


def test_a_failure_of_sglang_is_passed_on() -> None:
    model = loaded(1)
    manager = Manager(model)
    request = SimpleNamespace(weights=checkpoint(2), weight_version="2")
    failed = Namespace(success=False, message="no")
    assert repacked.update_weights(lambda _, __: failed, manager, request) is failed


def test_parameters_that_no_checkpoint_filled_cannot_be_updated() -> None:
    model = Model()
    model.process()
    with pytest.raises(RuntimeError, match="a weight update brings weight_packed of Module, which this engine did not"):
        model.load_weights(checkpoint(1))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_updates_arrive_in_the_modes_in_which_sglang_serves(mode: Callable[[], Any]) -> None:
    model = loaded(1)
    with mode():
        for version in (2, 3):
            assert Manager(model).send(checkpoint(version), str(version)).success
    assert values(model) == values(loaded(3))


def test_a_model_that_kept_its_first_parameters_can_be_updated_through_them() -> None:
    model = Model()
    first = dict(model.named_parameters())
    model.load_weights(checkpoint(1))
    model.process()
    model.named_parameters = lambda: iter(first.items())  # type: ignore[method-assign, assignment, misc]
    model.load_weights(checkpoint(2))
    del model.named_parameters
    repacked.repack_all()
    assert values(model) == values(loaded(2))


def test_layers_that_were_created_before_the_hooks_are_left_to_sglang() -> None:
    layer, calls = nn.Module(), []
    repacked.process_weights(lambda scheme, layer: calls.append((scheme, layer)), "scheme", layer)
    assert calls == [("scheme", layer)]


def test_several_threads_load_one_layer() -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = loaded(1)
    with ThreadPoolExecutor(8) as pool:
        parts = [pool.submit(partial(model.load_weights, {n: t})) for n, t in checkpoint(2).items()]
        for part in parts:
            part.result(timeout=30)
    repacked.repack_all()
    assert values(model) == values(loaded(2))
