"""Run by test_converters_cpu_shim: each case once under the whole shim, once with its own replacement left out.

Prints {case: {"with": outcome, "without": outcome}}; an outcome is "works" or the error. Each runs in a fork, so that
importing Megatron, which takes seconds, happens once.
"""

import json
import os
import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.fusions.fused_bias_swiglu import swiglu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import ConstantGradScaler
from megatron.core.pipeline_parallel.utils import get_comm_stream, get_comp_stream, set_streams
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.spec_utils import build_module

from slime.converters.megatron import cpu_shim


def start_group_of_one() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def rotary_embedding() -> None:
    assert RotaryEmbedding(8, 1.0)(4).shape == (4, 1, 1, 8)


def overlapped_communication() -> None:
    set_streams()
    get_comm_stream().wait_stream(get_comp_stream())
    with torch.cuda.stream(get_comm_stream()):
        event = torch.cuda.Event()
    event.record()
    assert event.query()


def checkpoint_buckets() -> None:
    (bucket,) = FileSystemWriterAsync.preload_tensors([("file", "key", ([], [("item", torch.ones(2))]))])
    assert bucket[2][1][0][1].tolist() == [1.0, 1.0]


def random_regions() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    outside = torch.get_rng_state()
    with tracker.fork("a"):
        first = torch.rand(3)
    with tracker.fork("b"):
        other = torch.rand(3)
    assert torch.equal(outside, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first, torch.rand(3)) and not torch.equal(first, other)


def token_counts() -> None:
    start_group_of_one()
    counts = token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([3]), as_numpy=True)
    received = torch.empty(3)
    dist.all_to_all_single(received, torch.ones(3), output_split_sizes=counts, input_split_sizes=counts)
    assert received.tolist() == [1.0] * 3


def fused_function() -> None:
    assert swiglu(torch.ones(2, 4)).shape == (2, 2)
    assert not torch._dynamo.utils.counters["frames"], "it was compiled"


def hard_coded_device() -> None:
    assert ConstantGradScaler(2.0).scale.tolist() == [2.0]
    assert torch.ones(1).cuda().type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).to("cuda:0").device == torch.empty(1, device=0, pin_memory=True).device


def hard_coded_device_in_a_thread() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with cpu_shim.on_this_thread():
                hard_coded_device()
            cpu_shim.enter_thread()
            with cpu_shim.on_this_thread():
                hard_coded_device()
            hard_coded_device()
        except BaseException as error:
            errors.append(error)

    if os.environ["LEFT_OUT"]:
        cpu_shim.enter_thread = lambda: None
        cpu_shim.CudaMeansCpu = torch.overrides.BaseTorchFunctionMode
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def router() -> None:
    hidden, weight = torch.ones(2, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    logits = moe_utils.router_gating_linear(hidden, weight, None, torch.float32)
    logits.sum().backward()
    assert logits.tolist() == [[4.0] * 3] * 2


def latent_attention() -> None:
    start_group_of_one()
    config = MLATransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True)
    spec = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    # Megatron's own core attention does not take the widths of heads that this one passes on.
    spec.submodules.core_attention = IdentityOp
    build_module(spec, config=config, layer_number=1)


def offloaded_optimizer() -> None:
    flags = ("use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload")
    assert not OptimizerConfig(optimizer="adam", **dict.fromkeys(flags, True)).store_param_remainders


CASES: dict[str, tuple[str, Callable[[], None]]] = {
    case.__name__: (replacement, case)
    for replacement, case in (
        ("current_device", rotary_embedding),
        ("streams", overlapped_communication),
        ("synchronize", checkpoint_buckets),
        ("random_numbers", random_regions),
        ("host_copies", token_counts),
        ("compiled_functions", fused_function),
        ("devices", hard_coded_device),
        ("devices", hard_coded_device_in_a_thread),
        ("router_matmul", router),
        ("latent_attention", latent_attention),
        ("library_version", offloaded_optimizer),
    )
}


def outcome(case: Callable[[], None], left_out: str) -> str:
    """Runs `case` in a fork that installs the shim without `left_out`."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ["LEFT_OUT"] = left_out
        os.dup2(2, 1)
        try:
            for name in ("WITHOUT_CUDA", "WITHOUT_TRANSFORMER_ENGINE"):
                setattr(cpu_shim, name, tuple(f for f in getattr(cpu_shim, name) if f.__name__ != left_out))
            cpu_shim.install()
            cpu_shim.install()
            case()
            text = "works"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return file.read()


if __name__ == "__main__":
    torch.set_num_threads(1)
    outcomes = {
        name: {"with": outcome(case, ""), "without": outcome(case, replacement)}
        for name, (replacement, case) in CASES.items()
    }
    json.dump(outcomes, sys.stdout)
