"""Element by element: residual add, SwiGLU product, clipping, the weighted sum of expert rows, picking rows.

The unit of work is a chunk of 64 columns of a row, so that one long row can be split over threads.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.lanes import exp32, f32_at, fma32, i64_at, larger32
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from tierd.errors import UsageError

__all__ = ["add", "clip", "combine", "gather_rows", "gpt_oss_glu", "silu", "silu_mul"]

CHUNK: Final = 64
"""Columns of one unit."""

Rows = NDArray[np.float32]


@njit(nogil=True, cache=True, error_model="numpy")
def silu(x: Any) -> Any:
    """`x / (1 + exp(-x))`."""
    return x / (np.float32(1) + exp32(-x))


@njit(nogil=True, cache=True, error_model="numpy")
def gpt_oss_glu(gate: Any, up: Any) -> Any:
    """`(u + 1) * g / (1 + exp(-1.702 g))` with `g = min(gate, 7)` and u = up cut to [-7, 7]; NaN stays NaN."""
    seven = np.float32(7)
    g = -larger32(-gate, -seven)
    u = larger32(-larger32(-up, -seven), -seven)
    return (u + np.float32(1)) * (g / (np.float32(1) + exp32(np.float32(-1.702) * g)))


@njit(nogil=True, cache=True, error_model="numpy")
def _span(width: int, unit: int) -> tuple[int, int, int]:
    """Row, first column and end column of a unit."""
    chunks = (width + CHUNK - 1) // CHUNK
    row, first = unit // chunks, (unit % chunks) * CHUNK
    return row, first, min(first + CHUNK, width)


@cfunc(KERNEL, cache=True, error_model="numpy")
def _add_kernel(args: int, lo: int, hi: int) -> None:
    """Record: x, x stride, y, y stride, width."""
    m = i64_at(args)
    for unit in range(lo, hi):
        row, first, end = _span(m[4], unit)
        x, y = f32_at(m[0] + row * m[1]), f32_at(m[2] + row * m[3])
        for j in range(first, end):
            x[j] = x[j] + y[j]


@cfunc(KERNEL, cache=True, error_model="numpy")
def _silu_mul_kernel(args: int, lo: int, hi: int) -> None:
    """Record: gate, gate stride, up, up stride, y, y stride, width."""
    m = i64_at(args)
    for unit in range(lo, hi):
        row, first, end = _span(m[6], unit)
        gate, up, y = f32_at(m[0] + row * m[1]), f32_at(m[2] + row * m[3]), f32_at(m[4] + row * m[5])
        for j in range(first, end):
            y[j] = silu(gate[j]) * up[j]


@cfunc(KERNEL, cache=True, error_model="numpy")
def _clip_kernel(args: int, lo: int, hi: int) -> None:
    """Record: x, x stride, width, address of the limit."""
    m = i64_at(args)
    limit = f32_at(m[3])[0]
    for unit in range(lo, hi):
        row, first, end = _span(m[2], unit)
        x = f32_at(m[0] + row * m[1])
        for j in range(first, end):
            x[j] = larger32(-larger32(-x[j], -limit), -limit)


@cfunc(KERNEL, cache=True, error_model="numpy")
def _combine_kernel(args: int, lo: int, hi: int) -> None:
    """Record: residual, stride, expert rows, row stride, weights, row stride, y, stride, k, width."""
    m = i64_at(args)
    width, slots = m[9], m[8]
    for unit in range(lo, hi):
        row, first, end = _span(width, unit)
        residual, y = f32_at(m[0] + row * m[1]), f32_at(m[6] + row * m[7])
        weights = f32_at(m[4] + row * m[5])
        rows = f32_at(m[2] + row * m[3])
        for j in range(first, end):
            total = weights[0] * rows[j]
            for k in range(1, slots):
                total = fma32(weights[k], rows[k * width + j], total)
            y[j] = residual[j] + total


@cfunc(KERNEL, cache=True, error_model="numpy")
def _gather_kernel(args: int, lo: int, hi: int) -> None:
    """Record: x, x stride, x rows, index, y, y stride, width."""
    m = i64_at(args)
    for unit in range(lo, hi):
        row, first, end = _span(m[6], unit)
        source = i64_at(m[3])[row]
        y = f32_at(m[4] + row * m[5])
        if 0 <= source < m[2]:
            x = f32_at(m[0] + source * m[1])
            for j in range(first, end):
                y[j] = x[j]
        else:
            for j in range(first, end):
                y[j] = np.float32(np.nan)


def _op(name: str, kernel: str, code: object, args: list[int], batch: Batch, width: int, *keep: object) -> Op:
    return Op(
        name, kernel, code.address, record(args), batch.count,  # type: ignore[attr-defined]
        units=-(-width // CHUNK), per_row=True, grain=1, work=CHUNK, keep=(batch, *keep),
    )  # fmt: skip


def add(name: str, x: Rows, y: Rows, batch: Batch) -> Op:
    """`x += y` for the live rows; both float32 [max_rows, width]."""
    width = x.shape[-1]
    check_buffer(name, "x", x, (batch.max_rows, None), writable=True)
    check_buffer(name, "y", y, (batch.max_rows, width))
    args = [address_of(x), x.strides[0], address_of(y), y.strides[0], width]
    return _op(name, "add", _add_kernel, args, batch, width, x, y)


def silu_mul(name: str, gate: Rows, up: Rows, y: Rows, batch: Batch) -> Op:
    """`y = silu(gate) * up` for the live rows; all float32 [max_rows, width]; `y` may be `gate` or `up` itself."""
    width = gate.shape[-1]
    check_buffer(name, "gate", gate, (batch.max_rows, None))
    check_buffer(name, "up", up, (batch.max_rows, width))
    check_buffer(name, "y", y, (batch.max_rows, width), writable=True)
    args = [
        address_of(gate), gate.strides[0], address_of(up), up.strides[0], address_of(y), y.strides[0], width,
    ]  # fmt: skip
    return _op(name, "silu_mul", _silu_mul_kernel, args, batch, width, gate, up, y)


def clip(name: str, x: Rows, limit: float, batch: Batch) -> Op:
    """Clips `x`, float32 [max_rows, width], to [-limit, limit] in place (`clip_qkv` of OLMoE)."""
    if not limit > 0:
        raise UsageError(f"{name}: the limit of a clip is positive, not {limit}")
    width = x.shape[-1]
    check_buffer(name, "x", x, (batch.max_rows, None), writable=True)
    bound = np.array([limit], np.float32)
    args = [address_of(x), x.strides[0], width, address_of(bound)]
    return _op(name, "clip", _clip_kernel, args, batch, width, x, bound)


def combine(name: str, residual: Rows, expert_rows: Rows, weights: Rows, y: Rows, batch: Batch) -> Op:
    """Adds the experts' rows to the residual in router order, whatever order they were computed in.

    `s = w[0] * rows[0]`, then `s = fma(w[k], rows[k], s)` for k = 1 ..., and `y = residual + s`.

    Args:
        name: of the op.
        residual: float32 [max_rows, width].
        expert_rows: float32 [max_rows, k, width], one row for each place in the router's order.
        weights: float32 [max_rows, k].
        y: float32 [max_rows, width]; may be `residual` itself.
        batch: the live rows.
    """
    check_buffer(name, "expert_rows", expert_rows, (batch.max_rows, None, None))
    slots, width = expert_rows.shape[1:]
    check_buffer(name, "residual", residual, (batch.max_rows, width))
    check_buffer(name, "weights", weights, (batch.max_rows, slots))
    check_buffer(name, "y", y, (batch.max_rows, width), writable=True)
    args = [
        address_of(residual), residual.strides[0], address_of(expert_rows), expert_rows.strides[0],
        address_of(weights), weights.strides[0], address_of(y), y.strides[0], slots, width,
    ]  # fmt: skip
    op = _op(name, "combine", _combine_kernel, args, batch, width, residual, expert_rows, weights, y)
    op.work = 4 * CHUNK * slots  # it waits for rows that other cores wrote
    return op


def gather_rows(name: str, x: Rows, index: NDArray[np.int64], y: Rows, batch: Batch) -> Op:
    """`y[i] = x[index[i]]` for the live rows of `batch`, usually a smaller one: the rows that need logits.

    Args:
        name: of the op.
        x: float32 [any, width].
        index: int64 [max_rows]; an entry outside `x` gives a row of NaN.
        y: float32 [max_rows, width].
        batch: the live rows of `y`.
    """
    check_buffer(name, "x", x, (None, None))
    check_buffer(name, "index", index, (batch.max_rows,), np.int64)
    check_buffer(name, "y", y, (batch.max_rows, x.shape[1]), writable=True)
    args = [
        address_of(x), x.strides[0], len(x), address_of(index), address_of(y), y.strides[0], x.shape[1],
    ]  # fmt: skip
    return _op(name, "gather_rows", _gather_kernel, args, batch, x.shape[1], x, index, y)
