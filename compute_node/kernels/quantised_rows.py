"""Activation rows as signed bytes: what the `fast` numerics multiply quantised weights with.

Each group of 64 columns of a row has its own scale, its largest magnitude / 127; a value becomes the nearest whole
multiple of it, ties to even, so it is off by at most 0.5001 scales. A group whose largest magnitude is below 2^-100
counts as zeros; one that holds a NaN or an infinity gets the scale NaN, which shows in every result.
"""

# ruff: noqa: ARG001 - an intrinsic is typed by its arguments and uses them in the code it generates
from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from compute_node.kernels import lanes
from compute_node.kernels.batch import Batch
from compute_node.kernels.integer_dots import V64, dot_bytes
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

    A row holds float32 scales, padded to a multiple of sixteen, then per group 64 codes (int8) and sixteen offsets
    (int32): -8 times the sums of four neighbouring codes. There is an even number of groups; those beyond the columns
    are zeros.
    """
    groups = -(-cols // (2 * GROUP)) * 2
    start = -(-groups // LANES) * LANES * 4
    return start, start + groups * 2 * GROUP


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
        groups = self.data[row, start:].reshape(-1, 2 * GROUP)
        scales = self.data[row, :start].view(np.float32)[: len(groups)]
        codes = groups[:, :GROUP].view(np.int8).astype(np.float32)
        values: NDArray[np.float32] = (codes * scales[:, None]).reshape(-1)[: self.cols]
        return values


def _generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    source, scale, target = (builder.inttoptr(a, I8.as_pointer()) for a in arguments)
    parts = [lanes.lanes_at(builder, lanes.offset(builder, source, at * LANES * 4)) for at in range(GROUP // LANES)]
    # The bits of magnitudes are ordered like the magnitudes, with infinities and NaN above all.
    bits = [builder.and_(builder.bitcast(p, lanes.V32), lanes.lane_ints(0x7FFFFFFF)) for p in parts]
    while len(bits) > 1:
        bits = [
            builder.select(builder.icmp_signed(">", a, b), a, b) for a, b in zip(bits[::2], bits[1::2], strict=True)
        ]
    largest, width = bits[0], LANES
    while width > 1:
        width //= 2
        mask = ir.VectorType(I32, width)
        nothing = ir.Constant(largest.type, ir.Undefined)
        low = builder.shuffle_vector(largest, nothing, ir.Constant(mask, list(range(width))))
        high = builder.shuffle_vector(largest, nothing, ir.Constant(mask, list(range(width, 2 * width))))
        largest = builder.select(builder.icmp_signed(">", low, high), low, high)
    top = builder.extract_element(largest, ir.Constant(I32, 0))
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
    builder.store(step, builder.bitcast(scale, F32.as_pointer()), align=4)
    factor = lanes.splat(builder, inverse)
    magic = ir.Constant(lanes.VF32, [_ROUND] * LANES)
    codes = []
    for part in parts:
        # A value that is no number would not round: its bits are dropped instead, the scale says it.
        rounded = builder.bitcast(builder.fadd(builder.fmul(part, factor), magic), lanes.V32)
        whole = builder.sub(rounded, builder.bitcast(magic, lanes.V32))
        codes.append(builder.trunc(whole, ir.VectorType(I8, LANES)))
    while len(codes) > 1:
        both = ir.VectorType(I32, 2 * codes[0].type.count)
        order = ir.Constant(both, list(range(both.count)))
        codes = [builder.shuffle_vector(a, b, order) for a, b in zip(codes[::2], codes[1::2], strict=True)]
    still = builder.select(finite, codes[0], ir.Constant(V64, [0] * GROUP))
    builder.store(still, builder.bitcast(target, V64.as_pointer()), align=1)
    offsets = builder.sub(lanes.lane_ints(0), dot_bytes(builder, 8, still))
    place = lanes.offset(builder, target, GROUP)
    builder.store(offsets, builder.bitcast(place, lanes.V32.as_pointer()), align=1)
    return context.get_dummy_value()


@intrinsic
def _quantise_group(_typing: Any, source: Any, scale: Any, target: Any) -> Any:
    """Quantises 64 float32 at `source`: its scale to `scale`, codes and offsets to `target`. All int64 addresses."""
    return types.void(*[types.int64] * 3), _generate


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
        _quantise_group(at, row + group * 4, row + start + group * 2 * GROUP)


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
        units=-(-rows.cols // GROUP), per_row=True, grain=1, work=GROUP, keep=(x, rows, batch),
    )  # fmt: skip
