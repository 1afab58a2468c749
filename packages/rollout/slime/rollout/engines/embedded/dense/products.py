"""Products of bfloat16 matrices, compiled by numba for processors that multiply pairs of bfloat16 (AVX512-BF16).

A matrix is packed into panels of 48 outputs, in which the weights of two inputs lie side by side for each output. The
sums of 8 tokens and a panel fill 24 of the processor's 32 registers: each instruction multiplies and adds 32 weights.
Meanwhile the next panel is fetched, because weights come from memory: no cache holds them until the next token.

N: tokens, I: inputs, O: outputs, P: panels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from slime.rollout.engines.embedded.dense.floats import FLOAT32, INT32, INT64, narrowed, pointer, taken
from slime.rollout.engines.embedded.dense.loops import ELEMENTS, SLOTS, Loop, compiled
from slime.rollout.engines.embedded.dense.matrices import Matrix

LANES, VECTORS, ROWS = 16, 3, 8
"""Sums of a register; registers for the outputs of a panel; tokens that are multiplied together."""
COLUMNS = LANES * VECTORS
"""Outputs of a panel."""
TOGETHER = 256
"""The most tokens that are multiplied by all panels before the next are, a multiple of 8."""


def multiplies_pairs() -> bool:
    """Returns whether these products are the fastest here. Processors with AMX have instructions that oneDNN uses."""
    features = get_host_cpu_features()
    return features.get("avx512bf16", False) and not features.get("amx-bf16", False)


def in_panels(weight_OI: Tensor) -> Tensor:
    """Returns a bfloat16 matrix in panels, int32 [P, I / 2, 48] with two weights each. I is even.

    The last panel is filled up with zeros.
    """
    if weight_OI.storage_offset() % 2:
        weight_OI = weight_OI.clone()
    pairs = weight_OI.contiguous().view(torch.int32)
    if len(pairs) % COLUMNS:
        pairs = F.pad(pairs, (0, 0, 0, -len(pairs) % COLUMNS))
    return pairs.view(-1, COLUMNS, pairs.shape[1]).transpose(1, 2).contiguous()


class Products:
    """The compiled loops of a model's products, and the memory of their results. Not for two threads at once."""

    def __init__(self) -> None:
        self._loops = {dtype: Loop(_product(dtype)) for dtype in ELEMENTS}
        self._memory = torch.empty(0, dtype=torch.bfloat16)

    def multiply(self, x_NI: Tensor, panels: Tensor, bias_O: Tensor | None, out_NO: Tensor) -> None:
        """Writes x . weight^T + bias to `out_NO`, float32 or bfloat16 with contiguous rows. bias_O: float32."""
        (count, inputs), outputs = x_NI.shape, out_NO.shape[1]
        # Tokens of a chunk stay in the cache. Each thread takes a few items, so that none waits long for the last.
        chunk, few = min(count, TOGETHER), 4 * torch.get_num_threads()
        while chunk > ROWS and len(panels) * -(-count // chunk) < few:
            chunk = -(-chunk // 2 // ROWS) * ROWS
        self._loops[out_NO.dtype](
            len(panels) * -(-count // chunk), x_NI, panels, bias_O, out_NO, count, inputs, outputs, chunk,
            out_NO.stride(0),
        )  # fmt: skip

    def memory(self, count: int, width: int) -> Tensor:
        """Returns a bfloat16 tensor [count, width] whose contents last until the next call."""
        if len(self._memory) < count * width:
            self._memory = torch.empty(count * width, dtype=torch.bfloat16)
        return self._memory[: count * width].view(count, width)


class PanelMatrix(Matrix):
    """Matrix of bfloat16 weights [O, I] in panels."""

    def __init__(self, products: Products, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._products = products
        self._outputs = len(weight_OI)
        self._panels = in_panels(weight_OI)
        self._bias = None if bias_O is None else bias_O.float()

    def __call__(self, x_NI: Tensor, out_NO: Tensor | None = None) -> Tensor:
        if out_NO is None:
            out_NO = self._products.memory(len(x_NI), self._outputs)
        self._products.multiply(x_NI[: len(out_NO)].contiguous(), self._panels, self._bias, out_NO)
        return out_NO


@intrinsic
def multiply_tile(
    typingctx: Any, x: Any, stride: Any, last: Any, panel: Any, pairs: Any, ahead: Any, step: Any, sums: Any
) -> Any:
    """Writes the products of 8 rows of x and a panel to `sums`, float32 [8, 48].

    x: address of the first row; stride: bytes from row to row; last: index of the row that takes the place of those
    after it; panel: its address; pairs: I / 2; ahead: address to fetch from meanwhile, `step` bytes for each pair.
    """

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        start, stride, last, panel, pairs, ahead, step, sums = values
        floats, pairs_16 = ir.VectorType(FLOAT32, LANES), ir.VectorType(INT32, LANES)
        byte = ir.IntType(8).as_pointer()

        def function(name: str, result: Any, *arguments: Any) -> Any:
            return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)

        def load(address: Any, kind: Any) -> Any:
            return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)

        # LLVM takes its former signature, with pairs as int32, too.
        multiply_add = function("llvm.x86.avx512bf16.dpbf16ps.512", floats, floats, pairs_16, pairs_16)
        fetch = function("llvm.prefetch.p0", ir.VoidType(), byte, INT32, INT32, INT32)
        zeros, first_lane = ir.Constant(floats, [0.0] * LANES), ir.Constant(pairs_16, [0] * LANES)
        undefined = ir.Constant(pairs_16, ir.Undefined)
        totals = [[cgutils.alloca_once_value(builder, zeros) for _ in range(VECTORS)] for _ in range(ROWS)]
        rows = []
        for row in range(ROWS):
            index = builder.select(builder.icmp_signed("<", INT64(row), last), INT64(row), last)
            rows.append(builder.add(start, builder.mul(index, stride)))
        with cgutils.for_range(builder, pairs, intp=INT64) as loop:
            place = builder.add(panel, builder.mul(loop.index, INT64(COLUMNS * 4)))
            weights = [load(builder.add(place, INT64(v * LANES * 4)), pairs_16) for v in range(VECTORS)]
            later = builder.add(ahead, builder.mul(loop.index, step))
            builder.call(fetch, [builder.inttoptr(later, byte), INT32(0), INT32(3), INT32(1)])
            for row in range(ROWS):
                pair = load(builder.add(rows[row], builder.mul(loop.index, INT64(4))), INT32)
                pair = builder.insert_element(undefined, pair, INT32(0))
                pair = builder.shuffle_vector(pair, undefined, first_lane)
                for v in range(VECTORS):
                    total = totals[row][v]
                    builder.store(builder.call(multiply_add, [builder.load(total), pair, weights[v]]), total)
        data = builder.ptrtoint(context.make_array(signature.args[7])(context, builder, value=sums).data, INT64)
        for number, total in enumerate(total for of_row in totals for total in of_row):
            place = builder.add(data, INT64(number * LANES * 4))
            builder.store(builder.load(total), builder.inttoptr(place, floats.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, sums), build


@cache
def _product(dtype: torch.dtype) -> Any:
    """Returns the body of the loop over chunks of tokens x P: out = x . weight^T + bias, in `dtype`.

    Arguments: x bfloat16 [N, I]; panels; bias float32 [O] or None; out [N, O]; N; I; O; tokens of a chunk, a multiple
    of 8 unless there is one chunk; elements from one row of `out` to the next.
    """
    element, itemsize = ELEMENTS[dtype], dtype.itemsize

    def body(slots):  # type: ignore[no-untyped-def]
        numbers = carray(slots, (SLOTS,), np.int64)
        items, x, panels = numbers[1], numbers[2], numbers[3]
        count, inputs, outputs, chunk, stride = numbers[6], numbers[7], numbers[8], numbers[9], numbers[10]
        bias = carray(pointer(numbers[4]), (outputs,), np.float32)
        has_bias = numbers[4] != 0
        of_chunk = -(-outputs // COLUMNS)
        panel_bytes, row_bytes, pairs = COLUMNS * inputs * 2, inputs * 2, inputs // 2
        # Beside each 8 tokens a part of the next panel, 192 bytes for each pair, is fetched in lines of 64 bytes.
        step = max(24, min(64, 192 // -(-chunk // ROWS)))
        sums = np.empty((ROWS, COLUMNS), np.float32)
        item = taken(slots)
        while item < items:
            panel, first = panels + item % of_chunk * panel_bytes, item % of_chunk * COLUMNS
            start = item // of_chunk * chunk
            item = taken(slots)
            ahead = panels + item % of_chunk * panel_bytes
            columns = min(outputs - first, COLUMNS)
            end = min(start + chunk, count)
            for row in range(start, end, ROWS):
                rows = min(end - row, ROWS)
                multiply_tile(x + row * row_bytes, row_bytes, rows - 1, panel, pairs, ahead, step, sums)
                ahead += pairs * step
                for r in range(rows):
                    of_row = sums[r]
                    place = numbers[5] + ((row + r) * stride + first) * itemsize
                    result = carray(pointer(place), (columns,), element)
                    if has_bias:
                        for c in range(columns):
                            of_row[c] += bias[first + c]
                    for c in range(columns):
                        result[c] = narrowed(of_row[c], result[c])

    return compiled(body, dtype)
