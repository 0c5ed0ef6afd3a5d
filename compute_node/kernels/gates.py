"""Sigmoid gates: `y = x * sigmoid(gate)`, one gate for each element or one for a whole row.

Gated attention multiplies its output so (Qiu et al. 2025, arXiv:2505.06708), and a shared expert by one number a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.elementwise import CHUNK
from compute_node.kernels.lanes import exp32, f32_at, i64_at
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record

__all__ = ["sigmoid", "sigmoid_mul"]

Rows = NDArray[np.float32]


@njit(nogil=True, cache=True, error_model="numpy")
def sigmoid(x: Any) -> Any:
    """`1 / (1 + exp(-x))`."""
    return np.float32(1) / (np.float32(1) + exp32(-x))


@cfunc(KERNEL, cache=True, error_model="numpy")
def _sigmoid_mul_kernel(args: int, lo: int, hi: int) -> None:
    """Record: x, x stride, gate, gate stride, y, y stride, width, one gate for the row."""
    m = i64_at(args)
    width, single = m[6], m[7] != 0
    chunks = (width + CHUNK - 1) // CHUNK
    for unit in range(lo, hi):
        row, first = unit // chunks, (unit % chunks) * CHUNK
        end = min(first + CHUNK, width)
        x, gate, y = f32_at(m[0] + row * m[1]), f32_at(m[2] + row * m[3]), f32_at(m[4] + row * m[5])
        if single:
            factor = sigmoid(gate[0])
            for j in range(first, end):
                y[j] = x[j] * factor
        else:
            for j in range(first, end):
                y[j] = x[j] * sigmoid(gate[j])


def sigmoid_mul(name: str, x: Rows, gate: Rows, y: Rows, batch: Batch) -> Op:
    """`y = x * sigmoid(gate)` for the live rows.

    Args:
        name: of the op.
        x: float32 [max_rows, width].
        gate: float32 [max_rows, width], or [max_rows, 1]: one gate for the whole row.
        y: float32 [max_rows, width]; may be `x` itself.
        batch: the live rows.
    """
    width, single = x.shape[-1], gate.shape[-1] == 1
    check_buffer(name, "x", x, (batch.max_rows, None))
    check_buffer(name, "gate", gate, (batch.max_rows, 1 if single else width))
    check_buffer(name, "y", y, (batch.max_rows, width), writable=True)
    args = record([
        address_of(x), x.strides[0], address_of(gate), gate.strides[0], address_of(y), y.strides[0], width, int(single),
    ])  # fmt: skip
    return Op(
        name, "sigmoid_mul", _sigmoid_mul_kernel.address, args, batch.count,
        units=-(-width // CHUNK), per_row=True, grain=1, work=CHUNK, keep=(x, gate, y, batch),
    )  # fmt: skip
