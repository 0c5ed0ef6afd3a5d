"""Plain reading of memory: the limit that every walk over weights is measured against.

A sum of 64-byte vectors over a large buffer, by the executor's threads and on the page kind of the weights.
"""

# ruff: noqa: ARG001 - an intrinsic is typed by its arguments and uses them in the code it generates
from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from compute_node.kernels import Op, Segment, lanes
from compute_node.kernels.lanes import I8, I32, I64, i64_at
from compute_node.kernels.op import KERNEL, address_of, record

__all__ = ["plain_read"]

_PAGE: Final = 4096
_STREAMS: Final = 8


def _generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    start = builder.inttoptr(arguments[0], I8.as_pointer())
    vector = ir.VectorType(I64, 8)
    zero = ir.Constant(vector, [0] * 8)
    sums = [cgutils.alloca_once_value(builder, zero) for _ in range(_STREAMS)]
    for cell in sums:
        builder.store(zero, cell)
    with cgutils.for_range(builder, arguments[1]) as loop:
        page = lanes.offset(builder, start, builder.mul(loop.index, ir.Constant(I64, _PAGE)))
        with cgutils.for_range(builder, ir.Constant(I64, _PAGE // 64 // _STREAMS)) as inner:
            line = lanes.offset(builder, page, builder.mul(inner.index, ir.Constant(I64, 64 * _STREAMS)))
            for number, cell in enumerate(sums):
                at = builder.bitcast(lanes.offset(builder, line, number * 64), vector.as_pointer())
                lanes.prefetch(builder, lanes.offset(builder, line, _PAGE + number * 64))
                builder.store(builder.add(builder.load(at, align=8), builder.load(cell)), cell)
    total = zero
    for cell in sums:
        total = builder.add(total, builder.load(cell))
    result = ir.Constant(I64, 0)
    for lane in range(8):
        result = builder.add(result, builder.extract_element(total, ir.Constant(I32, lane)))
    return result


@intrinsic
def _sum_pages(_typing: Any, address: Any, pages: Any) -> Any:
    """Sum of the int64 values of `pages` pages of 4 KiB, modulo 2^64."""
    return types.int64(types.int64, types.int64), _generate


@cfunc(KERNEL, cache=True)
def _read_kernel(args: int, lo: int, hi: int) -> None:
    """Record: address of the bytes, address of one int64 per page of which the slice's first receives its sum."""
    m = i64_at(args)
    i64_at(m[1])[lo] = _sum_pages(m[0] + lo * 4096, hi - lo)


def plain_read(data: NDArray[np.uint8]) -> tuple[Segment, NDArray[np.int64]]:
    """A segment that reads all of `data`, a whole number of pages, and the array that receives the slices' sums."""
    pages = data.nbytes // _PAGE
    sums, rows = np.zeros(pages, np.int64), np.ones(1, np.int64)
    op = Op(
        "plain read", "plain_read", _read_kernel.address, record([address_of(data), address_of(sums)]), rows,
        units=pages, per_row=False, grain=16, work=_PAGE, keep=(data, sums),
    )  # fmt: skip
    return Segment("plain read", [op]), sums
