"""The gated delta rule of linear attention layers (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464).

Each value head keeps a matrix S [key width, value width]. A token with query q, key k, value v, decay d and learning
rate b turns it into `S = d S + k (b (v - d S^T k))^T` and reads `S^T q`. There is this one form for prefill and
decode, row after row, so that bits do not depend on where a prompt was cut. Columns of S never meet each other:
threads split heads and blocks of columns.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.dots import dot
from compute_node.kernels.gates import sigmoid
from compute_node.kernels.lanes import exp32, f32_at, fma32, i64_at, larger32
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from compute_node.kernels.recurrent import begins, check_state, holds
from compute_node.kernels.weighted_sum import stack_floats, weighted_sum
from tierd.errors import UsageError

__all__ = ["delta_gates", "delta_rule", "l2_norm", "softplus"]

BLOCK: Final = 64
"""Columns of a state that are computed together: 32 KiB of a key width of 128."""

Rows = NDArray[np.float32]
Vector = NDArray[np.float32]

_ATANH_SERIES: Final = (1 / 15, 1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0)


@njit(nogil=True, cache=True, error_model="numpy")
def softplus(x: Any) -> Any:
    """`log(1 + exp(x))`, as max(x, 0) + log1p(exp(-|x|)).

    log1p(u) = 2 atanh(u / (2 + u)), by the series of atanh up to the fifteenth power: its argument is at most 1/3, the
    rest below 2e-9 of the sum.
    """
    u = exp32(-larger32(x, -x))
    s = u / (np.float32(2) + u)
    square = s * s
    series = np.float32(_ATANH_SERIES[0])
    series = fma32(series, square, np.float32(_ATANH_SERIES[1]))
    series = fma32(series, square, np.float32(_ATANH_SERIES[2]))
    series = fma32(series, square, np.float32(_ATANH_SERIES[3]))
    series = fma32(series, square, np.float32(_ATANH_SERIES[4]))
    series = fma32(series, square, np.float32(_ATANH_SERIES[5]))
    series = fma32(series, square, np.float32(_ATANH_SERIES[6]))
    series = fma32(series, square, np.float32(_ATANH_SERIES[7]))
    return larger32(x, np.float32(0)) + (s + s) * series


@cfunc(KERNEL, cache=True, error_model="numpy")
def _l2_kernel(args: int, lo: int, hi: int) -> None:
    """Record: x, x stride, y, y stride, address of eps and scale, group width, groups in a row."""
    m = i64_at(args)
    width, groups = m[5], m[6]
    eps, scale = f32_at(m[4])[0], f32_at(m[4])[1]
    for unit in range(lo, hi):
        row, group = unit // groups, unit % groups
        source = m[0] + row * m[1] + group * width * 4
        x, y = f32_at(source), f32_at(m[2] + row * m[3] + group * width * 4)
        inverse = np.float32(1) / np.sqrt(dot(source, source, width) + eps)
        for j in range(width):
            y[j] = (x[j] * inverse) * scale


def l2_norm(name: str, x: Rows, y: Rows, batch: Batch, *, width: int, scale: float = 1.0, eps: float = 1e-6) -> Op:
    """`y = x / sqrt(sum(x^2) + eps) * scale` for each group of `width` elements of the live rows.

    Args:
        name: of the op.
        x: float32 [max_rows, groups * width].
        y: the same shape; may be `x` itself.
        batch: the live rows.
        width: elements of a group, usually a head.
        scale: multiplied in last.
        eps: added to the sum of squares.
    """
    check_buffer(name, "x", x, (batch.max_rows, None))
    check_buffer(name, "y", y, (batch.max_rows, x.shape[1]), writable=True)
    if width < 1 or x.shape[1] % width:
        raise UsageError(f"{name}: groups of {width} do not divide rows of {x.shape[1]}")
    groups, numbers = x.shape[1] // width, np.array([eps, scale], np.float32)
    args = record([
        address_of(x), x.strides[0], address_of(y), y.strides[0], address_of(numbers), width, groups,
    ])  # fmt: skip
    return Op(
        name, "l2_norm", _l2_kernel.address, args, batch.count,
        units=groups, per_row=True, grain=1, work=2 * width, keep=(x, y, numbers, batch),
    )  # fmt: skip


@cfunc(KERNEL, cache=True, error_model="numpy")
def _gates_kernel(args: int, lo: int, hi: int) -> None:
    """Record: a, a stride, b, b stride, bias, rate, decay, decay stride, beta, beta stride, heads."""
    m = i64_at(args)
    bias, rate = f32_at(m[4]), f32_at(m[5])
    for row in range(lo, hi):
        a, b = f32_at(m[0] + row * m[1]), f32_at(m[2] + row * m[3])
        decay, beta = f32_at(m[6] + row * m[7]), f32_at(m[8] + row * m[9])
        for head in range(m[10]):
            decay[head] = exp32(-(rate[head] * softplus(a[head] + bias[head])))
            beta[head] = sigmoid(b[head])


def delta_gates(
    name: str, a: Rows, b: Rows, log_rate: Vector, bias: Vector, decay: Rows, beta: Rows, batch: Batch
) -> Op:
    """`decay = exp(-exp(log_rate) * softplus(a + bias))` and `beta = sigmoid(b)` for each head of the live rows.

    Args:
        name: of the op.
        a: float32 [max_rows, heads].
        b: the same shape.
        log_rate: float32 [heads], `A_log` of the checkpoint.
        bias: float32 [heads], `dt_bias`.
        decay: float32 [max_rows, heads], written.
        beta: the same shape, written.
        batch: the live rows.
    """
    heads = len(log_rate)
    check_buffer(name, "log_rate", log_rate, (heads,))
    check_buffer(name, "bias", bias, (heads,))
    for what, rows in (("a", a), ("b", b)):
        check_buffer(name, what, rows, (batch.max_rows, heads))
    for what, rows in (("decay", decay), ("beta", beta)):
        check_buffer(name, what, rows, (batch.max_rows, heads), writable=True)
    rate = np.exp(log_rate.astype(np.float64)).astype(np.float32)
    args = record([
        address_of(a), a.strides[0], address_of(b), b.strides[0], address_of(bias), address_of(rate),
        address_of(decay), decay.strides[0], address_of(beta), beta.strides[0], heads,
    ])  # fmt: skip
    return Op(
        name, "delta_gates", _gates_kernel.address, args, batch.count,
        units=1, per_row=True, grain=1, work=heads * 16, keep=(a, b, bias, rate, decay, beta, batch),
    )  # fmt: skip


# Fields of the record of the delta rule.
Q, Q_STRIDE, K, K_STRIDE, V, V_STRIDE, DECAY, DECAY_STRIDE, BETA, BETA_STRIDE = range(10)
STATE, Y, Y_STRIDE, HEADS, GROUP, KEY, VALUE, COPIES, POSITIONS, STATES_IN, STATES_OUT, COUNT = range(10, 22)


@njit(nogil=True, cache=True, error_model="numpy")
def _change(old: int, new: int, keys: Any, delta: int, decay: Any, rows: int, columns: int, width: int) -> None:
    """`new = decay * old + k delta^T` for a block of columns; `old` 0 is a state of zeros. The two may be one."""
    d = f32_at(delta)
    for i in range(rows):
        s, key = f32_at(new + i * width * 4), keys[i]
        if old == 0:
            for j in range(columns):
                s[j] = key * d[j]
        else:
            o = f32_at(old + i * width * 4)
            for j in range(columns):
                s[j] = fma32(key, d[j], decay * o[j])


@cfunc(KERNEL, cache=True, error_model="numpy")
def _delta_kernel(args: int, lo: int, hi: int) -> None:
    """One unit is a block of columns of one head; it walks all rows in order."""
    m = i64_at(args)
    rows, key, width = i64_at(m[COUNT])[0], m[KEY], m[VALUE]
    blocks = (width + BLOCK - 1) // BLOCK
    buffer = stack_floats()
    told = f32_at(buffer)
    for unit in range(lo, hi):
        head, first = unit // blocks, (unit % blocks) * BLOCK
        columns, at = min(BLOCK, width - first), (head * width + first) * 4
        for row in range(rows):
            out = m[Y] + row * m[Y_STRIDE] + at
            if not holds(m[STATES_IN], m[STATES_OUT], row, m[COPIES]):
                y = f32_at(out)
                for j in range(columns):
                    y[j] = np.float32(np.nan)
                continue
            inside = (head * key * width + first) * 4
            copy_bytes = m[HEADS] * key * width * 4
            new = m[STATE] + i64_at(m[STATES_OUT])[row] * copy_bytes + inside
            old = new
            if begins(m[STATES_OUT], row):
                old = m[STATE] + i64_at(m[STATES_IN])[row] * copy_bytes + inside
                old = 0 if i64_at(m[POSITIONS])[row] == 0 else old
            keys = m[K] + row * m[K_STRIDE] + head // m[GROUP] * key * 4
            decay, beta = f32_at(m[DECAY] + row * m[DECAY_STRIDE])[head], f32_at(m[BETA] + row * m[BETA_STRIDE])[head]
            v = f32_at(m[V] + row * m[V_STRIDE] + at)
            if old == 0:
                for j in range(columns):
                    told[j] = v[j] * beta
            else:
                weighted_sum(keys, old, width * 4, key, columns, buffer)
                for j in range(columns):
                    told[j] = (v[j] - decay * told[j]) * beta
            _change(old, new, f32_at(keys), buffer, decay, key, columns, width)
            weighted_sum(m[Q] + row * m[Q_STRIDE] + head // m[GROUP] * key * 4, new, width * 4, key, columns, out)


def delta_rule(name: str, q: Rows, k: Rows, v: Rows, decay: Rows, beta: Rows, state: Rows, y: Rows, batch: Batch) -> Op:
    """Applies the gated delta rule to each live row in order and reads its query from the new state.

    Value head h has the query and key of head h // (heads / key heads).

    Args:
        name: of the op.
        q: float32 [max_rows, key heads * key width], normalised and scaled.
        k: the same shape, normalised.
        v: float32 [max_rows, heads * value width].
        decay: float32 [max_rows, heads], what is left of the state.
        beta: float32 [max_rows, heads], the learning rate.
        state: float32 [copies, heads, key width, value width]; see `compute_node.kernels.recurrent`.
        y: float32 [max_rows, heads * value width]; must not overlap `v`. A row without a state becomes NaN.
        batch: the live rows, their positions and the copies of their states.
    """
    check_buffer(name, "state", state, (None, None, None, None))
    _, heads, key, width = state.shape
    check_state(name, state, (heads, key, width))
    check_buffer(name, "q", q, (batch.max_rows, None))
    check_buffer(name, "k", k, (batch.max_rows, q.shape[1]))
    key_heads = q.shape[1] // key if key else 0
    if min(heads, key, width, key_heads) < 1 or q.shape[1] % key or heads % key_heads:
        raise UsageError(f"{name}: keys of {q.shape[1]} do not fit {heads} states of {key} x {width}")
    check_buffer(name, "v", v, (batch.max_rows, heads * width))
    check_buffer(name, "y", y, (batch.max_rows, heads * width), writable=True)
    if np.may_share_memory(v, y):
        raise UsageError(f"{name}: v and y overlap")
    for what, rows in (("decay", decay), ("beta", beta)):
        check_buffer(name, what, rows, (batch.max_rows, heads))
    args = record([
        address_of(q), q.strides[0], address_of(k), k.strides[0], address_of(v), v.strides[0],
        address_of(decay), decay.strides[0], address_of(beta), beta.strides[0], address_of(state),
        address_of(y), y.strides[0], heads, heads // key_heads, key, width, len(state),
        address_of(batch.positions), address_of(batch.states_in), address_of(batch.states_out), address_of(batch.count),
    ])  # fmt: skip
    return Op(
        name, "delta_rule", _delta_kernel.address, args, batch.count,
        units=heads * -(-width // BLOCK), per_row=False, grain=1, work=4 * key * min(width, BLOCK),
        keep=(q, k, v, decay, beta, state, y, batch),
    )  # fmt: skip
