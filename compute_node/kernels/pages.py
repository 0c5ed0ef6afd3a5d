"""Pages of the KV cache: where a position of a sequence lies.

A page holds 64 positions that follow each other. A sequence has a table: the page of its positions 0 to 63, of 64 to
127, and so on. Rows of all sequences lie in one plane of slots, page after page.
"""

from __future__ import annotations

from typing import Any, Final

from numba import njit

from compute_node.kernels.lanes import i64_at

__all__ = ["PAGE", "slot_of"]

PAGE: Final = 64
"""Positions of a page. A tile of attention is as long, so that it lies in one page."""


@njit(nogil=True, cache=True, error_model="numpy")
def slot_of(table: int, position: int) -> Any:
    """The slot of a position in every plane of the cache.

    Args:
        table: address of the sequence's page numbers, int64.
        position: not negative, and covered by the table.
    """
    return i64_at(table)[position // PAGE] * PAGE + position % PAGE
