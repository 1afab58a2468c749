"""Replacements that megatron-core 0.16.1 needs on a machine without CUDA.

    cpu_shim.install()                          once a process, before Megatron's own functions are called
    with cpu_shim.on_this_thread(): ...         in each other thread that calls Megatron
    ThreadPoolExecutor(1, initializer=cpu_shim.enter_thread)

With CUDA, nothing below is replaced but `WITHOUT_TRANSFORMER_ENGINE`: three faults of Megatron that also occur on a GPU
if Transformer Engine is missing. Each replacement is a function whose docstring says why it is needed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_thread = threading.local()
_done: set[str] = set()


def install() -> None:
    """Replaces what `WITHOUT_CUDA` lists where CUDA is absent, and `WITHOUT_TRANSFORMER_ENGINE` where that is.

    Idempotent. The mode for hard-coded devices holds for the calling thread only, see `enter_thread`.
    """
    wanted = () if torch.cuda.is_available() else WITHOUT_CUDA
    if importlib.util.find_spec("transformer_engine") is None:
        wanted += WITHOUT_TRANSFORMER_ENGINE
    for replace in wanted:
        if replace.__name__ not in _done:
            replace()
            _done.add(replace.__name__)


def enter_thread() -> None:
    """Makes CUDA devices mean the CPU for the rest of this thread. Idempotent; does nothing if CUDA is available.

    PyTorch keeps function modes by thread. A backward pass over CPU tensors runs in the thread that calls it, under its
    mode, so autograd needs no more; a pool of workers takes this as its initializer.
    """
    if torch.cuda.is_available() or getattr(_thread, "mode", None) is not None:
        return
    _thread.mode = CudaMeansCpu()
    _thread.mode.__enter__()


@contextlib.contextmanager
def on_this_thread() -> Iterator[None]:
    """Enters this thread for a block; the thread may have entered already."""
    if torch.cuda.is_available() or getattr(_thread, "mode", None) is not None:
        yield
        return
    _thread.mode = CudaMeansCpu()
    try:
        with _thread.mode:
            yield
    finally:
        _thread.mode = None


class CudaMeansCpu(TorchFunctionMode):
    """Megatron writes device="cuda", `.cuda()` and `.type() == "torch.cuda.FloatTensor"` in its optimizers, schedules,
    checkpoints and its tensor parallel data; there is no setting for them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and args[0].device == _CPU:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        # Pinned memory serves copies to a GPU, and allocating it needs one.
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    # A bare integer is the index of an accelerator, as torch.cuda.current_device returns it.
    return isinstance(device, int) and not isinstance(device, bool)


class NoStream:
    """A stream or an event of a machine where all work is done when the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def _nothing(self, *args: object, **kwargs: object) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, *args: object) -> NoStream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, *args: object) -> float:
        return 0.0

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


_ONLY_STREAM = NoStream()


def current_device() -> None:
    """Makes the CPU the current device, on which rotary embeddings, buffers and pipeline messages are allocated."""
    _replace(torch.cuda, current_device=lambda: _CPU, set_device=lambda *args: None)


def streams() -> None:
    """Replaces streams, which the all-to-all of MoE layers, the overlap of communication and the offloaded optimizer
    make without regard to the device."""
    _replace(
        torch.cuda,
        Stream=NoStream,
        Event=NoStream,
        stream=lambda *args: contextlib.nullcontext(),
        set_stream=lambda *args: None,
        current_stream=lambda *args: _ONLY_STREAM,
        default_stream=lambda *args: _ONLY_STREAM,
    )


def synchronize() -> None:
    """Replaces waits for the device, which saving a torch_dist checkpoint and pipeline messages make, by nothing."""
    _replace(torch.cuda, synchronize=lambda *args: None, empty_cache=lambda: None)


def random_numbers() -> None:
    """Makes the CPU's generator the device's.

    Megatron's tracker keeps a state of the CUDA generator for each kind of region, and seeds through torch.cuda, which
    does nothing without CUDA.
    """
    from megatron.core.tensor_parallel import random

    def get(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def put(state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    _replace(
        torch.cuda, get_rng_state=get, set_rng_state=put, manual_seed=torch.manual_seed, manual_seed_all=_ignored_seed
    )
    _replace(random, _get_cuda_rng_state=get, _set_cuda_rng_state=put)
    # Megatron compares the CPU and GPU generators, which are the same here.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed within GPU RNG context" not in record.getMessage()
    )


def _ignored_seed(seed: int) -> None:
    """Does nothing: torch.manual_seed calls torch.cuda.manual_seed_all, which must not call back."""


def host_copies() -> None:
    """Honours `as_numpy` for CPU tensors too: without it the token dispatchers fail on the tensor they get."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    for module in (moe_utils, token_dispatcher):
        _replace(module, maybe_move_tensor_to_cpu=move)


def compiled_functions() -> None:
    """Runs eagerly the functions that Megatron decorates with torch.compile while it is imported, such as the router's:
    on a CPU each costs seconds and a C++ compiler."""
    torch.compiler.set_stance("force_eager")


def devices() -> None:
    """Installs `CudaMeansCpu`."""
    enter_thread()


def router_matmul() -> None:
    """Sets `te_general_gemm` to None: moe_utils reads it always, and defines it only with Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    _replace(moe_utils, te_general_gemm=None)


def latent_attention() -> None:
    """Tells multi_latent_attention that Transformer Engine is absent. It concludes the opposite because
    megatron.core.extensions.transformer_engine can be imported, and then calls isinstance with a placeholder that is
    not a class."""
    from megatron.core.transformer import multi_latent_attention

    _replace(multi_latent_attention, HAVE_TE=False)


def library_version() -> None:
    """Gives Transformer Engine a version: OptimizerConfig compares the version before it asks whether the package is
    installed, and would compare None with a version."""
    from megatron.core import utils

    _replace(utils, _te_version=utils.PkgVersion("0"))


def _replace(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


WITHOUT_CUDA: tuple[Callable[[], None], ...] = (
    current_device,
    streams,
    synchronize,
    random_numbers,
    host_copies,
    compiled_functions,
    devices,
)
WITHOUT_TRANSFORMER_ENGINE: tuple[Callable[[], None], ...] = (
    router_matmul,
    latent_attention,
    library_version,
)
