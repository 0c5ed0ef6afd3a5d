"""A matrix of its own for each head, and moving or scaling a part of each: what absorbed latent attention needs."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.dots import dots_bf16, dots_f32, dots_int8
from compute_node.kernels.lanes import f32_at, i64_at
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from tierd.errors import UsageError

__all__ = ["copy_heads", "head_matmul", "scale_heads"]

CHUNK: Final = 16
"""Columns of one unit: a cache line of a float32 output."""

Rows = NDArray[np.float32]

_KINDS: Final = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.int8): 2}

# Fields of the record of `head_matmul`.
COUNT, X, X_STRIDE, X_HEAD, Y, Y_STRIDE, Y_HEAD, DATA, DATA_STRIDE, KIND, OUTPUTS, INPUTS, SCALES = range(13)


@njit(nogil=True, cache=True, error_model="numpy")
def _dots(kind: int, w: Any, x: Any, cols: int, after: int) -> Any:
    if kind == 1:
        return dots_bf16(w, x, cols, after)
    if kind == 2:
        return dots_int8(w, x, cols, after)
    return dots_f32(w, x, cols, after)


@njit(nogil=True, cache=True, error_model="numpy")
def _store(y: int, scales: int, o: Any, sums: Any) -> None:
    target = f32_at(y)
    for j in range(4):
        target[o[j]] = sums[j] * f32_at(scales)[o[j]] if scales != 0 else sums[j]


@cfunc(KERNEL, cache=True, error_model="numpy")
def _head_matmul_kernel(args: int, lo: int, hi: int) -> None:
    """One unit is 16 columns of one head, for all rows; four columns and four rows at a time."""
    m = i64_at(args)
    rows, outputs, cols, step = i64_at(m[COUNT])[0], m[OUTPUTS], m[INPUTS], m[DATA_STRIDE]
    chunks = (outputs + CHUNK - 1) // CHUNK
    for unit in range(lo, hi):
        head, first = unit // chunks, unit % chunks * CHUNK
        last = min(first + CHUNK, outputs) - 1
        x, y, base = m[X] + head * m[X_HEAD], m[Y] + head * m[Y_HEAD], m[DATA] + head * outputs * step
        scales = m[SCALES] + head * outputs * 4 if m[SCALES] != 0 else 0
        for column in range(first, last + 1, 4):
            # Beyond the end the last column is computed again: same value, same place.
            o = (column, min(column + 1, last), min(column + 2, last), min(column + 3, last))
            w = (base + o[0] * step, base + o[1] * step, base + o[2] * step, base + o[3] * step)
            after = w[3] + step
            row = 0
            while row + 4 <= rows:
                at = x + row * m[X_STRIDE]
                places = (at, at + m[X_STRIDE], at + 2 * m[X_STRIDE], at + 3 * m[X_STRIDE])
                sums = _dots(m[KIND], w, places, cols, after)
                _store(y + row * m[Y_STRIDE], scales, o, sums[0:4])
                _store(y + (row + 1) * m[Y_STRIDE], scales, o, sums[4:8])
                _store(y + (row + 2) * m[Y_STRIDE], scales, o, sums[8:12])
                _store(y + (row + 3) * m[Y_STRIDE], scales, o, sums[12:16])
                row += 4
            while row < rows:
                _store(y + row * m[Y_STRIDE], scales, o, _dots(m[KIND], w, (x + row * m[X_STRIDE],), cols, after))
                row += 1


@cfunc(KERNEL, cache=True, error_model="numpy")
def _copy_kernel(args: int, lo: int, hi: int) -> None:
    """Record: x, x stride, x head, y, y stride, y head, heads, width. One unit is one row."""
    m = i64_at(args)
    for row in range(lo, hi):
        for head in range(m[6]):
            x, y = f32_at(m[0] + row * m[1] + head * m[2]), f32_at(m[3] + row * m[4] + head * m[5])
            for d in range(m[7]):
                y[d] = x[d]


@cfunc(KERNEL, cache=True, error_model="numpy")
def _scale_kernel(args: int, lo: int, hi: int) -> None:
    """Record: x, x stride, x head, factors, heads, width. One unit is one row."""
    m = i64_at(args)
    for row in range(lo, hi):
        for head in range(m[4]):
            x, factors = f32_at(m[0] + row * m[1] + head * m[2]), f32_at(m[3] + head * m[5] * 4)
            for d in range(m[5]):
                x[d] = x[d] * factors[d]


def _check_heads(name: str, what: str, rows: Rows, batch: Batch, heads: int, part: tuple[int, int]) -> int:
    """Bytes of a head of `rows`; UsageError unless elements part[0]..part[0] + part[1] of it exist."""
    check_buffer(name, what, rows, (batch.max_rows, None))
    start, width = part
    if heads < 1 or rows.shape[1] % heads or start < 0 or width < 1 or start + width > rows.shape[1] // heads:
        raise UsageError(
            f"{name}: {what} of {rows.shape[1]} does not hold {heads} heads with elements {start} + {width}"
        )
    return int(rows.shape[1]) // heads * 4


def head_matmul(name: str, data: NDArray[Any], x: Rows, y: Rows, batch: Batch, *, scales: Rows | None = None) -> Op:
    """Each head's front part of `y` = the head's matrix times the front part of the head in `x`, for the live rows.

    The order of sums is that of `matmul`.

    Args:
        name: of the op.
        data: weights [heads, outputs, inputs], float32, bf16 bits as uint16, or int8 codes; contiguous.
        x: float32 [max_rows, heads * n], n >= inputs.
        y: float32 [max_rows, heads * n], n >= outputs; must not overlap `x`. The rest of each head stays as it is.
        batch: the live rows.
        scales: float32 [heads, outputs] that sums are multiplied by at last; None: by nothing.

    Raises:
        UsageError: shapes or types that do not fit.
    """
    if data.ndim != 3 or data.dtype not in _KINDS or not data.flags.c_contiguous or not data.size:
        raise UsageError(f"{name}: weights must be contiguous [heads, outputs, inputs] in float32, bf16 bits or int8")
    heads, outputs, inputs = data.shape
    x_head = _check_heads(name, "x", x, batch, heads, (0, inputs))
    y_head = _check_heads(name, "y", y, batch, heads, (0, outputs))
    check_buffer(name, "y", y, (batch.max_rows, None), writable=True)
    if np.may_share_memory(x, y):
        raise UsageError(f"{name}: x and y overlap")
    if scales is not None:
        check_buffer(name, "scales", scales, (heads, outputs))
    row_bytes = inputs * data.itemsize
    args = record([
        address_of(batch.count), address_of(x), x.strides[0], x_head, address_of(y), y.strides[0], y_head,
        address_of(data), row_bytes, _KINDS[data.dtype], outputs, inputs, address_of(scales),
    ])  # fmt: skip
    return Op(
        name, "head_matmul", _head_matmul_kernel.address, args, batch.count,
        units=heads * -(-outputs // CHUNK), per_row=False, grain=1, work=CHUNK * inputs,
        keep=(data, scales, x, y, batch),
        weights=address_of(data), unit_bytes=CHUNK * row_bytes,
    )  # fmt: skip


def copy_heads(name: str, x: Rows, y: Rows, batch: Batch, *, heads: int, source: int, target: int, width: int) -> Op:
    """Copies `width` elements of each head from `source` on in `x` to `target` on in `y`, for the live rows.

    Args:
        name: of the op.
        x: float32 [max_rows, heads * n], n >= source + width.
        y: float32 [max_rows, heads * n], n >= target + width.
        batch: the live rows.
        heads: of both.
        source: first element in a head of `x`.
        target: first element in a head of `y`.
        width: elements.
    """
    x_head = _check_heads(name, "x", x, batch, heads, (source, width))
    y_head = _check_heads(name, "y", y, batch, heads, (target, width))
    check_buffer(name, "y", y, (batch.max_rows, None), writable=True)
    args = record([
        address_of(x) + source * 4, x.strides[0], x_head, address_of(y) + target * 4, y.strides[0], y_head,
        heads, width,
    ])  # fmt: skip
    return Op(
        name, "copy_heads", _copy_kernel.address, args, batch.count,
        units=1, per_row=True, grain=1, work=heads * width, keep=(x, y, batch),
    )  # fmt: skip


def scale_heads(name: str, x: Rows, factors: Rows, batch: Batch) -> Op:
    """Multiplies the front part of each head of the live rows by factors, in place.

    With it a matrix whose codes have one scale per input is as good as any: `(W s) x = W (s x)`.

    Args:
        name: of the op.
        x: float32 [max_rows, heads * n], n >= width.
        factors: float32 [heads, width].
        batch: the live rows.
    """
    check_buffer(name, "factors", factors, (None, None))
    heads, width = factors.shape
    x_head = _check_heads(name, "x", x, batch, heads, (0, width))
    check_buffer(name, "x", x, (batch.max_rows, None), writable=True)
    args = record([address_of(x), x.strides[0], x_head, address_of(factors), heads, width])
    return Op(
        name, "scale_heads", _scale_kernel.address, args, batch.count,
        units=1, per_row=True, grain=1, work=heads * width, keep=(x, factors, batch),
    )  # fmt: skip
