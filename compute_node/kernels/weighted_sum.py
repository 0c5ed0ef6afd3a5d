"""Weighted sum of rows: `out[d] = sum over j of p[j] * v[j, d]`, each column by fma from zero in rising j."""

# ruff: noqa: ARG001 - an intrinsic is typed by its arguments and uses them in the code it generates
from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from compute_node.kernels import lanes
from compute_node.kernels.lanes import F32, I8, I64, LANES

__all__ = ["stack_floats", "weighted_sum"]

STACK_FLOATS: Final = 1024
"""float32 values of one `stack_floats` buffer."""


@intrinsic
def stack_floats(_typing: Any) -> Any:
    """Address of 1024 float32 on the stack of the calling kernel, for the length of its call; not cleared."""

    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        buffer = cgutils.alloca_once(builder, ir.ArrayType(F32, STACK_FLOATS))
        return builder.ptrtoint(buffer, I64)

    return types.int64(), generate


def _columns(builder: Any, p: Any, v: Any, stride: Any, count: Any, out: Any, vectors: int) -> None:
    """Finishes `vectors` times 16 columns (or a single one for 0), kept in registers while the rows pass."""
    zero = lanes.zero_lanes() if vectors else ir.Constant(F32, 0.0)
    sums = [cgutils.alloca_once(builder, zero.type) for _ in range(max(vectors, 1))]
    for cell in sums:
        builder.store(zero, cell)
    with cgutils.for_range(builder, count) as loop:
        weight = builder.load(builder.gep(p, [loop.index]))
        row = lanes.offset(builder, v, builder.mul(loop.index, stride))
        factor = lanes.splat(builder, weight) if vectors else weight
        for i, cell in enumerate(sums):
            at = lanes.offset(builder, row, i * LANES * 4)
            value = lanes.lanes_at(builder, at) if vectors else builder.load(builder.bitcast(at, F32.as_pointer()))
            builder.store(lanes.fma(builder, factor, value, builder.load(cell)), cell)
    for i, cell in enumerate(sums):
        target = builder.bitcast(lanes.offset(builder, out, i * LANES * 4), zero.type.as_pointer())
        builder.store(builder.load(cell), target, align=4)


def _generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    weights, rows, stride, count, width, result = arguments
    p = builder.inttoptr(weights, F32.as_pointer())
    v, out = builder.inttoptr(rows, I8.as_pointer()), builder.inttoptr(result, I8.as_pointer())
    done: Any = ir.Constant(I64, 0)
    for vectors in (4, 1, 0):
        columns = vectors * LANES or 1
        steps = builder.udiv(builder.sub(width, done), ir.Constant(I64, columns))
        with cgutils.for_range(builder, steps) as loop:
            at = builder.mul(builder.add(done, builder.mul(loop.index, ir.Constant(I64, columns))), ir.Constant(I64, 4))
            _columns(builder, p, lanes.offset(builder, v, at), stride, count, lanes.offset(builder, out, at), vectors)
        done = builder.add(done, builder.mul(steps, ir.Constant(I64, columns)))
    return context.get_dummy_value()


@intrinsic
def weighted_sum(_typing: Any, p: Any, v: Any, stride: Any, count: Any, width: Any, out: Any) -> Any:
    """Writes the weighted sum of `count` rows of `width` float32, `stride` bytes apart.

    All arguments are int64: addresses of the weights, the first row and the result, and sizes.
    """
    return types.void(*[types.int64] * 6), _generate
