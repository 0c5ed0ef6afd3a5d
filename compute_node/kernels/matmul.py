"""Matrix times activation rows, for every weight format: `y[r, o] = W[o] . x[r] (+ bias[o])`.

The threads split output columns; all live rows are computed together, so a weight is loaded once for several rows.
The order of each sum is that of `dots`, whatever the number of rows and wherever a slice begins.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.lanes import f32_at, i64_at
from compute_node.kernels.matrix import Matrix, scales_rows_shift
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from compute_node.kernels.quantised_rows import QuantisedRows
from compute_node.kernels.walks import (
    walk_bf16,
    walk_f32,
    walk_fast_float4,
    walk_fast_int4,
    walk_fast_int8,
    walk_fast_small_int4,
    walk_float4,
    walk_float8,
    walk_int4,
    walk_int8,
    walk_small_int4,
)
from tierd.errors import UsageError

__all__ = [
    "KINDS",
    "MATMUL_FIELDS",
    "NUMERICS",
    "SCALES_SHIFT",
    "kernel_kind",
    "matmul",
    "matmul_kernel",
    "quantises",
    "weight_fields",
]

# Fields of the record, each one int64. Strides are in bytes.
COUNT: Final = 0  # address of the number of rows
KIND: Final = 1  # value of KINDS
X: Final = 2  # float32 rows, or quantised ones for the fast kinds
X_STRIDE: Final = 3
X_INDEX: Final = 4  # address of the row of x for each row, or 0: row i is row i
Y: Final = 5
Y_STRIDE: Final = 6
Y_INDEX: Final = 7  # the same for y
DATA: Final = 8
DATA_STRIDE: Final = 9
SCALES: Final = 10
SCALES_STRIDE: Final = 11
COLS: Final = 12
BIAS: Final = 13  # address of float32 [outputs], or 0
SCALES_SHIFT: Final = 14  # 2^this rows of weights share a row of scales
NEXT: Final = 15  # address of the weights, of the same shape, that are computed after these, or 0
MATMUL_FIELDS: Final = 16

F32_KIND, BF16_KIND, INT8_KIND, INT4_KIND, FAST_INT8_KIND, FAST_INT4_KIND = range(6)
FLOAT8_KIND, FLOAT4_KIND, SMALL_INT4_KIND, FAST_FLOAT4_KIND, FAST_SMALL_INT4_KIND = range(6, 11)

NUMERICS: Final = ("exact", "fast")
"""`exact`: float32 activations. `fast`: signed bytes per group of 64 where the weights are whole numbers times a scale;
`fp8-e4m3` weights are none, and are computed as `exact` does."""

KINDS: Final = {
    ("exact", "f32"): F32_KIND,
    ("exact", "bf16"): BF16_KIND,
    ("exact", "int8"): INT8_KIND,
    ("exact", "int4-g64"): INT4_KIND,
    ("exact", "fp8-e4m3"): FLOAT8_KIND,
    ("exact", "mxfp4"): FLOAT4_KIND,
    ("exact", "int4-g32"): SMALL_INT4_KIND,
    ("fast", "f32"): F32_KIND,
    ("fast", "bf16"): BF16_KIND,
    ("fast", "int8"): FAST_INT8_KIND,
    ("fast", "int4-g64"): FAST_INT4_KIND,
    ("fast", "fp8-e4m3"): FLOAT8_KIND,
    ("fast", "mxfp4"): FAST_FLOAT4_KIND,
    ("fast", "int4-g32"): FAST_SMALL_INT4_KIND,
}
"""What computes, for each numerics and weight format."""

BLOCK_BYTES: Final = 1 << 16
"""Weights that stay in the second-level cache while all activation rows pass, a few at a time."""
ROW_BYTES: Final = 6144
"""Longest activation rows of which four stay in the first-level cache while a block of weights passes."""
AHEAD_BYTES: Final = 8192
"""How far ahead weights are asked for, at least: some 300 ns of a core's share of the memory's bandwidth."""
GRAIN: Final = 16
"""Columns: slices of threads begin at whole cache lines of a float32 output."""


@njit(nogil=True, cache=True, error_model="numpy")
def _place(base: int, stride: int, index: int, row: int) -> int:
    """Address of a row, through an index list if there is one."""
    return base + stride * (i64_at(index)[row] if index != 0 else row)


@njit(nogil=True, cache=True, error_model="numpy")
def _whole(kind: int) -> Any:
    """True for the kinds that multiply whole numbers; see `quantises`."""
    return kind in (FAST_INT8_KIND, FAST_INT4_KIND, FAST_FLOAT4_KIND, FAST_SMALL_INT4_KIND)


@njit(nogil=True, cache=True, error_model="numpy")
def _walk_whole(kind: int, weights: Any, span: Any, x: Any, y: Any) -> None:
    """With quantised rows; of these, three are computed together as well."""
    if kind == FAST_INT4_KIND:
        walk_fast_int4(weights, span, x, y)
    elif kind == FAST_INT8_KIND:
        walk_fast_int8(weights, span, x, y)
    elif kind == FAST_FLOAT4_KIND:
        walk_fast_float4(weights, span, x, y)
    else:
        walk_fast_small_int4(weights, span, x, y)


@njit(nogil=True, cache=True, error_model="numpy")
def _walk_float(kind: int, weights: Any, span: Any, x: Any, y: Any) -> None:
    """With float32 rows."""
    if kind == BF16_KIND:
        walk_bf16(weights, span, x, y)
    elif kind == INT8_KIND:
        walk_int8(weights, span, x, y)
    elif kind == INT4_KIND:
        walk_int4(weights, span, x, y)
    elif kind == FLOAT8_KIND:
        walk_float8(weights, span, x, y)
    elif kind == FLOAT4_KIND:
        walk_float4(weights, span, x, y)
    elif kind == SMALL_INT4_KIND:
        walk_small_int4(weights, span, x, y)
    else:
        walk_f32(weights, span, x, y)


@njit(nogil=True, cache=True, error_model="numpy")
def _walk(kind: int, weights: Any, span: Any, x: Any, y: Any) -> None:
    """The dot products of a span of weight rows with one, two or four activation rows."""
    if _whole(kind):
        _walk_whole(kind, weights, span, x, y)
    else:
        _walk_float(kind, weights, span, x, y)


@njit(nogil=True, cache=True, error_model="numpy")
def _finish(m: Any, first: int, end: int, y: int) -> None:
    """What follows the sums of one row: the scale of int8, then the bias."""
    out = f32_at(y)
    if m[KIND] == INT8_KIND or m[KIND] == FAST_INT8_KIND:
        scales = f32_at(m[SCALES])
        for o in range(first, end):
            out[o] = out[o] * scales[o]
    if m[BIAS] != 0:
        bias = f32_at(m[BIAS])
        for o in range(first, end):
            out[o] = out[o] + bias[o]


@njit(nogil=True, cache=True, error_model="numpy")
def _taken(left: int, most: int, threes: bool) -> int:
    """How many of the rows that are left are computed together: one, two or four, three only where that pays."""
    if left < 4 or most < 4:
        return min(left, 3) if threes and most == 4 else min(left, 2)
    return 3 if threes and left < 7 and left != 4 else 4


@cfunc(KERNEL, cache=True, error_model="numpy")
def matmul_kernel(args: int, lo: int, hi: int) -> None:
    """Columns lo..hi of all rows; `args` is the address of a record of `MATMUL_FIELDS`."""
    m = i64_at(args)
    kind, rows = m[KIND], i64_at(m[COUNT])[0]
    x, x_stride, x_index = m[X], m[X_STRIDE], m[X_INDEX]
    y, y_stride, y_index = m[Y], m[Y_STRIDE], m[Y_INDEX]
    stride = max(m[DATA_STRIDE], 1)
    ahead = (AHEAD_BYTES + 4 * stride - 1) // (4 * stride) * 4 * stride
    block = max(1, BLOCK_BYTES // (4 * stride)) * 4
    most = 4 if x_stride <= ROW_BYTES else 2
    if _taken(rows, most, _whole(kind)) == rows:  # they pass once
        block = max(block, hi - lo)
    weights = (m[DATA], m[DATA_STRIDE], m[SCALES], m[SCALES_STRIDE], m[SCALES_SHIFT], m[COLS])
    for first in range(lo, hi, block):
        end = min(first + block, hi)
        following = m[DATA] + end * m[DATA_STRIDE] if end < hi or m[NEXT] == 0 else m[NEXT] + lo * m[DATA_STRIDE]
        row = 0
        while row < rows:
            span = (first, end, ahead if row == 0 else 0, following)  # later rows find the weights in a cache
            taken = _taken(rows - row, most, _whole(kind))
            x0, y0 = _place(x, x_stride, x_index, row), _place(y, y_stride, y_index, row)
            if taken == 1:
                _walk(kind, weights, span, (x0,), (y0,))
            else:
                x1, y1 = _place(x, x_stride, x_index, row + 1), _place(y, y_stride, y_index, row + 1)
                if taken == 2:
                    _walk(kind, weights, span, (x0, x1), (y0, y1))
                else:
                    x2, y2 = _place(x, x_stride, x_index, row + 2), _place(y, y_stride, y_index, row + 2)
                    if taken == 3:
                        _walk_whole(kind, weights, span, (x0, x1, x2), (y0, y1, y2))
                    else:
                        x3, y3 = _place(x, x_stride, x_index, row + 3), _place(y, y_stride, y_index, row + 3)
                        _walk(kind, weights, span, (x0, x1, x2, x3), (y0, y1, y2, y3))
            row += taken
        for row in range(rows):
            _finish(m, first, end, _place(y, y_stride, y_index, row))


def kernel_kind(op: str, numerics: str, weight_format: str) -> int:
    """Which of `KINDS` computes a format.

    Raises:
        UsageError: there is none.
    """
    kind = KINDS.get((numerics, weight_format))
    if kind is None:
        raise UsageError(f"{op}: no {numerics!r} kernel for {weight_format!r} weights")
    return kind


def quantises(numerics: str, weight_format: str) -> bool:
    """True if these weights are multiplied with quantised rows."""
    return KINDS.get((numerics, weight_format)) in {
        FAST_INT8_KIND,
        FAST_INT4_KIND,
        FAST_FLOAT4_KIND,
        FAST_SMALL_INT4_KIND,
    }


def weight_fields(matrix: Matrix) -> tuple[int, int, int, int]:
    """Data address, data stride, scales address, scales stride of a matrix, as a record holds them."""
    scales = matrix.scales
    stride = 0 if scales is None or scales.ndim == 1 else scales.strides[0]
    return address_of(matrix.data), matrix.data.shape[1] * matrix.data.itemsize, address_of(scales), stride


def matmul(
    name: str,
    matrix: Matrix,
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    batch: Batch,
    *,
    bias: NDArray[np.float32] | None = None,
    numerics: str = "exact",
    quantised: QuantisedRows | None = None,
) -> Op:
    """`y = x W^T (+ bias)` for the live rows.

    Args:
        name: of the op.
        matrix: weights of any format, [outputs, inputs].
        x: float32 [max_rows, inputs].
        y: float32 [max_rows, outputs]; must not overlap `x`.
        batch: the live rows.
        bias: float32 [outputs], added last.
        numerics: `exact` or `fast`.
        quantised: `x` as `quantise_rows` left it, wanted where `quantises(numerics, matrix.format)`.

    Raises:
        UsageError: shapes or types that do not fit, or numerics that are not known.
    """
    check_buffer(name, "x", x, (batch.max_rows, matrix.cols))
    check_buffer(name, "y", y, (batch.max_rows, matrix.rows), writable=True)
    if np.may_share_memory(x, y):
        raise UsageError(f"{name}: x and y overlap")
    if bias is not None:
        check_buffer(name, "bias", bias, (matrix.rows,))
    kind = kernel_kind(name, numerics, matrix.format)
    rows: NDArray[Any] = x
    if quantises(numerics, matrix.format):
        if quantised is None or quantised.cols != matrix.cols or quantised.max_rows < batch.max_rows:
            raise UsageError(f"{name}: {numerics} {matrix.format} weights want {matrix.cols} columns of quantised rows")
        rows = quantised.data
    data, data_stride, scales, scales_stride = weight_fields(matrix)
    args = record([
        address_of(batch.count), kind,
        address_of(rows), rows.strides[0], 0, address_of(y), y.strides[0], 0,
        data, data_stride, scales, scales_stride, matrix.cols, address_of(bias),
        scales_rows_shift(matrix.format), 0,
    ])  # fmt: skip
    return Op(
        name, f"matmul {matrix.format}", matmul_kernel.address, args, batch.count,
        units=matrix.rows, per_row=False, grain=GRAIN, work=matrix.cols, keep=(matrix, x, rows, y, bias, batch),
        weights=data, unit_bytes=data_stride,
    )  # fmt: skip
