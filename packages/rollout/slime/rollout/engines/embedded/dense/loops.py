"""Loops over the tokens of a pass, compiled by numba and run by torch's own OpenMP threads.

A loop gets its arguments as int64 numbers, addresses and sizes, and each of its threads takes items until none is left.
numba keeps what it compiled for a kind of processor: in `__pycache__` beside this file, in the user's cache directory
where that cannot be written, or where NUMBA_CACHE_DIR says.

N: tokens of a pass, B: sequences that decode, H: query heads, K: key-value heads, C: tokens that a row of the cache
holds, D: size of a head, E: size of the hidden states, I: size of the gate. Elements are float32, or bfloat16 as the
uint16 of its bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite.binding import get_host_cpu_name
from numba import carray, cfunc, types
from torch import Tensor

from slime.rollout.engines.embedded.dense import floats
from slime.rollout.engines.embedded.dense.floats import (
    RELAXED,
    exp_of_negative,
    f32,
    narrowed,
    pointer,
    prefetch,
    taken,
    widened,
)

log = logging.getLogger(__name__)

ELEMENTS = {torch.float32: np.dtype(np.float32), torch.bfloat16: np.dtype(np.uint16)}
SLOTS = 16
"""The most arguments of a loop, with the counter of items and their number."""
TOGETHER = 4
"""Keys, or values, that are widened at a time, for all queries that share them; the attention names each."""
_CALLED = hashlib.sha256(Path(floats.__file__).read_bytes()).hexdigest()[:8]


def has_threads() -> bool:
    """Returns whether torch's OpenMP has the entry point of GNU's, which LLVM's and Intel's have on Linux, too."""
    return hasattr(ctypes.CDLL(None), "GOMP_parallel")


class Loop:
    """Loop over items, not for two threads at once. Tensors that it gets are contiguous, or where strides are given."""

    def __init__(self, body: Any) -> None:
        self._body, self._address = body, body.address
        self._numbers = (ctypes.c_int64 * SLOTS)()
        # Threads of another pool would wait in a busy loop for the same cores.
        self._parallel = ctypes.CDLL(None).GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def __call__(self, items: int, *arguments: Tensor | int | None) -> None:
        """Runs the loop to its end. A tensor stands for its address, None for address 0."""
        numbers = [0, items, *(a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments)]
        self._numbers[: len(numbers)] = numbers
        self._parallel(self._address, self._numbers, torch.get_num_threads(), 0)


def compile_loops(dtype: torch.dtype, size: int, group: int) -> tuple[Loop, Loop, Loop, Loop]:
    """Returns loops of norms, gates, rotary embeddings and attention, for heads of a size and so many query heads for
    each key-value head. What is compiled is shared with others; the loops are the caller's own."""
    return Loop(_norm(dtype)), Loop(_gate(dtype)), Loop(_rotation(dtype)), Loop(_attention(dtype, size, group))


def compiled(body: Any, *variant: object) -> Any:
    """Returns a body compiled, or as it was kept under its name, its variant, the processor and the code it calls."""
    options = {"fastmath": RELAXED, "error_model": "numpy"}
    # numba looks only at the file of the body, and two processes may mix up what they keep under one name.
    parts = [body.__qualname__.split(".")[0], *variant, get_host_cpu_name(), _CALLED]
    body.__qualname__ = "-".join(str(part).removeprefix("torch.") for part in parts)
    try:
        return cfunc(types.void(types.voidptr), cache=True, **options)(body)
    except Exception as error:  # a damaged file, a full disk, no directory to write to
        log.warning(
            "every start compiles the loop %s anew, because its files %s*.nb? can be neither read nor written: %s: %s",
            parts[0], body.__qualname__, type(error).__name__, error,
        )  # fmt: skip
        return cfunc(types.void(types.voidptr), **options)(body)


@cache
def _norm(dtype: torch.dtype) -> Any:
    """Returns the body of the loop over N tokens: hidden += added; out = hidden / sqrt(mean(hidden^2) + eps) * weight.

    Arguments: hidden float32 [N, E]; added [N, E] or None; weight float32 [E]; eps float32 [1]; out [N, E]; E.
    """
    element = ELEMENTS[dtype]

    def body(slots):  # type: ignore[no-untyped-def]
        numbers = carray(slots, (SLOTS,), np.int64)
        count, width = numbers[1], numbers[7]
        hidden = carray(pointer(numbers[2]), (count, width), np.float32)
        added = carray(pointer(numbers[3]), (count, width), element)
        weight = carray(pointer(numbers[4]), (width,), np.float32)
        eps = carray(pointer(numbers[5]), (1,), np.float32)[0]
        out = carray(pointer(numbers[6]), (count, width), element)
        adds = numbers[3] != 0
        while True:
            n = taken(slots)
            if n >= count:
                break
            mine, result = hidden[n], out[n]
            if adds:
                more = added[n]
                for i in range(width):
                    mine[i] += widened(more[i])
            squares = f32(0)
            for i in range(width):
                squares += mine[i] * mine[i]
            factor = f32(1) / np.sqrt(squares / f32(width) + eps)
            for i in range(width):
                result[i] = narrowed(mine[i] * factor * weight[i], result[i])

    return compiled(body, dtype)


