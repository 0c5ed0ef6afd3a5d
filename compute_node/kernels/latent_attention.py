"""Attention over a cache of latents: all heads read the same rows, as keys whole and as values the front part.

This is multi-head latent attention in its absorbed form (DeepSeek-V2 report, arXiv:2405.04434, section 2.1.2): the
matrix that would expand a latent to a head's key is applied to the query instead, and the one that would expand it to a
value is applied to the weighted sum of latents. The cache holds one row per token, whatever the number of heads, and
prefill, chunks of it and decode take the same path.

A row reads its positions 0, 1, 2 ... or those that an indexer has chosen, in rising order. They are cut into tiles of
64 in that order; each tile has its own softmax, and tiles are merged in rising order. What a row gets depends on its
position, its query, its choice and the cache alone.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.dots import dots_f32
from compute_node.kernels.lanes import f32_at, fma32, i32_at, i64_at
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

__all__ = ["check_plane", "latent_attention", "plane_append"]

_TYPICAL_CONTEXT: Final = 256
TOGETHER: Final = 4
"""Heads for which a cached row is loaded once."""

Rows = NDArray[np.float32]

# Fields of the record.
Q, Q_STRIDE, PLANE, Y, Y_STRIDE, POSITIONS, TABLES, LIMITS, COUNT = range(9)
HEADS, WIDTH, RANK, SCALE, CHOSEN, CHOSEN_STRIDE = range(9, 15)


@njit(nogil=True, cache=True, error_model="numpy")
def _cached(m: Any, row: int, entry: int) -> Any:
    """Address of the cached row that a live row reads as its `entry`-th."""
    position = entry
    if m[CHOSEN] != 0:
        position = i32_at(m[CHOSEN] + row * m[CHOSEN_STRIDE])[1 + entry]
    return m[PLANE] + slot_of(i64_at(m[TABLES])[row], position) * m[WIDTH] * 4


@njit(nogil=True, cache=True, error_model="numpy")
def _scores(m: Any, row: int, queries: Any, tile: int, count: int, out: int) -> None:
    """Scaled scores of entries tile..tile + count for one query or four, `ROOM` floats apart."""
    scale, last = f32_at(m[SCALE])[0], count - 1
    for j in range(0, count, 4):
        a, b, c = min(j + 1, last), min(j + 2, last), min(j + 3, last)
        places = (
            _cached(m, row, tile + j),
            _cached(m, row, tile + a),
            _cached(m, row, tile + b),
            _cached(m, row, tile + c),
        )
        sums = dots_f32(places, queries, m[WIDTH], _cached(m, row, tile + min(j + 4, last)))
        for h in range(len(queries)):
            s = f32_at(out + h * ROOM * 4)
            s[j] = sums[h * 4] * scale
            s[a] = sums[h * 4 + 1] * scale
            s[b] = sums[h * 4 + 2] * scale
            s[c] = sums[h * 4 + 3] * scale


@njit(nogil=True, cache=True, error_model="numpy")
def _values(m: Any, row: int, weights: int, tile: int, count: int, out: int) -> None:
    """Weighted sum of the front parts of a tile's rows: each column by fma from zero in rising order."""
    rank = m[RANK]
    if m[CHOSEN] == 0:  # a tile lies in one page
        weighted_sum(weights, _cached(m, row, tile), m[WIDTH] * 4, count, rank, out)
        return
    p, o = f32_at(weights), f32_at(out)
    for d in range(rank):
        o[d] = np.float32(0)
    for j in range(count):
        v, weight = f32_at(_cached(m, row, tile + j)), p[j]
        for d in range(rank):
            o[d] = fma32(weight, v[d], o[d])


@njit(nogil=True, cache=True, error_model="numpy")
def _attend(m: Any, row: int, queries: Any, out: int, scores: int, values: int) -> None:
    """One row for one head or four."""
    rank = m[RANK]
    entries = i64_at(m[POSITIONS])[row] + 1
    if m[CHOSEN] != 0:
        entries = i32_at(m[CHOSEN] + row * m[CHOSEN_STRIDE])[0]
    for h in range(len(queries)):
        begin_row(out + h * rank * 4, scores + (STATE + 2 * h) * 4, rank)
    for tile in range(0, entries, TILE):
        count = min(TILE, entries - tile)
        _scores(m, row, queries, tile, count, scores)
        for h in range(len(queries)):
            own = scores + h * ROOM * 4
            largest = tile_largest(own, 0, count)
            total = tile_weights(own, largest)
            _values(m, row, own, tile, count, values)
            merge_tile(out + h * rank * 4, scores + (STATE + 2 * h) * 4, values, largest, total, rank)
    for h in range(len(queries)):
        finish_row(out + h * rank * 4, scores + (STATE + 2 * h) * 4, rank, 0)


