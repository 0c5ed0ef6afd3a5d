"""Sorting and selecting tokens by how far their logits lie below the largest, without comparing floats.

An item is one int64: a distance of two float32, counted in representable numbers (33 bits), then the token id (30
bits). So the order of items is that of falling logits, and among equals that of rising ids. A sort takes three passes
at most, whatever the logits are.
"""

from __future__ import annotations

from typing import Any, Final

from numba import njit

from compute_node.kernels.lanes import i64_at

__all__ = ["COUNTS", "ID_BITS", "nth_distance", "sort_items"]

ID_BITS: Final = 30
_DIGIT: Final = 11
_BINS: Final = 1 << _DIGIT
COUNTS: Final = 3 * _BINS
"""int64 of scratch that sorting and selecting need."""
_FEW: Final = 24
"""So many items are sorted by insertion."""


@njit(nogil=True, cache=True, error_model="numpy")
def _insert(items: Any, count: int) -> None:
    for i in range(1, count):
        item, j = items[i], i
        while j > 0 and items[j - 1] > item:
            items[j] = items[j - 1]
            j -= 1
        items[j] = item


@njit(nogil=True, cache=True, error_model="numpy")
def _scatter(source: Any, target: Any, count: int, shift: int, counts: Any) -> None:
    """One stable pass over a digit, of whose values `counts` says how many there are."""
    place = 0
    for value in range(_BINS):
        here = counts[value]
        counts[value] = place
        place += here
    for i in range(count):
        item = source[i]
        digit = (item >> shift) & (_BINS - 1)
        place = counts[digit]
        target[place] = item
        counts[digit] = place + 1


@njit(nogil=True, cache=True, error_model="numpy")
def sort_items(at: int, spare_at: int, count: int, low: int, counts_at: int) -> None:
    """Sorts items by the 33 bits from bit `low` on, where those below rise already or do not matter.

    Args:
        at: address of the items.
        spare_at: of room for as many.
        count: of items.
        low: first bit that counts.
        counts_at: of the scratch.
    """
    items, spare, counts = i64_at(at), i64_at(spare_at), i64_at(counts_at)
    if count <= _FEW:
        _insert(items, count)
        return
    for value in range(COUNTS):
        counts[value] = 0
    for i in range(count):
        item = items[i] >> low
        counts[item & (_BINS - 1)] += 1
        counts[_BINS + ((item >> _DIGIT) & (_BINS - 1))] += 1
        counts[2 * _BINS + ((item >> (2 * _DIGIT)) & (_BINS - 1))] += 1
    swapped = False
    for digit in range(3):
        shift = low + digit * _DIGIT
        if counts[digit * _BINS + ((items[0] >> shift) & (_BINS - 1))] == count:
            continue  # all have the same
        here = i64_at(counts_at + digit * _BINS * 8)
        if swapped:
            _scatter(spare, items, count, shift, here)
        else:
            _scatter(items, spare, count, shift, here)
        swapped = not swapped
    if swapped:
        for i in range(count):
            items[i] = spare[i]


@njit(nogil=True, cache=True, error_model="numpy")
def nth_distance(at: int, count: int, nth: int, counts_at: int) -> int:
    """The distance of the item that would be the `nth` after sorting, from 0 on."""
    items, counts = i64_at(at), i64_at(counts_at)
    known, before = 0, nth
    for digit in range(2, -1, -1):
        shift = ID_BITS + digit * _DIGIT
        for value in range(_BINS):
            counts[value] = 0
        for i in range(count):
            item = items[i] >> shift
            if item >> _DIGIT == known:
                counts[item & (_BINS - 1)] += 1
        value = 0
        while before >= counts[value]:
            before -= counts[value]
            value += 1
        known = known << _DIGIT | value
    return known