@cache
def _gate(dtype: torch.dtype) -> Any:
    """Returns the body of the loop over N tokens: out = silu(gate) * up.

    Arguments: gate and up side by side [N, 2 x I]; out [N, I]; I.
    """
    element = ELEMENTS[dtype]

    def body(slots):  # type: ignore[no-untyped-def]
        numbers = carray(slots, (SLOTS,), np.int64)
        count, width = numbers[1], numbers[4]
        gate_up = carray(pointer(numbers[2]), (count, 2, width), element)
        out = carray(pointer(numbers[3]), (count, width), element)
        while True:
            n = taken(slots)
            if n >= count:
                break
            gate, up, result = gate_up[n, 0], gate_up[n, 1], out[n]
            for i in range(width):
                x = widened(gate[i])
                small = exp_of_negative(-abs(x))
                sigmoid = (f32(1) if x >= f32(0) else small) / (f32(1) + small)
                result[i] = narrowed(x * sigmoid * widened(up[i]), result[i])

    return compiled(body, dtype)


@cache
def _rotation(dtype: torch.dtype) -> Any:
    """Returns the body of the loop over N tokens that norms and rotates queries and keys, and writes keys and values.

    Arguments: queries, keys and values side by side [N, H + 2 x K, D]; cosines float32 [N, D]; sines float32 [N, D],
    negative in the first half; weights of the norms of heads float32 [H + K, D] or None; eps float32 [1]; rows of the
    cache int64 [N]; positions int64 [N]; the layer's keys and values in row 0 [2, K, C, D]; elements from one row to
    the next; H; K; C; D; queries to write [N, H, D].
    """
    element, itemsize = ELEMENTS[dtype], dtype.itemsize

    def body(slots):  # type: ignore[no-untyped-def]
        numbers = carray(slots, (SLOTS,), np.int64)
        count, stride, heads, kv_heads = numbers[1], numbers[10], numbers[11], numbers[12]
        capacity, size = numbers[13], numbers[14]
        half, rotated = size // 2, heads + kv_heads
        qkv = carray(pointer(numbers[2]), (count, rotated + kv_heads, size), element)
        cosines = carray(pointer(numbers[3]), (count, size), np.float32)
        sines = carray(pointer(numbers[4]), (count, size), np.float32)
        weights = carray(pointer(numbers[5]), (rotated, size), np.float32)
        eps = carray(pointer(numbers[6]), (1,), np.float32)[0]
        rows = carray(pointer(numbers[7]), (count,), np.int64)
        positions = carray(pointer(numbers[8]), (count,), np.int64)
        queries = carray(pointer(numbers[15]), (count, heads, size), element)
        normed = numbers[5] != 0
        x = np.empty(size, np.float32)
        while True:
            n = taken(slots)
            if n >= count:
                break
            cosine, sine = cosines[n], sines[n]
            row = pointer(numbers[9] + rows[n] * stride * itemsize)
            cache_2KCD = carray(row, (2, kv_heads, capacity, size), element)
            for h in range(rotated):
                head = qkv[n, h]
                for d in range(size):
                    x[d] = widened(head[d])
                if normed:
                    weight = weights[h]
                    squares = f32(0)
                    for d in range(size):
                        squares += x[d] * x[d]
                    factor = f32(1) / np.sqrt(squares / f32(size) + eps)
                    for d in range(size):
                        x[d] *= factor * weight[d]
                result = queries[n, h] if h < heads else cache_2KCD[0, h - heads, positions[n]]
                for d in range(half):
                    result[d] = narrowed(x[d] * cosine[d] + x[half + d] * sine[d], result[d])
                    result[half + d] = narrowed(x[half + d] * cosine[half + d] + x[d] * sine[half + d], result[d])
            for k in range(kv_heads):
                cache_2KCD[1, k, positions[n]] = qkv[n, rotated + k]

    return compiled(body, dtype)


