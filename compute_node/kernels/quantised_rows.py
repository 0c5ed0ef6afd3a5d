"""Activation rows as signed bytes: what the `fast` numerics multiply quantised weights with.

Each group of 64 columns of a row has its own scale, its largest magnitude / 127; a value becomes the nearest whole
multiple of it, ties to even, so it is off by at most 0.5001 scales. A group whose largest magnitude is below 2^-100
counts as zeros; one that holds a NaN or an infinity gets the scale NaN, which shows in every result.
"""

# ruff: noqa: ARG001 - an intrinsic is typed by its arguments and uses them in the code it generates
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from compute_node.kernels import lanes
from compute_node.kernels.batch import Batch
from compute_node.kernels.lanes import F32, I8, I32, LANES, f32_at, i64_at
from compute_node.kernels.matrix import GROUP
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from compute_node.kernels.weighted_sum import stack_floats
from tierd.errors import UsageError

__all__ = ["QuantisedRows", "quantise_rows", "quantise_span", "row_layout"]

_NOT_FINITE: Final = 0x7F800000
_SMALLEST: Final = 2.0**-100
_ROUND: Final = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, ties to even, held in the low bits


def row_layout(cols: int) -> tuple[int, int]:
    """(where the groups of a row begin, bytes of a row).

    A row holds one float32 scale per group, padded to a multiple of sixteen; as many offsets, -8 times the sum of the
    group's codes times its scale, rounded once; twice as many offsets of half a group; and 64 codes (int8) per group.
    There is an even number of groups; those beyond the columns are zeros.
    """
    groups = -(-cols // (2 * GROUP)) * 2
    start = -(-groups // LANES) * LANES * 16
    return start, start + groups * GROUP


class QuantisedRows:
    """A buffer of quantised activation rows.

    Attributes:
        max_rows: rows that fit.
        cols: columns of a row.
        data: uint8 [max_rows, bytes of a row], zeroed; see `row_layout`. Begins at a cache line.
    """

    __slots__ = ("cols", "data", "max_rows")

    def __init__(self, max_rows: int, cols: int) -> None:
        if max_rows < 1 or cols < 1:
            raise UsageError(f"no quantised rows of {max_rows} x {cols}")
        self.max_rows, self.cols = max_rows, cols
        width = row_layout(cols)[1]
        raw = np.zeros(max_rows * width + 64, np.uint8)
        skip = -address_of(raw) % 64
        self.data: NDArray[np.uint8] = raw[skip : skip + max_rows * width].reshape(max_rows, width)

    def values(self, row: int) -> NDArray[np.float32]:
        """The values that a row stands for, float32 [cols]: the reference for tests."""
        start = row_layout(self.cols)[0]
        codes = self.data[row, start:].reshape(-1, GROUP).view(np.int8).astype(np.float32)
        scales = self.data[row, :start].view(np.float32)[: len(codes)]
        values: NDArray[np.float32] = (codes * scales[:, None]).reshape(-1)[: self.cols]
        return values


def _reduced(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes of a vector of int32, combined."""
    nothing, width = ir.Constant(vector.type, ir.Undefined), vector.type.count
    while width > 1:
        width //= 2
        mask = ir.VectorType(I32, width)
        low = builder.shuffle_vector(vector, nothing, ir.Constant(mask, list(range(width))))
        high = builder.shuffle_vector(vector, nothing, ir.Constant(mask, list(range(width, 2 * width))))
        vector = combine(low, high)
        nothing = ir.Constant(vector.type, ir.Undefined)
    return builder.extract_element(vector, ir.Constant(I32, 0))


def _generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    source, scale, offset, half_offsets, target = (builder.inttoptr(a, I8.as_pointer()) for a in arguments)
    parts = [lanes.lanes_at(builder, lanes.offset(builder, source, at * LANES * 4)) for at in range(GROUP // LANES)]

    def larger(a: Any, b: Any) -> Any:
        return builder.select(builder.icmp_signed(">", a, b), a, b)

    # The bits of magnitudes are ordered like the magnitudes, with infinities and NaN above all.
    bits = [builder.and_(builder.bitcast(p, lanes.V32), lanes.lane_ints(0x7FFFFFFF)) for p in parts]
    top = _reduced(builder, larger(larger(bits[0], bits[1]), larger(bits[2], bits[3])), larger)
    magnitude = builder.bitcast(top, F32)
    usable = builder.and_(
        builder.icmp_signed("<", top, ir.Constant(I32, _NOT_FINITE)),
        builder.fcmp_ordered(">=", magnitude, ir.Constant(F32, _SMALLEST)),
    )
    zero = ir.Constant(F32, 0.0)
    inverse = builder.select(usable, builder.fdiv(ir.Constant(F32, 127.0), magnitude), zero)
    step = builder.select(usable, builder.fdiv(magnitude, ir.Constant(F32, 127.0)), zero)
    finite = builder.icmp_signed("<", top, ir.Constant(I32, _NOT_FINITE))
    step = builder.select(finite, step, ir.Constant(F32, float("nan")))
    factor = lanes.splat(builder, inverse)
    magic = ir.Constant(lanes.VF32, [_ROUND] * LANES)
    whole = []
    for part in parts:
        # A value that is no number would not round: its bits are dropped instead, the scale says it.
        rounded = builder.bitcast(builder.fadd(builder.fmul(part, factor), magic), lanes.V32)
        code = builder.sub(rounded, builder.bitcast(magic, lanes.V32))
        whole.append(builder.select(finite, code, lanes.lane_ints(0)))
    for at, part in enumerate(whole):
        place = builder.bitcast(lanes.offset(builder, target, at * LANES), ir.VectorType(I8, LANES).as_pointer())
        builder.store(builder.trunc(part, ir.VectorType(I8, LANES)), place, align=1)
    halves = [_reduced(builder, builder.add(*whole[at : at + 2]), builder.add) for at in (0, 2)]
    for total, pointer, at in (
        (None, scale, 0),
        (builder.add(*halves), offset, 0),
        (halves[0], half_offsets, 0),
        (halves[1], half_offsets, 4),
    ):
        value = step
        if total is not None:
            value = builder.fmul(builder.sitofp(builder.mul(total, ir.Constant(I32, -8)), F32), step)
        builder.store(value, builder.bitcast(lanes.offset(builder, pointer, at), F32.as_pointer()), align=4)
    return context.get_dummy_value()


@intrinsic
def _quantise_group(_typing: Any, source: Any, scale: Any, offset: Any, half_offsets: Any, target: Any) -> Any:
    """Quantises 64 float32 at `source`: its scale, its offset, those of its halves, and codes. All int64 addresses."""
    return types.void(*[types.int64] * 5), _generate


@njit(nogil=True, cache=True, error_model="numpy")
def quantise_span(source: int, row: int, start: int, first: int, end: int) -> None:
    """Quantises columns first..end of the float32 row at `source` into the quantised row at `row`.

    Args:
        source: address of the row's column 0.
        row: address of the quantised row.
        start: where its groups begin.
        first: a multiple of 64.
        end: a multiple of 64, or the number of columns.
    """
    for column in range(first, end, GROUP):
        group = column // GROUP
        at = source + column * 4
        if column + GROUP > end:
            padded, x = stack_floats(), f32_at(at)
            p = f32_at(padded)
            for j in range(GROUP):
                p[j] = x[j] if column + j < end else np.float32(0)
            at = padded
        scale, offset = row + group * 4, row + start // 4 + group * 4
        _quantise_group(at, scale, offset, row + start // 2 + group * 8, row + start + group * GROUP)


@cfunc(KERNEL, cache=True, error_model="numpy")
def _quantise_kernel(args: int, lo: int, hi: int) -> None:
    """Record: x, x stride, rows, row stride, start of groups, columns. One unit is one group of one row."""
    m = i64_at(args)
    groups = (m[5] + GROUP - 1) // GROUP
    for unit in range(lo, hi):
        row, first = unit // groups, unit % groups * GROUP
        quantise_span(m[0] + row * m[1], m[2] + row * m[3], m[4], first, min(first + GROUP, m[5]))


def quantise_rows(name: str, x: NDArray[np.float32], rows: QuantisedRows, batch: Batch) -> Op:
    """Quantises the live rows of `x`, float32 [max_rows, cols], into `rows`."""
    check_buffer(name, "x", x, (batch.max_rows, rows.cols))
    if rows.max_rows < batch.max_rows:
        raise UsageError(f"{name}: {rows.max_rows} quantised rows for a batch of {batch.max_rows}")
    start, width = row_layout(rows.cols)
    args = record([address_of(x), x.strides[0], address_of(rows.data), width, start, rows.cols])
    return Op(
        name, "quantise", _quantise_kernel.address, args, batch.count,
        units=-(-rows.cols // GROUP), per_row=True, grain=1, work=8 * GROUP, keep=(x, rows, batch),
    )  # fmt: skip
