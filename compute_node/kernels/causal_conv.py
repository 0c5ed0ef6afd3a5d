"""Causal depthwise convolution over the last few positions, then SiLU, as linear attention layers begin with it.

The inputs that later steps still need are the recurrent state: the last `taps - 1` of each sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.elementwise import CHUNK, silu
from compute_node.kernels.lanes import f32_at, fma32, i64_at
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from compute_node.kernels.recurrent import begins, check_state, holds
from tierd.errors import UsageError

__all__ = ["causal_conv"]

Rows = NDArray[np.float32]

# Fields of the record.
X, X_STRIDE, WEIGHT, STATE, Y, Y_STRIDE, WIDTH, TAPS = range(8)
COPIES, POSITIONS, STATES_IN, STATES_OUT, COUNT = range(8, 13)


@njit(nogil=True, cache=True, error_model="numpy")
def _source(m: Any, at: int, begin: int) -> Any:
    """Address of the input of row `at`: a row of this step, or kept from before row `begin` was reached; 0 if never."""
    if at >= begin:
        return m[X] + at * m[X_STRIDE]
    if i64_at(m[POSITIONS])[begin] == 0:
        return 0
    kept = m[TAPS] - 1
    return m[STATE] + (i64_at(m[STATES_IN])[begin] * kept + at - begin + kept) * m[WIDTH] * 4


@njit(nogil=True, cache=True, error_model="numpy")
def _convolve(m: Any, row: int, begin: int, first: int, end: int) -> None:
    """Channels first..end of one row, whose sequence has `begin` as its first row of this step."""
    y = f32_at(m[Y] + row * m[Y_STRIDE])
    for j in range(first, end):
        y[j] = np.float32(0)
    for tap in range(m[TAPS]):
        source = _source(m, row - m[TAPS] + 1 + tap, begin)
        if source != 0:
            x, w = f32_at(source), f32_at(m[WEIGHT] + tap * m[WIDTH] * 4)
            for j in range(first, end):
                y[j] = fma32(w[j], x[j], y[j])
    for j in range(first, end):
        y[j] = silu(y[j])


@njit(nogil=True, cache=True, error_model="numpy")
def _leave(m: Any, row: int, begin: int, first: int, end: int) -> None:
    """Keeps the inputs that rows behind `row` will need, the latest last."""
    kept = m[TAPS] - 1
    for tap in range(kept):
        source = _source(m, row - kept + 1 + tap, begin)
        x, left = f32_at(source), f32_at(m[STATE] + (i64_at(m[STATES_OUT])[row] * kept + tap) * m[WIDTH] * 4)
        for j in range(first, end):
            left[j] = x[j] if source != 0 else np.float32(0)


@cfunc(KERNEL, cache=True, error_model="numpy")
def _conv_kernel(args: int, lo: int, hi: int) -> None:
    """One unit is a chunk of channels; it walks all rows in order."""
    m = i64_at(args)
    rows = i64_at(m[COUNT])[0]
    for unit in range(lo, hi):
        first, end = unit * CHUNK, min(unit * CHUNK + CHUNK, m[WIDTH])
        begin = 0
        for row in range(rows):
            if begins(m[STATES_OUT], row):
                begin = row
            if holds(m[STATES_IN], m[STATES_OUT], row, m[COPIES]):
                _convolve(m, row, begin, first, end)
                if row + 1 == rows or begins(m[STATES_OUT], row + 1):
                    _leave(m, row, begin, first, end)
            else:
                y = f32_at(m[Y] + row * m[Y_STRIDE])
                for j in range(first, end):
                    y[j] = np.float32(np.nan)


def causal_conv(name: str, x: Rows, weight: Rows, state: Rows, y: Rows, batch: Batch) -> Op:
    """`y[t, c] = silu(sum over i of weight[c, i] * x[t - taps + 1 + i, c])` for the live rows; sums in rising i.

    Args:
        name: of the op.
        x: float32 [max_rows, channels].
        weight: float32 [channels, taps], as a depthwise convolution without bias stores it; at least two taps.
        state: float32 [copies, taps - 1, channels]; see `compute_node.kernels.recurrent`.
        y: float32 [max_rows, channels]; must not overlap `x`. A row without a state becomes NaN.
        batch: the live rows, their positions and the copies of their states.
    """
    check_buffer(name, "weight", weight, (None, None))
    channels, taps = weight.shape
    if taps < 2:
        raise UsageError(f"{name}: a causal convolution looks back at least one position")
    check_buffer(name, "x", x, (batch.max_rows, channels))
    check_buffer(name, "y", y, (batch.max_rows, channels), writable=True)
    check_state(name, state, (taps - 1, channels))
    if np.may_share_memory(x, y):
        raise UsageError(f"{name}: x and y overlap")
    by_tap = np.ascontiguousarray(weight.T)
    args = record([
        address_of(x), x.strides[0], address_of(by_tap), address_of(state), address_of(y), y.strides[0], channels,
        taps, len(state), address_of(batch.positions), address_of(batch.states_in), address_of(batch.states_out),
        address_of(batch.count),
    ])  # fmt: skip
    return Op(
        name, "causal_conv", _conv_kernel.address, args, batch.count,
        units=-(-channels // CHUNK), per_row=False, grain=1, work=CHUNK * (taps + 1),
        keep=(x, by_tap, state, y, batch),
    )  # fmt: skip