@cache
def _attention(dtype: torch.dtype, size: int, group: int) -> Any:
    """Returns the body of the loop over B x K items: out = softmax(scale x query . keys) . values, up to a position.

    The loop is compiled for heads of `size` and `group` query heads for each key-value head, so that the compiler can
    unroll. The sequence i has row i of the cache. Arguments: queries [B, H, D]; positions int64 [B]; scale float32 [1];
    the layer's keys and values in row 0 [2, K, C, D]; elements from one row to the next; H; K; C; the largest position;
    out [B, H, D].
    """
    element, itemsize = ELEMENTS[dtype], dtype.itemsize

    def body(slots):  # type: ignore[no-untyped-def]
        numbers = carray(slots, (SLOTS,), np.int64)
        items, stride, heads, kv_heads = numbers[1], numbers[6], numbers[7], numbers[8]
        capacity, longest = numbers[9], numbers[10] + 1
        count = items // kv_heads
        queries = carray(pointer(numbers[2]), (count, heads, size), element)
        positions = carray(pointer(numbers[3]), (count,), np.int64)
        scale = carray(pointer(numbers[4]), (1,), np.float32)[0]
        out = carray(pointer(numbers[11]), (count, heads, size), element)
        scaled = np.empty((group, size), np.float32)
        sums = np.empty((group, size), np.float32)
        weights = np.empty((group, longest + TOGETHER), np.float32)
        widths = np.empty((TOGETHER, size), np.float32)
        token = size * itemsize
        of_head = capacity * token
        to_values = kv_heads * of_head
        item = taken(slots)
        while item < items:
            b, k = item // kv_heads, item % kv_heads
            tokens = positions[b] + 1
            # Memory is slower than what is computed here: values are fetched beside the keys, and the next keys beside
            # the values.
            first_key = numbers[5] + b * stride * itemsize + k * of_head
            keys = carray(pointer(first_key), (capacity, size), element)
            values = carray(pointer(first_key + to_values), (capacity, size), element)
            item = taken(slots)
            next_key = numbers[5] + (item // kv_heads) * stride * itemsize + (item % kv_heads) * of_head
            for g in range(group):
                query, of_group, sum_of_group = queries[b, k * group + g], scaled[g], sums[g]
                for d in range(size):
                    of_group[d] = widened(query[d]) * scale
                    sum_of_group[d] = f32(0)
            for start in range(0, tokens, TOGETHER):
                for j in range(TOGETHER):
                    key, wide = keys[min(start + j, tokens - 1)], widths[j]
                    for line in range(0, token, 64):
                        prefetch(first_key + to_values + (start + j) * token + line)
                    for d in range(size):
                        wide[d] = widened(key[d])
                # Four sums at a time, because a query would be loaded anew for each.
                k0, k1, k2, k3 = widths[0], widths[1], widths[2], widths[3]
                for g in range(group):
                    of_group, weight = scaled[g], weights[g]
                    s0, s1, s2, s3 = f32(0), f32(0), f32(0), f32(0)
                    for d in range(size):
                        x = of_group[d]
                        s0 += x * k0[d]
                        s1 += x * k1[d]
                        s2 += x * k2[d]
                        s3 += x * k3[d]
                    weight[start], weight[start + 1], weight[start + 2], weight[start + 3] = s0, s1, s2, s3
            for g in range(group):
                weight = weights[g]
                largest = f32(-np.inf)
                for t in range(tokens):
                    largest = max(largest, weight[t])
                total = f32(0)
                for t in range(tokens):
                    weight[t] = exp_of_negative(weight[t] - largest)
                    total += weight[t]
                factor = f32(1) / total
                for t in range(tokens):
                    weight[t] *= factor
                weight[tokens : tokens + TOGETHER] = f32(0)
            for start in range(0, tokens, TOGETHER):
                for j in range(TOGETHER):
                    value, wide = values[min(start + j, tokens - 1)], widths[j]
                    for line in range(0, token, 64):
                        prefetch(next_key + (start + j) * token + line)
                    for d in range(size):
                        wide[d] = widened(value[d])
                for g in range(group):
                    weight, sum_of_group = weights[g, start : start + TOGETHER], sums[g]
                    for d in range(size):
                        x = sum_of_group[d]
                        for j in range(TOGETHER):
                            x += weight[j] * widths[j, d]
                        sum_of_group[d] = x
            for g in range(group):
                result, sum_of_group = out[b, k * group + g], sums[g]
                for d in range(size):
                    result[d] = narrowed(sum_of_group[d], result[d])

    return compiled(body, dtype, size, group)
