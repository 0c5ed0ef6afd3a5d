"""The indexer of sparse attention: a score for every position that a row may read, and the positions with the largest.

Source: DeepSeek-V3.2 report, arXiv:2512.02556, section 2. Score of a position = sum over the indexer's heads, in rising
order, of weight times relu(scale times query . key). Of equal scores the lower position is taken; minus zero counts as
zero. Scores and choice of a row depend on its position, its queries and the cache alone.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.dots import dots_f32
from compute_node.kernels.lanes import f32_at, i32_at, i64_at, larger32
from compute_node.kernels.latent_attention import check_plane
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from compute_node.kernels.pages import PAGE, slot_of
from compute_node.kernels.weighted_sum import stack_floats
from tierd.errors import UsageError

__all__ = ["choose_positions", "index_scores"]

STRIPS: Final = 16
"""Parts that the positions of a row are dealt out to, page by page, so that threads share a long context evenly."""
_TYPICAL_CONTEXT: Final = 4096
_SIGN: Final = -(1 << 31)

Rows = NDArray[np.float32]

# Fields of the record of `index_scores`.
Q, Q_STRIDE, WEIGHTS, WEIGHTS_STRIDE, PLANE, SCORES, SCORES_STRIDE, POSITIONS, TABLES, LIMITS = range(10)
HEADS, WIDTH, FACTORS, MOST = range(10, 14)


@njit(nogil=True, cache=True, error_model="numpy")
def _add(scores: Any, places: Any, sums: Any, first: int, weight: Any, scale: Any) -> None:
    """Adds one head's share to four scores; a place that is there twice gets it once."""
    for j in range(4):
        if j == 0 or places[j] != places[j - 1]:
            scores[places[j]] = scores[places[j]] + weight * larger32(np.float32(0), sums[first + j] * scale)


@njit(nogil=True, cache=True, error_model="numpy")
def _page_scores(m: Any, row: int, page: int, end: int) -> None:
    """Scores of the positions of a page, up to `end`."""
    heads, step = m[HEADS], m[WIDTH] * 4
    q, s = m[Q] + row * m[Q_STRIDE], f32_at(m[SCORES] + row * m[SCORES_STRIDE])
    weights, factors = f32_at(m[WEIGHTS] + row * m[WEIGHTS_STRIDE]), f32_at(m[FACTORS])
    keys, last = m[PLANE] + slot_of(i64_at(m[TABLES])[row], page) * step, end - 1
    for j in range(page, end, 4):
        at = (j, min(j + 1, last), min(j + 2, last), min(j + 3, last))
        places = (
            keys + (at[0] - page) * step,
            keys + (at[1] - page) * step,
            keys + (at[2] - page) * step,
            keys + (at[3] - page) * step,
        )
        for place in at:
            s[place] = np.float32(0)
        h = 0
        while h + 4 <= heads:
            queries = (q + h * step, q + (h + 1) * step, q + (h + 2) * step, q + (h + 3) * step)
            sums = dots_f32(places, queries, m[WIDTH], places[3] + step)
            for k in range(4):
                _add(s, at, sums, 4 * k, weights[h + k] * factors[1], factors[0])
            h += 4
        while h < heads:
            _add(
                s,
                at,
                dots_f32(places, (q + h * step,), m[WIDTH], places[3] + step),
                0,
                weights[h] * factors[1],
                factors[0],
            )
            h += 1


@cfunc(KERNEL, cache=True, error_model="numpy")
def _scores_kernel(args: int, lo: int, hi: int) -> None:
    """One unit is every sixteenth page of one row; a row that reads all its positions needs no scores."""
    m = i64_at(args)
    for unit in range(lo, hi):
        row, strip = unit // STRIPS, unit % STRIPS
        position = i64_at(m[POSITIONS])[row]
        if m[MOST] <= position < i64_at(m[LIMITS])[row]:
            for page in range(strip * PAGE, position + 1, STRIPS * PAGE):
                _page_scores(m, row, page, min(page + PAGE, position + 1))


@njit(nogil=True, cache=True, error_model="numpy")
def _rank(bits: int) -> int:
    """The bits of a float32 as a number 0..2^32 - 1 that is ordered like the floats; both zeros are equal."""
    if bits == _SIGN:
        bits = 0
    return (bits ^ 0xFFFFFFFF) & 0xFFFFFFFF if bits < 0 else bits + (1 << 31)


