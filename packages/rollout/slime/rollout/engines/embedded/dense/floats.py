"""Numbers in compiled loops: float32, bfloat16 as the uint16 of its bits, and addresses.

The intrinsics are typed by what they are given: `widened` and `narrowed` leave float32 as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Sums may be taken in any order, and a product may be added unrounded. Infinities and NaN keep their meaning.
RELAXED = {"reassoc", "contract", "nsz", "arcp", "afn"}
INT32, INT64, FLOAT32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
f32 = np.float32


@intrinsic
def widened(typingctx: Any, x: Any) -> Any:
    """Returns a float32 or bfloat16 number as float32."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if signature.args[0] == types.float32:
            return values[0]
        return builder.bitcast(builder.shl(builder.zext(values[0], INT32), INT32(16)), FLOAT32)

    return types.float32(x), build


@intrinsic
def narrowed(typingctx: Any, x: Any, like: Any) -> Any:
    """Returns a float32 number in the type of `like`, rounded to the nearest, ties to even."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if signature.return_type == types.float32:
            return values[0]
        bits = builder.bitcast(values[0], INT32)
        odd = builder.and_(builder.lshr(bits, INT32(16)), INT32(1))
        nearest = builder.add(builder.add(bits, INT32(0x7FFF)), odd)
        return builder.trunc(builder.lshr(nearest, INT32(16)), ir.IntType(16))

    return like(types.float32, like), build


@intrinsic
def power_of_two(typingctx: Any, exponent: Any) -> Any:
    """Returns two to the power of an int32 from -126 to 127, as float32."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(values[0], INT32(127)), INT32(23)), FLOAT32)

    return types.float32(types.int32), build


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """Returns an int64 as a pointer, from which `carray` makes an array."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), build


@intrinsic
def taken(typingctx: Any, counter: Any) -> Any:
    """Adds 1 to the int64 that `counter` points to, which several threads may do at once; returns what it was."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.bitcast(values[0], INT64.as_pointer()), INT64(1), "monotonic")

    return types.int64(types.voidptr), build


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Begins to read the cache line of an address, which need not be one that can be read."""

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        place = builder.inttoptr(values[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, INT32, INT32, INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, INT32(0), INT32(3), INT32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), build


@njit(inline="always", fastmath=RELAXED)
def exp_of_negative(x):  # type: ignore[no-untyped-def]
    """Returns exp(x) in float32 for x <= 0, by Cephes' polynomial (expf.c): the library's cannot be vectorized."""
    x = max(x, f32(-87.0))
    whole = np.int32(x * f32(1.44269504) - f32(0.5))
    rest = x - f32(whole) * f32(0.693359375) + f32(whole) * f32(2.12194440e-4)
    series = f32(1.9875691500e-4)
    series = series * rest + f32(1.3981999507e-3)
    series = series * rest + f32(8.3334519073e-3)
    series = series * rest + f32(4.1665795894e-2)
    series = series * rest + f32(1.6666665459e-1)
    series = series * rest + f32(5.0000001201e-1)
    return (series * rest * rest + rest + f32(1.0)) * power_of_two(whole)
