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
from compute_node.kernels.dots import dots_bf16, dots_f32, dots_int4, dots_int8
from compute_node.kernels.lanes import f32_at, i64_at
from compute_node.kernels.matrix import FORMATS, Matrix
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from tierd.errors import UsageError

__all__ = ["KERNELS", "MATMUL_FIELDS", "kernel_address", "matmul", "matmul_rows", "weight_fields"]

# Fields of the record, each one int64. Strides are in bytes.
COUNT: Final = 0  # address of the number of rows
FORMAT: Final = 1  # index into FORMATS
X: Final = 2
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
MATMUL_FIELDS: Final = 14

F32_FORMAT, BF16_FORMAT, INT8_FORMAT, INT4_FORMAT = (FORMATS.index(f) for f in ("f32", "bf16", "int8", "int4-g64"))

ROW_TILE: Final = 64
"""Activation rows that stay in cache while a slice of the weights passes."""
GRAIN: Final = 16
"""Columns: slices of threads begin at whole cache lines of a float32 output."""


@njit(nogil=True, cache=True, error_model="numpy")
def _place(base: int, stride: int, index: int, row: int) -> int:
    """Address of a row, through an index list if there is one."""
    return base + stride * (i64_at(index)[row] if index != 0 else row)


@njit(nogil=True, cache=True, error_model="numpy")
def _dots(weight_format: int, w: Any, s: Any, x: Any, cols: int, after: int) -> Any:
    """Four weight rows with one or four activation rows."""
    if weight_format == BF16_FORMAT:
        return dots_bf16(w, x, cols, after)
    if weight_format == INT8_FORMAT:
        return dots_int8(w, x, cols, after)
    if weight_format == INT4_FORMAT:
        return dots_int4(w, s, x, cols, after)
    return dots_f32(w, x, cols, after)


@njit(nogil=True, cache=True, error_model="numpy")
def _store(m: Any, row: int, o: Any, sums: Any) -> None:
    """Four finished sums of one row: the scale of int8, then the bias."""
    y = f32_at(_place(m[Y], m[Y_STRIDE], m[Y_INDEX], row))
    for j in range(4):
        total = sums[j]
        if m[FORMAT] == INT8_FORMAT:
            total = total * f32_at(m[SCALES])[o[j]]
        if m[BIAS] != 0:
            total = total + f32_at(m[BIAS])[o[j]]
        y[o[j]] = total


@njit(nogil=True, cache=True, error_model="numpy")
def matmul_rows(args: int, lo: int, hi: int) -> None:
    """Columns lo..hi of all rows; `args` is the address of a record of `MATMUL_FIELDS`."""
    m = i64_at(args)
    rows = i64_at(m[COUNT])[0]
    x, x_stride, x_index = m[X], m[X_STRIDE], m[X_INDEX]
    for tile in range(0, rows, ROW_TILE):
        end = min(tile + ROW_TILE, rows)
        for column in range(lo, hi, 4):
            # Beyond the slice's end its last column is computed again: same value, same place.
            o = (column, min(column + 1, hi - 1), min(column + 2, hi - 1), min(column + 3, hi - 1))
            d, step = m[DATA], m[DATA_STRIDE]
            w = (d + o[0] * step, d + o[1] * step, d + o[2] * step, d + o[3] * step)
            after = w[0] + 4 * step
            d, step = m[SCALES], m[SCALES_STRIDE]
            s = (d + o[0] * step, d + o[1] * step, d + o[2] * step, d + o[3] * step)
            row = tile
            while row + 4 <= end:
                places = (
                    _place(x, x_stride, x_index, row),
                    _place(x, x_stride, x_index, row + 1),
                    _place(x, x_stride, x_index, row + 2),
                    _place(x, x_stride, x_index, row + 3),
                )
                sums = _dots(m[FORMAT], w, s, places, m[COLS], after)
                _store(m, row, o, sums[0:4])
                _store(m, row + 1, o, sums[4:8])
                _store(m, row + 2, o, sums[8:12])
                _store(m, row + 3, o, sums[12:16])
                row += 4
            while row < end:
                _store(m, row, o, _dots(m[FORMAT], w, s, (_place(x, x_stride, x_index, row),), m[COLS], after))
                row += 1


@cfunc(KERNEL, cache=True, error_model="numpy")
def matmul_kernel(args: int, lo: int, hi: int) -> None:
    """`matmul_rows` as an op."""
    matmul_rows(args, lo, hi)


KERNELS: Final = {("exact", weight_format): matmul_kernel for weight_format in FORMATS}
"""The kernel for each numerics and weight format."""


def kernel_address(op: str, numerics: str, weight_format: str) -> int:
    """Address of the matmul kernel for a format.

    Raises:
        UsageError: there is none.
    """
    kernel = KERNELS.get((numerics, weight_format))
    if kernel is None:
        raise UsageError(f"{op}: no {numerics!r} kernel for {weight_format!r} weights")
    return int(kernel.address)


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
) -> Op:
    """`y = x W^T (+ bias)` for the live rows.

    Args:
        name: of the op.
        matrix: weights of any format, [outputs, inputs].
        x: float32 [max_rows, inputs].
        y: float32 [max_rows, outputs]; must not overlap `x`.
        batch: the live rows.
        bias: float32 [outputs], added last.
        numerics: `exact`.

    Raises:
        UsageError: shapes or types that do not fit, or numerics that are not known.
    """
    check_buffer(name, "x", x, (batch.max_rows, matrix.cols))
    check_buffer(name, "y", y, (batch.max_rows, matrix.rows), writable=True)
    if np.may_share_memory(x, y):
        raise UsageError(f"{name}: x and y overlap")
    if bias is not None:
        check_buffer(name, "bias", bias, (matrix.rows,))
    data, data_stride, scales, scales_stride = weight_fields(matrix)
    args = record([
        address_of(batch.count), FORMATS.index(matrix.format),
        address_of(x), x.strides[0], 0, address_of(y), y.strides[0], 0,
        data, data_stride, scales, scales_stride, matrix.cols, address_of(bias),
    ])  # fmt: skip
    return Op(
        name, f"matmul {matrix.format}", kernel_address(name, numerics, matrix.format), args, batch.count,
        units=matrix.rows, per_row=False, grain=GRAIN, work=matrix.cols, keep=(matrix, x, y, bias, batch),
    )  # fmt: skip