@njit(nogil=True, cache=True, error_model="numpy")
def _border(scores: int, count: int, most: int, histogram: int) -> tuple[int, int]:
    """(rank of the `most`-th largest of `count` scores, how many of that rank are among them): a radix selection."""
    bits, found = i32_at(scores), i32_at(histogram)
    prefix, mask, left = 0, 0, most
    for shift in (24, 16, 8, 0):
        for bucket in range(256):
            found[bucket] = 0
        for j in range(count):
            rank = _rank(np.int64(bits[j]))
            if rank & mask == prefix:
                found[(rank >> shift) & 255] += 1
        bucket = 255
        while bucket > 0 and found[bucket] < left:
            left -= found[bucket]
            bucket -= 1
        prefix |= bucket << shift
        mask |= 255 << shift
    return prefix, left


@cfunc(KERNEL, cache=True, error_model="numpy")
def _choose_kernel(args: int, lo: int, hi: int) -> None:
    """Record: scores, stride, chosen, stride, positions, limits, most. One unit is one row."""
    m = i64_at(args)
    histogram = stack_floats()
    for row in range(lo, hi):
        chosen, count = i32_at(m[2] + row * m[3]), i64_at(m[4])[row] + 1
        if count < 1 or count > i64_at(m[5])[row]:
            chosen[0] = 0
            continue
        if count <= m[6]:
            for j in range(count):
                chosen[1 + j] = j
            chosen[0] = count
            continue
        scores = m[0] + row * m[1]
        border, equal = _border(scores, count, m[6], histogram)
        bits, taken = i32_at(scores), 0
        for j in range(count):
            rank = _rank(np.int64(bits[j]))
            if rank > border or (rank == border and equal > 0):
                if rank == border:
                    equal -= 1
                taken += 1
                chosen[taken] = j
        chosen[0] = taken


def index_scores(
    name: str,
    q: Rows,
    weights: Rows,
    plane: Rows,
    scores: Rows,
    batch: Batch,
    *,
    most: int,
    scale: float,
    weight_scale: float,
) -> Op:
    """Scores of all positions up to each live row's own, for the rows that have more than `most` of them.

    Args:
        name: of the op.
        q: float32 [max_rows, heads * width], the indexer's queries.
        weights: float32 [max_rows, heads].
        plane: float32 [1, slots, width], the indexer's keys; those of the rows themselves are in it already.
        scores: float32 [max_rows, context]; receives the scores.
        batch: the live rows, their positions and page tables.
        most: positions that a row may read.
        scale: of queries times keys.
        weight_scale: of the weights.
    """
    _, width = check_plane(name, plane, writable=False)
    heads = weights.shape[-1]
    check_buffer(name, "weights", weights, (batch.max_rows, None))
    check_buffer(name, "q", q, (batch.max_rows, heads * width))
    check_buffer(name, "scores", scores, (batch.max_rows, None), writable=True)
    factors = np.array([scale, weight_scale], np.float32)
    args = record([
        address_of(q), q.strides[0], address_of(weights), weights.strides[0], address_of(plane),
        address_of(scores), scores.strides[0], address_of(batch.positions), address_of(batch.tables),
        address_of(batch.limits), heads, width, address_of(factors), most,
    ])  # fmt: skip
    context = min(scores.shape[1], _TYPICAL_CONTEXT)
    return Op(
        name, "index_scores", _scores_kernel.address, args, batch.count,
        units=STRIPS, per_row=True, grain=1, work=-(-context // STRIPS) * heads * width,
        keep=(q, weights, plane, scores, factors, batch),
    )  # fmt: skip


def choose_positions(name: str, scores: Rows, chosen: NDArray[np.int32], batch: Batch) -> Op:
    """The positions that each live row reads: all up to its own, or those with the largest scores.

    Args:
        name: of the op.
        scores: float32 [max_rows, context] of `index_scores`.
        chosen: int32 [max_rows, 1 + most]; receives how many, and which in rising order. A row beyond its sequence's
            pages reads none.
        batch: the live rows, their positions and limits.
    """
    check_buffer(name, "scores", scores, (batch.max_rows, None))
    check_buffer(name, "chosen", chosen, (batch.max_rows, None), np.int32, writable=True)
    most = chosen.shape[1] - 1
    if most < 1:
        raise UsageError(f"{name}: a row reads at least one position")
    args = record([
        address_of(scores), scores.strides[0], address_of(chosen), chosen.strides[0],
        address_of(batch.positions), address_of(batch.limits), most,
    ])  # fmt: skip
    return Op(
        name, "choose_positions", _choose_kernel.address, args, batch.count,
        units=1, per_row=True, grain=1, work=5 * min(scores.shape[1], _TYPICAL_CONTEXT),
        keep=(scores, chosen, batch),
    )  # fmt: skip
