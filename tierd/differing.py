"""Where two long strings of bytes differ, found by comparing pieces: nearly all of it is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

__all__ = ["CHUNK", "differing"]

CHUNK: Final = 64
"""Bytes of the pieces that are told."""
_COARSE: Final = 16 * CHUNK


def differing(new: bytes, old: bytes) -> Iterator[int]:
    """Where the pieces of `CHUNK` bytes begin that differ, rising; the last piece may be shorter.

    Called for each request of each node, when the processor's caches are full of experts. What counts then is how much
    code it takes, so it is not done by arrays.

    Args:
        new: any bytes.
        old: as many.
    """
    if new == old:
        return
    for coarse in range(0, len(new), _COARSE):
        if new[coarse : coarse + _COARSE] != old[coarse : coarse + _COARSE]:
            for fine in range(coarse, min(coarse + _COARSE, len(new)), CHUNK):
                if new[fine : fine + CHUNK] != old[fine : fine + CHUNK]:
                    yield fine
