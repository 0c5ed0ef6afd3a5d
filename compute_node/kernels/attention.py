"""Causal attention of each row over the KV cache, and appending to it.

The positions of a sequence are cut into tiles of 64 at absolute positions. Each tile has its own softmax (largest
score, sum, weighted values), and tiles are merged in rising order. A row's result depends on its position, its query
and the cache alone: prefill, prefill in chunks of any size and decode give the same bits. Online merging of
softmax parts follows Milakov and Gimelshein 2018 (arXiv:1805.02867) and FlashAttention (arXiv:2205.14135).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.dots import dots_f32
from compute_node.kernels.lanes import f32_at, i64_at
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from compute_node.kernels.pages import slot_of
from compute_node.kernels.tile_softmax import (
    ROOM,
    STATE,
    TILE,
    begin_row,
    finish_row,
    merge_tile,
    tile_largest,
    tile_weights,
)
from compute_node.kernels.weighted_sum import STACK_FLOATS, stack_floats, weighted_sum
from tierd.errors import UsageError

__all__ = ["attention", "kv_append"]

_TYPICAL_CONTEXT: Final = 256

Rows = NDArray[np.float32]

# Fields of the attention record.
Q, Q_STRIDE, K_CACHE, V_CACHE, Y, Y_STRIDE, POSITIONS, TABLES, LIMITS = range(9)
COUNT, HEADS, GROUP, HEAD_DIM, SLOTS, SCALE, WINDOW, SINKS = range(9, 17)


@njit(nogil=True, cache=True, error_model="numpy")
def _scores(queries: Any, keys: int, row_bytes: int, begin: int, end: int, head_dim: int, scale: Any, out: int) -> None:
    """Scaled scores of positions begin..end of a tile for one query or four, `ROOM` floats apart.

    `keys` is the key at `begin`; a score lies at its position's place in the tile, and so in the same lane always.
    """
    last = end - 1
    at = keys - begin * row_bytes
    for j in range(begin, end, 4):
        a, b, c = min(j + 1, last), min(j + 2, last), min(j + 3, last)
        places = (at + j * row_bytes, at + a * row_bytes, at + b * row_bytes, at + c * row_bytes)
        sums = dots_f32(places, queries, head_dim, places[0] + 4 * row_bytes)
        for row in range(len(queries)):
            s = f32_at(out + row * ROOM * 4)
            s[j] = sums[row * 4] * scale
            s[a] = sums[row * 4 + 1] * scale
            s[b] = sums[row * 4 + 2] * scale
            s[c] = sums[row * 4 + 3] * scale


@njit(nogil=True, cache=True, error_model="numpy")
def _merge(
    out: int, state: int, scores: int, largest: Any, values: int, rows: int, begin: int, count: int, d: int
) -> None:
    """Adds a tile to a row: its scores become weights, its values are summed and merged into `out` and `state`.

    `rows` is the value at the tile's `begin`, `count` values follow each other, `d` is the width of a head.
    """
    total = tile_weights(scores, largest)
    weighted_sum(scores + begin * 4, rows, d * 4, count, d, values)
    merge_tile(out, state, values, largest, total, d)


@njit(nogil=True, cache=True, error_model="numpy")
def _one(m: Any, row: int, q: int, start: int, sink: int, out: int, scores: int, values: int) -> None:
    """One row of one head; `start` is where the head's slot 0 lies in the caches."""
    head_dim, scale, row_bytes = m[HEAD_DIM], f32_at(m[SCALE])[0], m[HEAD_DIM] * 4
    position, state, table = i64_at(m[POSITIONS])[row], scores + STATE * 4, i64_at(m[TABLES])[row]
    first = max(0, position - m[WINDOW] + 1) if m[WINDOW] > 0 else 0
    begin_row(out, state, head_dim)
    for tile in range(first // TILE * TILE, position + 1, TILE):
        begin, end = max(tile, first), min(tile + TILE, position + 1)
        at = start + slot_of(table, begin) * row_bytes
        _scores((q,), m[K_CACHE] + at, row_bytes, begin - tile, end - tile, head_dim, scale, scores)
        largest = tile_largest(scores, begin - tile, end - tile)
        _merge(out, state, scores, largest, values, m[V_CACHE] + at, begin - tile, end - begin, head_dim)
    finish_row(out, state, head_dim, sink)


@njit(nogil=True, cache=True, error_model="numpy")
def _four(m: Any, row: int, q: int, start: int, sink: int, out: int, scores: int, values: int) -> None:
    """Four rows of one head and one sequence, whose keys are loaded once for all; no window."""
    head_dim, scale, row_bytes = m[HEAD_DIM], f32_at(m[SCALE])[0], m[HEAD_DIM] * 4
    positions, step, q_step, table = i64_at(m[POSITIONS]), m[Y_STRIDE], m[Q_STRIDE], i64_at(m[TABLES])[row]
    last = max(positions[row], positions[row + 1], positions[row + 2], positions[row + 3])
    queries = (q, q + q_step, q + 2 * q_step, q + 3 * q_step)
    for r in range(4):
        begin_row(out + r * step, scores + (STATE + 2 * r) * 4, head_dim)
    for tile in range(0, last + 1, TILE):
        at = start + slot_of(table, tile) * row_bytes
        _scores(queries, m[K_CACHE] + at, row_bytes, 0, min(tile + TILE, last + 1) - tile, head_dim, scale, scores)
        for r in range(4):
            count = min(TILE, positions[row + r] + 1 - tile)
            if count > 0:
                own, state = scores + r * ROOM * 4, scores + (STATE + 2 * r) * 4
                largest = tile_largest(own, 0, count)
                _merge(out + r * step, state, own, largest, values, m[V_CACHE] + at, 0, count, head_dim)
    for r in range(4):
        finish_row(out + r * step, scores + (STATE + 2 * r) * 4, head_dim, sink)


@njit(nogil=True, cache=True, error_model="numpy")
def _inside(m: Any, row: int) -> Any:
    """True if a row's position lies in the pages of its sequence."""
    position = i64_at(m[POSITIONS])[row]
    return 0 <= position < i64_at(m[LIMITS])[row]


@cfunc(KERNEL, cache=True, error_model="numpy")
def _attention_kernel(args: int, lo: int, hi: int) -> None:
    """One unit is one head of one row, heads outermost, so that threads share the work of a causal prefill evenly."""
    m = i64_at(args)
    rows, row_bytes, tables = i64_at(m[COUNT])[0], m[HEAD_DIM] * 4, i64_at(m[TABLES])
    scores, values = stack_floats(), stack_floats()
    unit = lo
    while unit < hi:
        head, row = unit // rows, unit % rows
        out = m[Y] + row * m[Y_STRIDE] + head * row_bytes
        q = m[Q] + row * m[Q_STRIDE] + head * row_bytes
        start = (head // m[GROUP]) * m[SLOTS] * row_bytes
        sink = m[SINKS] + head * 4 if m[SINKS] != 0 else 0
        together = m[WINDOW] == 0 and row + 4 <= rows and unit + 4 <= hi
        for other in range(row, row + 4 if together else row):
            together = together and _inside(m, other) and tables[other] == tables[row]
        if together:
            _four(m, row, q, start, sink, out, scores, values)
            unit += 4
            continue
        if _inside(m, row):
            _one(m, row, q, start, sink, out, scores, values)
        else:
            y = f32_at(out)
            for d in range(m[HEAD_DIM]):
                y[d] = np.float32(np.nan)
        unit += 1


@cfunc(KERNEL, cache=True, error_model="numpy")
def _append_kernel(args: int, lo: int, hi: int) -> None:
    """Record: k, k stride, v, v stride, k cache, v cache, positions, tables, limits, kv heads, head_dim, slots."""
    m = i64_at(args)
    heads, head_dim, slots = m[9], m[10], m[11]
    for unit in range(lo, hi):
        row, head = unit // heads, unit % heads
        position = i64_at(m[6])[row]
        if 0 <= position < i64_at(m[8])[row]:
            at = (head * slots + slot_of(i64_at(m[7])[row], position)) * head_dim * 4
            k, v = f32_at(m[0] + row * m[1] + head * head_dim * 4), f32_at(m[2] + row * m[3] + head * head_dim * 4)
            k_slot, v_slot = f32_at(m[4] + at), f32_at(m[5] + at)
            for d in range(head_dim):
                k_slot[d] = k[d]
                v_slot[d] = v[d]


def _check_caches(name: str, k_cache: Rows, v_cache: Rows, *, writable: bool) -> tuple[int, int, int]:
    """Kv heads, slots and head_dim of two caches of one shape."""
    for what, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_buffer(name, what, cache, (None, None, None), writable=writable)
        if not cache.flags.c_contiguous or cache.shape != k_cache.shape:
            raise UsageError(f"{name}: both caches must be contiguous and of one shape [kv_heads, slots, head_dim]")
    heads, slots, head_dim = k_cache.shape
    if not 1 <= head_dim <= STACK_FLOATS or heads < 1 or slots < 1:
        raise UsageError(f"{name}: no attention over a cache of shape {list(k_cache.shape)}")
    return heads, slots, head_dim


def kv_append(name: str, k: Rows, v: Rows, k_cache: Rows, v_cache: Rows, batch: Batch) -> Op:
    """Writes the keys and values of the live rows into the cache, each at the slot of its position.

    Args:
        name: of the op.
        k: float32 [max_rows, kv_heads * head_dim].
        v: the same shape.
        k_cache: float32 [kv_heads, slots, head_dim], contiguous. A row beyond its sequence's pages is not written.
        v_cache: the same shape.
        batch: the live rows, their positions and page tables.
    """
    heads, slots, head_dim = _check_caches(name, k_cache, v_cache, writable=True)
    check_buffer(name, "k", k, (batch.max_rows, heads * head_dim))
    check_buffer(name, "v", v, (batch.max_rows, heads * head_dim))
    args = record([
        address_of(k), k.strides[0], address_of(v), v.strides[0], address_of(k_cache), address_of(v_cache),
        address_of(batch.positions), address_of(batch.tables), address_of(batch.limits), heads, head_dim, slots,
    ])  # fmt: skip
    return Op(
        name, "kv_append", _append_kernel.address, args, batch.count,
        units=heads, per_row=True, grain=1, work=16 * head_dim, keep=(k, v, k_cache, v_cache, batch),
    )  # fmt: skip


def attention(
    name: str,
    q: Rows,
    k_cache: Rows,
    v_cache: Rows,
    y: Rows,
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    sinks: NDArray[np.float32] | None = None,
) -> Op:
    """Softmax attention of each live row over its sequence's cache, up to and including its own position.

    Grouped-query attention: head h reads kv head h // (heads / kv_heads). The rows' own keys and values must be in
    the cache already (`kv_append` before this op).

    Args:
        name: of the op.
        q: float32 [max_rows, heads * head_dim].
        k_cache: float32 [kv_heads, slots, head_dim], contiguous.
        v_cache: the same shape.
        y: float32 [max_rows, heads * head_dim]; must not be `q`. A row beyond its sequence's pages becomes NaN.
        batch: the live rows, their positions and page tables.
        scale: of the scores, usually head_dim ** -0.5.
        window: positions that a row sees, its own included; None for all.
        sinks: float32 [heads], one more score for each head that takes part in its softmax and has no value (Xiao et
            al. 2023, arXiv:2309.17453, in the learned form of gpt-oss); None for none.
    """
    kv_heads, slots, head_dim = _check_caches(name, k_cache, v_cache, writable=False)
    check_buffer(name, "q", q, (batch.max_rows, None))
    check_buffer(name, "y", y, (batch.max_rows, q.shape[1]), writable=True)
    heads = q.shape[1] // head_dim
    if heads < 1 or q.shape[1] % head_dim or heads % kv_heads:
        raise UsageError(f"{name}: queries of {q.shape[1]} do not fit {kv_heads} kv heads of {head_dim}")
    if window is not None and window < 1:
        raise UsageError(f"{name}: a sliding window holds at least one position, not {window}")
    if np.may_share_memory(q, y):
        raise UsageError(f"{name}: q and y overlap")
    if sinks is not None:
        check_buffer(name, "sinks", sinks, (heads,))
    factor = np.array([scale], np.float32)
    args = record([
        address_of(q), q.strides[0], address_of(k_cache), address_of(v_cache), address_of(y), y.strides[0],
        address_of(batch.positions), address_of(batch.tables), address_of(batch.limits), address_of(batch.count),
        heads, heads // kv_heads, head_dim, slots, address_of(factor), window or 0, address_of(sinks),
    ])  # fmt: skip
    return Op(
        name, "attention", _attention_kernel.address, args, batch.count,
        units=heads, per_row=True, grain=1, work=2 * head_dim * min(slots, _TYPICAL_CONTEXT),
        keep=(q, k_cache, v_cache, y, factor, sinks, batch),
    )  # fmt: skip
