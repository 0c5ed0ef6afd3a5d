"""Walks over rows of a matrix: their dot products with one to four activation rows, left where they belong.

A walk is one piece of machine code for a whole slice of outputs: it goes through the weight rows a few at a time, so
that a weight is loaded and unpacked once for all activation rows, and nothing is set up again between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from compute_node.kernels import lanes
from compute_node.kernels.block_dots import block_float4, block_float8, block_int4
from compute_node.kernels.block_integer_dots import fast_float4, fast_small_int4
from compute_node.kernels.dots import Builder, Dots, flat_bf16, flat_f32, flat_int8, grouped_int4, pointers, tile_of
from compute_node.kernels.integer_dots import fast_int4, fast_int8, fast_int8_wide, int4_tile, widened
from compute_node.kernels.lanes import F32, I8, I64

__all__ = [
    "walk_bf16",
    "walk_f32",
    "walk_fast_float4",
    "walk_fast_int4",
    "walk_fast_int8",
    "walk_fast_small_int4",
    "walk_float4",
    "walk_float8",
    "walk_int4",
    "walk_int8",
    "walk_small_int4",
]

_WORTH_WIDENING: Final = 3
"""Activation rows from which it pays to widen them, and the weights with them."""

_WIDE: Final = fast_int8_wide if lanes.has_feature("avx2") and not lanes.has_feature("avx512vnni") else None


def _asked_for(builder: Builder, address: Any, end: Any, following: Any) -> Any:
    """Byte pointer to an address, or, where that lies beyond the end, to as many bytes beyond what follows."""
    beyond = builder.sub(address, builder.ptrtoint(end, I64))
    inside = builder.icmp_signed("<", beyond, ir.Constant(I64, 0))
    return builder.inttoptr(builder.select(inside, address, builder.add(following, beyond)), I8.as_pointer())


def _walk(dots: Dots, wide: Dots | None = None, tile: Callable[[int], int] = tile_of) -> Callable[..., Any]:
    """The body of an intrinsic that leaves the dot products of a span of weight rows in rows of outputs.

    Args:
        dots: of a few weight rows.
        wide: what is used in its place for three or four rows, which are widened first.
        tile: weight rows that are computed together with so many activation rows.
    """

    def generate(context: Any, builder: Builder, _signature: Any, arguments: Any) -> Any:
        weights, span = (cgutils.unpack_tuple(builder, value) for value in arguments[:2])
        x, y = (pointers(builder, value) for value in arguments[2:])
        data, step, scales, scales_step, shift, cols = weights
        first, end, ahead, following = span
        before = widened(builder, x, cols) if wide is not None and len(x) >= _WORTH_WIDENING else None
        size = tile(len(x))
        last = builder.sub(end, ir.Constant(I64, 1))
        tiles = builder.udiv(builder.add(builder.sub(last, first), ir.Constant(I64, size)), ir.Constant(I64, size))

        def row_of(base: Any, distance: Any, number: Any) -> Any:
            return builder.inttoptr(builder.add(base, builder.mul(distance, number)), I8.as_pointer())

        with cgutils.for_range(builder, tiles) as loop:
            start = builder.add(first, builder.mul(loop.index, ir.Constant(I64, size)))
            outputs = [start]
            for number in range(1, size):  # beyond the end the last one is computed again: same value, same place
                place = builder.add(start, ir.Constant(I64, number))
                inside = builder.icmp_signed("<", place, last)
                outputs.append(builder.select(inside, place, last))
            w = [row_of(data, step, o) for o in outputs]
            s = [row_of(scales, scales_step, builder.lshr(o, shift)) for o in outputs]
            after = _asked_for(
                builder, builder.add(builder.ptrtoint(w[0], I64), ahead), row_of(data, step, end), following
            )
            if wide is not None and before is not None:
                totals = wide(builder, w, before, x, cols, after)
            else:
                totals = dots(builder, w, s, x, cols, after)
            for number, total in enumerate(totals):
                row, place = divmod(number, size)
                typed = builder.bitcast(y[row], F32.as_pointer())
                builder.store(total, builder.gep(typed, [outputs[place]]), align=4)
        return context.get_dummy_value()

    return generate


@intrinsic
def walk_f32(_typing: Any, weights: Any, span: Any, x: Any, y: Any) -> Any:
    """Leaves the dot products of float32 weight rows with one to four activation rows in rows of outputs.

    Args:
        weights: six int64: address of the data and distance of rows in bytes, the same of scales, the binary logarithm
            of how many rows share a row of scales, columns.
        span: four int64: the first output, the one behind the last, how many bytes ahead weights are asked for, and at
            which address those are that come behind the last.
        x: addresses of activation rows.
        y: addresses of as many float32 rows of outputs.
    """
    return types.void(weights, span, x, y), _walk(flat_f32)


@intrinsic
def walk_bf16(_typing: Any, weights: Any, span: Any, x: Any, y: Any) -> Any:
    """The same for bf16 weights."""
    return types.void(weights, span, x, y), _walk(flat_bf16)


@intrinsic
def walk_int8(_typing: Any, weights: Any, span: Any, x: Any, y: Any) -> Any:
    """The same for int8 weights, before the row's scale."""
    return types.void(weights, span, x, y), _walk(flat_int8)


@intrinsic
def walk_int4(_typing: Any, weights: Any, span: Any, x: Any, y: Any) -> Any:
    """The same for `int4-g64` weights."""
    return types.void(weights, span, x, y), _walk(grouped_int4)


@intrinsic
def walk_float8(_typing: Any, weights: Any, span: Any, x: Any, y: Any) -> Any:
    """The same for `fp8-e4m3` weights."""
    return types.void(weights, span, x, y), _walk(block_float8)


@intrinsic
def walk_float4(_typing: Any, weights: Any, span: Any, x: Any, y: Any) -> Any:
    """The same for `mxfp4` weights."""
    return types.void(weights, span, x, y), _walk(block_float4)


@intrinsic
def walk_small_int4(_typing: Any, weights: Any, span: Any, x: Any, y: Any) -> Any:
    """The same for `int4-g32` weights."""
    return types.void(weights, span, x, y), _walk(block_int4)


@intrinsic
def walk_fast_int8(_typing: Any, weights: Any, span: Any, x: Any, y: Any) -> Any:
    """The same for int8 weights with quantised rows, before the row's scale."""
    return types.void(weights, span, x, y), _walk(fast_int8, _WIDE)


@intrinsic
def walk_fast_int4(_typing: Any, weights: Any, span: Any, x: Any, y: Any) -> Any:
    """The same for `int4-g64` weights with quantised rows."""
    return types.void(weights, span, x, y), _walk(fast_int4, tile=int4_tile)


@intrinsic
def walk_fast_float4(_typing: Any, weights: Any, span: Any, x: Any, y: Any) -> Any:
    """The same for `mxfp4` weights with quantised rows."""
    return types.void(weights, span, x, y), _walk(fast_float4)


@intrinsic
def walk_fast_small_int4(_typing: Any, weights: Any, span: Any, x: Any, y: Any) -> Any:
    """The same for `int4-g32` weights with quantised rows."""
    return types.void(weights, span, x, y), _walk(fast_small_int4)
