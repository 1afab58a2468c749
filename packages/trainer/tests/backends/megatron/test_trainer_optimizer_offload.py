"""The optimizer in host memory: the same updates, and runs that go on from a checkpoint.

Without a GPU one is played: tensors count as in its memory unless they were pinned.
tests/gpu/test_optimizer_offload.py runs the same on a real one.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary
from trainer_tiny import Runner, alone, make_samples, make_settings

from slime.converters.megatron import cpu_shim
from slime.trainer.backends.build import build_backend, open_checkpoints
from slime.trainer.backends.megatron.model import parallel
from slime.trainer.backends.megatron.optim.offload import check_optimizer
from slime.trainer.checkpoints import checkpoint
from slime.trainer.trainer import pick_device
from slime.types.errors import InvalidSetting

OFFLOAD: dict[str, Any] = {
    "use_distributed_optimizer": True, "use_precision_aware_optimizer": True, "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0, "pin_cpu_grads": False,
}  # fmt: skip
PLAIN: dict[str, Any] = {"use_distributed_optimizer": True}


class PlayedGpu(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.pinned = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return args[0] not in self.pinned
        result = args[0].clone() if func is torch.Tensor.pin_memory else func(*args, **(kwargs or {}))
        copies = (torch.Tensor.clone, torch.Tensor.detach, torch.Tensor.float)
        if func is torch.Tensor.pin_memory or (func in copies and args[0] in self.pinned):
            self.pinned[result] = True
        return result


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """A device for optimizers; what is pinned then is in host memory."""
    if torch.cuda.is_available():
        yield
        return
    cpu_shim.install()
    cpu_shim.enter_thread()
    with PlayedGpu():
        yield


class Run(Runner):
    def __init__(self, model: str, megatron: dict[str, Any], load: Path | None = None) -> None:
        settings = make_settings(model, train_backend="megatron", bf16=True, load=load and str(load))
        with on_a_gpu():
            super().__init__(settings, alone(), weights=settings.load, megatron=megatron)
        self.checkpoints = open_checkpoints(settings, self.backend, self.ranks, Path(model))
        self.state = checkpoint.TrainerState()
        if load is not None:
            self.state = checkpoint.read_state(str(load))
            with on_a_gpu():
                self.checkpoints.load(str(load), self.state)

    def steps(self, steps: range) -> list[float]:
        norms = [self.run(step, make_samples(step))["train/grad_norm"] for step in steps]
        self.state = dataclasses.replace(self.state, step=steps[-1], updates=self.backend.updates)
        return norms


def trained(model: str, megatron: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    run = Run(model, megatron)
    result = run.steps(range(4)), run.weights()
    parallel.destroy()
    return result


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_an_optimizer_in_host_memory_makes_the_same_updates(model: str, fraction: float):
    norms, weights = trained(model, OFFLOAD | {"optimizer_offload_fraction": fraction})
    expected, expected_weights = trained(model, PLAIN)
    assert norms == pytest.approx(expected, rel=1e-2)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=2e-2, atol=1e-4, msg=name)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("saved,loaded", [(OFFLOAD, OFFLOAD), (OFFLOAD, PLAIN), (PLAIN, OFFLOAD)])
def test_a_run_goes_on_from_its_checkpoint(
    model: str, tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], fraction: float
):
    of_part = {"optimizer_offload_fraction": fraction}
    straight = Run(model, saved | of_part)
    straight.steps(range(2))
    path = tmp_path / "iter_0000001"
    straight.checkpoints.save(path, straight.state)
    straight.checkpoints.finish(wait=True)
    expected, expected_weights = straight.steps(range(2, 4)), straight.weights()
    parallel.destroy()
    resumed = Run(model, loaded | of_part, path)
    found, weights = resumed.steps(range(2, 4)), resumed.weights()
    parallel.destroy()
    if saved is loaded:
        assert found == expected
        assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())
    else:
        assert found == pytest.approx(expected, rel=1e-2)


def test_what_the_optimizer_lacks_is_named(model: str, monkeypatch: pytest.MonkeyPatch):
    settings = make_settings(model, train_backend="megatron")
    precise = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}
    with on_a_gpu(), pytest.raises(InvalidSetting, match="--optimizer-cpu-offload requires --bf16"):
        build_backend(settings, alone(), pick_device(0), megatron=OFFLOAD)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(InvalidSetting, match="requires Transformer Engine or --optimizer-cpu-offload: "):
        check_optimizer(precise, bf16=True, on_gpu=True)
