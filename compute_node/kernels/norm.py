"""RMS normalisation over a row or over each head of a row (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import numpy as np
from numba import cfunc
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.dots import dot
from compute_node.kernels.lanes import f32_at, i64_at
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from tierd.errors import UsageError

__all__ = ["rms_norm"]


@cfunc(KERNEL, cache=True, error_model="numpy")
def _rms_norm_kernel(args: int, lo: int, hi: int) -> None:
    """Record: x, x stride, y, y stride, weight, address of eps, group width, groups in a row."""
    m = i64_at(args)
    width, groups = m[6], m[7]
    weight, eps = f32_at(m[4]), f32_at(m[5])[0]
    for unit in range(lo, hi):
        row, group = unit // groups, unit % groups
        source = m[0] + row * m[1] + group * width * 4
        x, y = f32_at(source), f32_at(m[2] + row * m[3] + group * width * 4)
        mean = dot(source, source, width) / np.float32(width)
        scale = np.float32(1) / np.sqrt(mean + eps)
        for j in range(width):
            y[j] = (x[j] * scale) * weight[j]


def rms_norm(
    name: str,
    x: NDArray[np.float32],
    weight: NDArray[np.float32],
    eps: float,
    y: NDArray[np.float32],
    batch: Batch,
) -> Op:
    """`y = x / sqrt(mean(x^2) + eps) * weight` for the live rows.

    A weight as wide as the row normalises the whole row; a shorter one (head_dim) is applied to each group of that
    width, the per-head form of q and k norms. For families that store the weight less one, pass `1 + w`.

    Args:
        name: of the op.
        x: float32 [max_rows, width].
        weight: float32 [width], or [group] where group divides width.
        eps: added to the mean square, as the checkpoint's `rms_norm_eps` says.
        y: float32 [max_rows, width]; may be `x` itself.
        batch: the live rows.
    """
    check_buffer(name, "x", x, (batch.max_rows, None))
    check_buffer(name, "y", y, (batch.max_rows, x.shape[1]), writable=True)
    check_buffer(name, "weight", weight, (None,))
    group = len(weight)
    if group == 0 or x.shape[1] % group:
        raise UsageError(f"{name}: a weight of {group} does not divide rows of {x.shape[1]}")
    small = np.array([eps], np.float32)
    groups = x.shape[1] // group
    args = record([
        address_of(x), x.strides[0], address_of(y), y.strides[0], address_of(weight), address_of(small), group, groups,
    ])  # fmt: skip
    return Op(
        name, "rms_norm", _rms_norm_kernel.address, args, batch.count,
        units=groups, per_row=True, grain=1, work=2 * group, keep=(x, weight, small, y, batch),
    )  # fmt: skip
