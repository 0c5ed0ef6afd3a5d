"""Some rows of a matrix, in another order, as a matrix of their own: how a fused projection is taken apart once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compute_node.kernels.matrix import Matrix, dequantise, scales_rows_shift
from tierd.errors import UsageError

__all__ = ["take_rows"]


def take_rows(matrix: Matrix, order: NDArray[np.int64]) -> Matrix:
    """A copy of rows `order` of a matrix, with the same values; in its format where that is possible, else in f32.

    A format whose scales are shared by several rows keeps it only if rows that come to lie under one scale had one.

    Raises:
        UsageError: a row that the matrix does not have, or none at all.
    """
    if len(order) == 0 or order.min() < 0 or order.max() >= matrix.rows:
        raise UsageError(f"rows of a matrix are 0 to {matrix.rows - 1}")
    scales, shift = matrix.scales, scales_rows_shift(matrix.format)
    if scales is not None:
        before, after = order >> shift, np.arange(len(order)) >> shift
        first = before[:: 1 << shift]
        if not np.array_equal(before, first[after]):
            return Matrix("f32", len(order), matrix.cols, np.ascontiguousarray(dequantise(matrix)[order]))
        scales = np.ascontiguousarray(scales[first])
    return Matrix(matrix.format, len(order), matrix.cols, np.ascontiguousarray(matrix.data[order]), scales)
