"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in both layouts of its pairs.

Half-split (GPT-NeoX, Llama): elements j and j + rotary_dim / 2 are a pair. Interleaved (the paper's, DeepSeek's):
elements 2j and 2j + 1 are.
"""

from __future__ import annotations

import numpy as np
from numba import cfunc
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.lanes import f32_at, i64_at
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from tierd.errors import UsageError

__all__ = ["rope", "rope_tables"]

Table = NDArray[np.float32]


def rope_tables(positions: int, rotary_dim: int, theta: float) -> tuple[Table, Table]:
    """Cosines and sines for positions 0 ... positions - 1, computed in float64 and rounded once.

    Args:
        positions: how many.
        rotary_dim: rotated elements of a head, even.
        theta: base of the wavelengths, the checkpoint's `rope_theta`.

    Returns:
        cos and sin, float32 [positions, rotary_dim / 2].
    """
    if positions < 1 or rotary_dim < 2 or rotary_dim % 2 or not theta > 0:
        raise UsageError(f"no rotary table for {positions} positions, {rotary_dim} elements and theta {theta}")
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    angles = np.arange(positions, dtype=np.float64)[:, None] / np.float64(theta) ** exponent
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@cfunc(KERNEL, cache=True, error_model="numpy")
def _rope_kernel(args: int, lo: int, hi: int) -> None:
    """Record: x, x stride, positions, cos, sin, positions in the tables, half, head_dim, heads, start, interleaved."""
    m = i64_at(args)
    half, heads = m[6], m[8]
    step, apart = (2, 1) if m[10] != 0 else (1, half)
    for unit in range(lo, hi):
        row, head = unit // heads, unit % heads
        x = f32_at(m[0] + row * m[1] + (head * m[7] + m[9]) * 4)
        position = i64_at(m[2])[row]
        if position < 0 or position >= m[5]:
            for j in range(2 * half):
                x[j] = np.float32(np.nan)
        else:
            cos, sin = f32_at(m[3] + position * half * 4), f32_at(m[4] + position * half * 4)
            for j in range(half):
                a, b = x[j * step], x[j * step + apart]
                x[j * step] = a * cos[j] - b * sin[j]
                x[j * step + apart] = b * cos[j] + a * sin[j]


def rope(
    name: str,
    x: NDArray[np.float32],
    cos: Table,
    sin: Table,
    batch: Batch,
    *,
    head_dim: int,
    start: int = 0,
    interleaved: bool = False,
) -> Op:
    """Rotates `rotary_dim` elements of each head of the live rows in place by its row's position.

    Args:
        name: of the op.
        x: float32 [max_rows, heads * head_dim].
        cos: float32 [positions, rotary_dim / 2], from `rope_tables`.
        sin: the same shape. A position beyond the tables gives NaN.
        batch: the live rows and their positions.
        head_dim: elements of a head.
        start: the first of them that is rotated; those before and behind the rotated ones stay as they are.
        interleaved: neighbours are pairs, and not elements half of `rotary_dim` apart.
    """
    check_buffer(name, "x", x, (batch.max_rows, None), writable=True)
    check_buffer(name, "cos", cos, (None, None))
    check_buffer(name, "sin", sin, cos.shape)
    half = cos.shape[1]
    if not (cos.flags.c_contiguous and sin.flags.c_contiguous and len(sin) == len(cos)):
        raise UsageError(f"{name}: cos and sin must be contiguous and of one shape")
    if head_dim < 1 or x.shape[1] % head_dim or start < 0 or start + 2 * half > head_dim:
        raise UsageError(
            f"{name}: heads of {head_dim} fit neither rows of {x.shape[1]} nor {2 * half} rotated elements from {start}"
        )
    heads = x.shape[1] // head_dim
    args = record([
        address_of(x), x.strides[0], address_of(batch.positions), address_of(cos), address_of(sin),
        len(cos), half, head_dim, heads, start, int(interleaved),
    ])  # fmt: skip
    return Op(
        name, "rope", _rope_kernel.address, args, batch.count,
        units=heads, per_row=True, grain=1, work=2 * head_dim, keep=(x, cos, sin, batch),
    )  # fmt: skip
