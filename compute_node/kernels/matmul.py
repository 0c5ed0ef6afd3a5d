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
from compute_node.kernels.block_dots import dots_float4, dots_float8, dots_int4_small
from compute_node.kernels.block_integer_dots import dots_fast_float4, dots_fast_int4_small
from compute_node.kernels.dots import dots_bf16, dots_f32, dots_int4, dots_int8
from compute_node.kernels.integer_dots import dots_fast_int4, dots_fast_int8
from compute_node.kernels.lanes import f32_at, i64_at
from compute_node.kernels.matrix import Matrix, scales_rows_shift
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from compute_node.kernels.quantised_rows import QuantisedRows
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
MATMUL_FIELDS: Final = 15

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
def _integer_dots(kind: int, w: Any, s: Any, x: Any, cols: int, after: int) -> Any:
    """Those with quantised activations."""
    if kind == FAST_INT4_KIND:
        return dots_fast_int4(w, s, x, cols, after)
    return dots_fast_int8(w, x, cols, after)


@njit(nogil=True, cache=True, error_model="numpy")
def _block_dots(kind: int, w: Any, s: Any, x: Any, cols: int, after: int) -> Any:
    """Those of the formats with small blocks."""
    if kind == FAST_FLOAT4_KIND:
        return dots_fast_float4(w, s, x, cols, after)
    if kind == FAST_SMALL_INT4_KIND:
        return dots_fast_int4_small(w, s, x, cols, after)
    if kind == FLOAT4_KIND:
        return dots_float4(w, s, x, cols, after)
    if kind == SMALL_INT4_KIND:
        return dots_int4_small(w, s, x, cols, after)
    return dots_float8(w, s, x, cols, after)


@njit(nogil=True, cache=True, error_model="numpy")
def _dots(kind: int, w: Any, s: Any, x: Any, cols: int, after: int) -> Any:
    """Four weight rows with one, two or four activation rows."""
    if kind >= FLOAT8_KIND:
        return _block_dots(kind, w, s, x, cols, after)
    if kind >= FAST_INT8_KIND:
        return _integer_dots(kind, w, s, x, cols, after)
    if kind == BF16_KIND:
        return dots_bf16(w, x, cols, after)
    if kind == INT8_KIND:
        return dots_int8(w, x, cols, after)
    if kind == INT4_KIND:
        return dots_int4(w, s, x, cols, after)
    return dots_f32(w, x, cols, after)


@njit(nogil=True, cache=True, error_model="numpy")
def _store(m: Any, row: int, o: Any, sums: Any) -> None:
    """Four finished sums of one row: the scale of int8, then the bias."""
    y = f32_at(_place(m[Y], m[Y_STRIDE], m[Y_INDEX], row))
    for j in range(4):
        total = sums[j]
        if m[KIND] == INT8_KIND or m[KIND] == FAST_INT8_KIND:
            total = total * f32_at(m[SCALES])[o[j]]
        if m[BIAS] != 0:
            total = total + f32_at(m[BIAS])[o[j]]
        y[o[j]] = total


@cfunc(KERNEL, cache=True, error_model="numpy")
def matmul_kernel(args: int, lo: int, hi: int) -> None:
    """Columns lo..hi of all rows; `args` is the address of a record of `MATMUL_FIELDS`."""
    m = i64_at(args)
    rows = i64_at(m[COUNT])[0]
    x, x_stride, x_index = m[X], m[X_STRIDE], m[X_INDEX]
    stride = max(m[DATA_STRIDE], 1)
    ahead = (AHEAD_BYTES + 4 * stride - 1) // (4 * stride) * 4 * stride
    block = max(1, BLOCK_BYTES // (4 * stride)) * 4
    most = 4 if x_stride <= ROW_BYTES else 2
    for first in range(lo, hi, block):
        last = min(first + block, hi) - 1
        row = 0
        while row < rows:
            taken = most if row + most <= rows else (2 if row + 2 <= rows else 1)
            for column in range(first, last + 1, 4):
                # Beyond the block's end its last column is computed again: same value, same place.
                o = (column, min(column + 1, last), min(column + 2, last), min(column + 3, last))
                d, step = m[DATA], m[DATA_STRIDE]
                w = (d + o[0] * step, d + o[1] * step, d + o[2] * step, d + o[3] * step)
                after = w[0] + ahead
                d, step = m[SCALES], m[SCALES_STRIDE]
                k = m[SCALES_SHIFT]
                s = (d + (o[0] >> k) * step, d + (o[1] >> k) * step, d + (o[2] >> k) * step, d + (o[3] >> k) * step)
                if taken == 4:
                    four = (
                        _place(x, x_stride, x_index, row),
                        _place(x, x_stride, x_index, row + 1),
                        _place(x, x_stride, x_index, row + 2),
                        _place(x, x_stride, x_index, row + 3),
                    )
                    sums = _dots(m[KIND], w, s, four, m[COLS], after)
                    _store(m, row, o, sums[0:4])
                    _store(m, row + 1, o, sums[4:8])
                    _store(m, row + 2, o, sums[8:12])
                    _store(m, row + 3, o, sums[12:16])
                elif taken == 2:
                    two = (_place(x, x_stride, x_index, row), _place(x, x_stride, x_index, row + 1))
                    pairs = _dots(m[KIND], w, s, two, m[COLS], after)
                    _store(m, row, o, pairs[0:4])
                    _store(m, row + 1, o, pairs[4:8])
                else:
                    _store(m, row, o, _dots(m[KIND], w, s, (_place(x, x_stride, x_index, row),), m[COLS], after))
            row += taken


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
        scales_rows_shift(matrix.format),
    ])  # fmt: skip
    return Op(
        name, f"matmul {matrix.format}", matmul_kernel.address, args, batch.count,
        units=matrix.rows, per_row=False, grain=GRAIN, work=matrix.cols, keep=(matrix, x, rows, y, bias, batch),
        weights=data, unit_bytes=data_stride,
    )  # fmt: skip
