"""The softmax of one tile of scores, and its merging with that of the tiles before: what all kinds of attention share.

Each tile has its largest score, its sum and its weighted values; tiles are merged in rising order. Source: Milakov and
Gimelshein 2018 (arXiv:1805.02867), FlashAttention (arXiv:2205.14135).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from compute_node.kernels.lanes import exp32, f32_at, larger32
from compute_node.kernels.pages import PAGE

__all__ = ["ROOM", "STATE", "TILE", "begin_row", "finish_row", "merge_tile", "tile_largest", "tile_weights"]

TILE: Final = PAGE
"""Positions that share one softmax before tiles are merged; those of a page, so that a tile's rows lie together."""
ROOM: Final = 128
"""Floats between the scores of rows that are computed together: a tile and the lanes behind it."""
STATE: Final = 4 * ROOM
"""Where, behind four rows of scores, the largest score and the sum of each row are kept."""

_LOWEST: Final = np.float32(-np.inf)


@njit(nogil=True, cache=True, error_model="numpy")
def tile_largest(scores: int, begin: int, end: int) -> Any:
    """Makes the scores outside begin..end of a tile -inf; returns the largest of the others."""
    s = f32_at(scores)
    for j in range(begin):
        s[j] = _LOWEST
    for j in range(end, TILE):
        s[j] = _LOWEST
    lane = f32_at(scores + TILE * 4)
    for j in range(16):
        lane[j] = larger32(larger32(s[j], s[16 + j]), larger32(s[32 + j], s[48 + j]))
    largest = _LOWEST
    for j in range(16):
        largest = larger32(largest, lane[j])
    return largest


@njit(nogil=True, cache=True, error_model="numpy")
def tile_weights(scores: int, largest: Any) -> Any:
    """Turns the scores of a tile into exp(score - largest) in place; returns their sum by lanes and tree."""
    p = f32_at(scores)
    for j in range(TILE):
        p[j] = exp32(p[j] - largest)
    lane = f32_at(scores + TILE * 4)  # the stack buffer goes on behind the tile
    for j in range(16):
        lane[j] = ((p[j] + p[16 + j]) + p[32 + j]) + p[48 + j]
    for j in range(8):
        lane[j] = lane[j] + lane[8 + j]
    for j in range(4):
        lane[j] = lane[j] + lane[4 + j]
    return (lane[0] + lane[2]) + (lane[1] + lane[3])


@njit(nogil=True, cache=True, error_model="numpy")
def begin_row(out: int, state: int, width: int) -> None:
    """Nothing seen yet: `state` holds the largest score and the sum so far, `out` the weighted values."""
    y, s = f32_at(out), f32_at(state)
    s[0], s[1] = _LOWEST, np.float32(0)
    for d in range(width):
        y[d] = np.float32(0)


@njit(nogil=True, cache=True, error_model="numpy")
def merge_tile(out: int, state: int, values: int, largest: Any, total: Any, width: int) -> None:
    """Adds a tile's largest score, sum and weighted values to a row."""
    s, y, o = f32_at(state), f32_at(out), f32_at(values)
    merged = larger32(s[0], largest)
    before, now = exp32(s[0] - merged), exp32(largest - merged)
    s[1] = s[1] * before + total * now
    for d in range(width):
        y[d] = y[d] * before + o[d] * now
    s[0] = merged


@njit(nogil=True, cache=True, error_model="numpy")
def finish_row(out: int, state: int, width: int, sink: int) -> None:
    """Divides by the sum; a sink (address of its score, 0: none) is merged last, as a tile whose values are zero."""
    y, s = f32_at(out), f32_at(state)
    total = s[1]
    if sink != 0:
        score = f32_at(sink)[0]
        merged = larger32(s[0], score)
        before = exp32(s[0] - merged)
        total = total * before + exp32(score - merged)
        for d in range(width):
            y[d] = y[d] * before
    for d in range(width):
        y[d] = y[d] / total
