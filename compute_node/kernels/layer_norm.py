"""Layer normalisation of a row (Ba et al. 2016, arXiv:1607.06450)."""

from __future__ import annotations

import numpy as np
from numba import cfunc
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.dots import dot
from compute_node.kernels.lanes import f32_at, i64_at
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record

__all__ = ["layer_norm"]


@cfunc(KERNEL, cache=True, error_model="numpy")
def _layer_norm_kernel(args: int, lo: int, hi: int) -> None:
    """Record: x, x stride, y, y stride, weight, bias, address of eps, width. Sums of the mean run in rising column."""
    m = i64_at(args)
    width = m[7]
    weight, bias, eps = f32_at(m[4]), f32_at(m[5]), f32_at(m[6])[0]
    for row in range(lo, hi):
        at = m[2] + row * m[3]
        x, y = f32_at(m[0] + row * m[1]), f32_at(at)
        total = np.float32(0)
        for j in range(width):
            total = total + x[j]
        mean = total / np.float32(width)
        for j in range(width):
            y[j] = x[j] - mean
        scale = np.float32(1) / np.sqrt(dot(at, at, width) / np.float32(width) + eps)
        for j in range(width):
            y[j] = (y[j] * scale) * weight[j] + bias[j]


def layer_norm(
    name: str,
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    bias: NDArray[np.float32],
    eps: float,
    y: NDArray[np.float32],
    batch: Batch,
) -> Op:
    """`y = (x - mean) / sqrt(variance + eps) * weight + bias` for the live rows.

    Args:
        name: of the op.
        x: float32 [max_rows, width].
        weight: float32 [width].
        bias: the same.
        eps: added to the variance.
        y: float32 [max_rows, width]; may be `x` itself.
        batch: the live rows.
    """
    width = x.shape[-1]
    check_buffer(name, "x", x, (batch.max_rows, None))
    check_buffer(name, "y", y, (batch.max_rows, width), writable=True)
    check_buffer(name, "weight", weight, (width,))
    check_buffer(name, "bias", bias, (width,))
    small = np.array([eps], np.float32)
    args = record([
        address_of(x), x.strides[0], address_of(y), y.strides[0], address_of(weight), address_of(bias),
        address_of(small), width,
    ])  # fmt: skip
    return Op(
        name, "layer_norm", _layer_norm_kernel.address, args, batch.count,
        units=1, per_row=True, grain=1, work=3 * width, keep=(x, weight, bias, small, y, batch),
    )  # fmt: skip
