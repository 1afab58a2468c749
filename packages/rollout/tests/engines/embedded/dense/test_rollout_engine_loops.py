"""The compiled loops of the embedded engine compute what torch does in float64, whatever the sizes."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from slime.rollout.engines.embedded import dense
from slime.rollout.engines.embedded.dense import loop_ops, loops
from slime.rollout.engines.embedded.dense import model as dense_module
from slime.rollout.engines.embedded.dense.loop_ops import LoopOps
from slime.rollout.engines.embedded.dense.model import DenseModel
from slime.rollout.engines.embedded.dense.ops import Heads, Places, TorchOps

EPS = 1e-5
# Half of the distance between two neighbours, of numbers up to 1.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
DTYPES = pytest.mark.parametrize("dtype", ROUNDING, ids=["float32", "bfloat16"])
THREADS = st.sampled_from([1, 2])
any_data = settings(max_examples=15, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def ops(dtype: torch.dtype, queries: int = 6, kv: int = 2, size: int = 16) -> LoopOps:
    return LoopOps(Heads(queries, kv, size, size**-0.5), EPS, dtype)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    limit = ROUNDING[found.dtype] * expected.abs().clamp(min=1.0) * 1.01
    assert ((found.double() - expected).abs() <= limit).all()


@DTYPES
@any_data
@given(count=st.integers(1, 20), width=st.integers(1, 80), adds=st.booleans(), threads=THREADS)
def test_a_norm_adds_what_the_last_layer_left_first(
    dtype: torch.dtype, count: int, width: int, adds: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    hidden_NE, weight_E = random(0, count, width), random(1, width)
    added_NE = random(2, count, width, dtype=dtype) if adds else None
    sum_NE = hidden_NE + added_NE if added_NE is not None else hidden_NE.clone()
    found = ops(dtype).normed(hidden_NE, added_NE, weight_E)
    assert torch.equal(hidden_NE, sum_NE)
    check(found, F.rms_norm(sum_NE.double(), (width,), weight_E.double(), EPS))


@DTYPES
@any_data
@given(count=st.integers(1, 20), width=st.integers(1, 80), scale=st.sampled_from([1.0, 40.0]), threads=THREADS)
def test_gates_are_silu_times_up(dtype: torch.dtype, count: int, width: int, scale: float, threads: int) -> None:
    torch.set_num_threads(threads)
    gate_up_NI = random(0, count, 2 * width, dtype=dtype) * scale
    gate, up = gate_up_NI.double().chunk(2, -1)
    check(ops(dtype).gated(gate_up_NI), F.silu(gate) * up)


def places(rows: list[int], positions: list[int], size: int, decoding: int) -> Places:
    angles = random(5, len(rows), size // 2)
    cosines, sines = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    longest = max(positions[:decoding], default=0)
    return Places(torch.tensor(rows), torch.tensor(positions), cosines, sines, decoding, longest)


@DTYPES
@any_data
@given(
    kv=st.integers(1, 3), group=st.integers(1, 4), size=st.sampled_from([2, 8, 16, 64]), normed=st.booleans(),
    where=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=12, unique=True),
    threads=THREADS,
)  # fmt: skip
def test_keys_and_values_reach_their_places_in_the_cache_and_nothing_else_does(
    dtype: torch.dtype, kv: int, group: int, size: int, normed: bool, where: list[tuple[int, int]], threads: int
) -> None:
    torch.set_num_threads(threads)
    heads, count = Heads(kv * group, kv, size, 1.0), len(where)
    qkv_NE = random(0, count, (heads.queries + 2 * kv) * size, dtype=dtype)
    norms_HD = random(1, heads.queries + kv, size) if normed else None
    # Rows of other layers lie between those of this one.
    caches = [random(2, 4, 3, 2, kv, 10, size, dtype=dtype) for _ in range(2)]
    rows, positions = ([place[i] for place in where] for i in range(2))
    at = places(rows, positions, size, 0)
    found = LoopOps(heads, EPS, dtype).rotated(qkv_NE, norms_HD, caches[0][:, 1], at)
    expected = TorchOps(heads, EPS, dtype).rotated(qkv_NE, norms_HD, caches[1][:, 1], at)
    check(found, expected.double())
    untouched = torch.ones(4, 10, dtype=torch.bool)
    untouched[rows, positions] = False
    for layer in range(3):
        check(caches[0][:, layer], caches[1][:, layer].double())
        same = (caches[0] == caches[1])[:, layer].movedim(3, 1)[untouched]
        assert same.all()


@DTYPES
@any_data
@given(
    kv=st.integers(1, 3), group=st.integers(1, 4), size=st.sampled_from([2, 16, 64]),
    positions=st.lists(st.integers(0, 30), min_size=1, max_size=9), threads=THREADS,
)  # fmt: skip
def test_each_sequence_sees_its_own_tokens_up_to_its_position(
    dtype: torch.dtype, kv: int, group: int, size: int, positions: list[int], threads: int
) -> None:
    torch.set_num_threads(threads)
    count = len(positions)
    heads = Heads(kv * group, kv, size, size**-0.5)
    query_BHD = random(0, count, kv * group, size, dtype=dtype)
    cache = random(1, count, 3, 2, kv, 32, size, dtype=dtype)
    for row, position in enumerate(positions):
        # NaN in later places must not be multiplied by 0.
        cache[row, :, :, :, position + 1 :] = torch.nan
    found = LoopOps(heads, EPS, dtype).attended(query_BHD, cache[:, 1], places([*range(count)], positions, size, count))
    keys, values = cache[:, 1].double().unbind(1)
    for row, position in enumerate(positions):
        seen = F.scaled_dot_product_attention(
            query_BHD[row].double().unflatten(0, (kv, group)), keys[row, :, : position + 1],
            values[row, :, : position + 1], scale=heads.scale,
        )  # fmt: skip
        check(found[row], seen.flatten())


@DTYPES
@pytest.mark.parametrize("score", [1e30, -1e30, 88.0])
def test_large_scores_do_not_overflow(dtype: torch.dtype, score: float) -> None:
    query_BHD = torch.ones(1, 6, 16, dtype=dtype)
    cache = torch.zeros(1, 1, 2, 2, 8, 16, dtype=dtype)
    cache[0, 0, 0, :, 3], cache[0, 0, 1, :, 3] = score, 1.0
    found = ops(dtype).attended(query_BHD, cache[:, 0], places([0], [5], 16, 1))
    check(found, torch.full((1, 96), 1.0 if score > 0 else 0.0, dtype=torch.float64))


@pytest.mark.parametrize("projection", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"])
def test_weights_that_are_no_numbers_show_in_the_logits(projection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, head_dim=16)
    model = Qwen3ForCausalLM(Qwen3Config(**shape, num_key_value_heads=2, vocab_size=50)).eval().requires_grad_(False)
    model.model.layers[0].get_submodule(projection).weight[0, 0] = torch.nan
    monkeypatch.setattr(dense_module, "LOOPS_FROM", 1000)
    packed, run = DenseModel(model), dense_module.Pass()
    assert type(packed._ops) is LoopOps
    packed.pack(0)
    run.decode(7, 0)
    assert packed.logits(packed.forward(run, packed.cache())).isnan().all()


def tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=1)).eval().requires_grad_(False)


def test_loops_are_for_models_that_are_worth_compiling_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(DenseModel(tiny())._ops) is TorchOps
    monkeypatch.setattr(dense_module, "LOOPS_FROM", 1000)
    assert type(DenseModel(tiny())._ops) is LoopOps


def test_without_numba_or_shared_threads_torch_computes_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dense_module, "LOOPS_FROM", 1000)
    monkeypatch.setattr(loops, "has_threads", lambda: False)
    assert type(DenseModel(tiny())._ops) is TorchOps
    assert "torch's threads have no entry point" in caplog.text
    for name in ("loop_ops", "loops", "floats"):
        monkeypatch.delitem(sys.modules, f"{dense.__name__}.{name}")
        monkeypatch.delattr(dense, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    caplog.clear()
    assert type(DenseModel(tiny())._ops) is TorchOps
    assert "numba" in caplog.text


def test_loops_that_fail_to_compile_leave_it_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(dtype: torch.dtype, size: int, group: int) -> Any:
        raise TypeError("no such type")

    monkeypatch.setattr(dense_module, "LOOPS_FROM", 1000)
    monkeypatch.setattr(loop_ops, "compile_loops", fail)
    assert type(DenseModel(tiny())._ops) is TorchOps
    assert "TypeError: no such type" in caplog.text


def test_what_is_kept_is_of_one_variant_and_compiled_anew_where_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiled = loops._gate.__wrapped__
    compiled(torch.float32)
    of_float32 = {path.name for path in tmp_path.rglob("*.nb?")}
    assert len(of_float32) == 2 and all("float32" in name for name in of_float32)
    compiled(torch.bfloat16)
    of_bfloat16 = {path.name for path in tmp_path.rglob("*.nb?")} - of_float32
    assert len(of_bfloat16) == 2 and all("bfloat16" in name for name in of_bfloat16)
    for path in tmp_path.rglob("*.nbc"):
        path.write_bytes(path.read_bytes()[:100])
    gate_up_12 = torch.tensor([[1.0, 2.0]])
    out_11 = torch.empty(1, 1)
    loops.Loop(compiled(torch.float32))(1, gate_up_12, out_11, 1)
    check(out_11, torch.tensor([[2 / (1 + math.exp(-1))]], dtype=torch.float64))
    assert "every start compiles the loop _gate anew" in caplog.text and "_gate-float32-" in caplog.text


def test_memory_of_a_result_has_the_width_of_its_call() -> None:
    few = ops(torch.float32)
    for width in (4, 64, 8):
        assert few.gated(random(width, 3, 2 * width)).shape == (3, width)


def test_an_entry_point_that_is_missing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loops.has_threads()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not loops.has_threads()


def test_models_of_several_threads_do_not_share_arguments() -> None:
    of_threads, together = [ops(torch.float32) for _ in range(2)], threading.Barrier(2)

    def run(number: int) -> bool:
        together.wait(60)
        for seed in range(number, 60, 2):
            gate_up_NI = random(seed, 4096, 512)
            gate, up = gate_up_NI.chunk(2, -1)
            if not torch.allclose(of_threads[number].gated(gate_up_NI), F.silu(gate) * up, atol=1e-5):
                return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2), timeout=120)) == [True, True]