@cfunc(KERNEL, cache=True, error_model="numpy")
def _latent_kernel(args: int, lo: int, hi: int) -> None:
    """One unit is four heads of one row, heads outermost, so that threads share a causal prefill evenly."""
    m = i64_at(args)
    rows, heads, rank = i64_at(m[COUNT])[0], m[HEADS], m[RANK]
    scores, values = stack_floats(), stack_floats()
    for unit in range(lo, hi):
        first, row = unit // rows * TOGETHER, unit % rows
        end = min(first + TOGETHER, heads)
        out, step = m[Y] + row * m[Y_STRIDE] + first * rank * 4, m[WIDTH] * 4
        q = m[Q] + row * m[Q_STRIDE] + first * step
        position = i64_at(m[POSITIONS])[row]
        if position < 0 or position >= i64_at(m[LIMITS])[row]:
            y = f32_at(out)
            for d in range((end - first) * rank):
                y[d] = np.float32(np.nan)
        elif end - first == TOGETHER:
            _attend(m, row, (q, q + step, q + 2 * step, q + 3 * step), out, scores, values)
        else:
            for h in range(end - first):
                _attend(m, row, (q + h * step,), out + h * rank * 4, scores, values)


@cfunc(KERNEL, cache=True, error_model="numpy")
def _append_kernel(args: int, lo: int, hi: int) -> None:
    """Record: x, x stride, plane, positions, tables, limits, width. One unit is one row."""
    m = i64_at(args)
    width = m[6]
    for row in range(lo, hi):
        position = i64_at(m[3])[row]
        if 0 <= position < i64_at(m[5])[row]:
            x = f32_at(m[0] + row * m[1])
            y = f32_at(m[2] + slot_of(i64_at(m[4])[row], position) * width * 4)
            for d in range(width):
                y[d] = x[d]


def check_plane(name: str, plane: Rows, *, writable: bool) -> tuple[int, int]:
    """Slots and width of a plane of the cache with one head; UsageError for another shape."""
    check_buffer(name, "plane", plane, (1, None, None), writable=writable)
    if len(plane) != 1 or not plane.flags.c_contiguous or not plane.size:
        raise UsageError(f"{name}: a plane must be contiguous [1, slots, width], not {list(plane.shape)}")
    return plane.shape[1], plane.shape[2]


def plane_append(name: str, x: Rows, plane: Rows, batch: Batch) -> Op:
    """Writes the live rows into a plane of the cache, each at the slot of its position.

    Args:
        name: of the op.
        x: float32 [max_rows, width].
        plane: float32 [1, slots, width], contiguous. A row beyond its sequence's pages is not written.
        batch: the live rows, their positions and page tables.
    """
    _, width = check_plane(name, plane, writable=True)
    check_buffer(name, "x", x, (batch.max_rows, width))
    args = record([
        address_of(x), x.strides[0], address_of(plane), address_of(batch.positions), address_of(batch.tables),
        address_of(batch.limits), width,
    ])  # fmt: skip
    return Op(
        name, "plane_append", _append_kernel.address, args, batch.count,
        units=1, per_row=True, grain=1, work=width, keep=(x, plane, batch),
    )  # fmt: skip


def latent_attention(
    name: str,
    q: Rows,
    plane: Rows,
    y: Rows,
    batch: Batch,
    *,
    rank: int,
    scale: float,
    chosen: NDArray[np.int32] | None = None,
) -> Op:
    """Softmax attention of each live row over its sequence's latents, up to and including its own position.

    The rows' own latents must be in the cache already (`plane_append` before this op).

    Args:
        name: of the op.
        q: float32 [max_rows, heads * width], queries as wide as a cached row.
        plane: float32 [1, slots, width], contiguous.
        y: float32 [max_rows, heads * rank], weighted sums of the first `rank` elements of the cached rows; must not
            be `q`. A row beyond its sequence's pages becomes NaN.
        batch: the live rows, their positions and page tables.
        rank: elements that are values, at most 1024.
        scale: of the scores.
        chosen: int32 [max_rows, 1 + most], how many positions a row reads and which, rising, at most its own; None:
            all.
    """
    slots, width = check_plane(name, plane, writable=False)
    check_buffer(name, "q", q, (batch.max_rows, None))
    heads = q.shape[1] // width
    if heads < 1 or q.shape[1] % width or not 1 <= rank <= min(width, STACK_FLOATS):
        raise UsageError(f"{name}: queries of {q.shape[1]} and values of {rank} do not fit cached rows of {width}")
    check_buffer(name, "y", y, (batch.max_rows, heads * rank), writable=True)
    if chosen is not None:
        check_buffer(name, "chosen", chosen, (batch.max_rows, None), np.int32)
    if np.may_share_memory(q, y):
        raise UsageError(f"{name}: q and y overlap")
    factor = np.array([scale], np.float32)
    args = record([
        address_of(q), q.strides[0], address_of(plane), address_of(y), y.strides[0],
        address_of(batch.positions), address_of(batch.tables), address_of(batch.limits), address_of(batch.count),
        heads, width, rank, address_of(factor), address_of(chosen), 0 if chosen is None else chosen.strides[0],
    ])  # fmt: skip
    context = min(slots, _TYPICAL_CONTEXT)
    return Op(
        name, "latent_attention", _latent_kernel.address, args, batch.count,
        units=-(-heads // TOGETHER), per_row=True, grain=1, work=TOGETHER * (width + rank) * context,
        keep=(q, plane, y, factor, chosen, batch),
    )  # fmt: skip
