"""Where two long strings of bytes differ, found by comparing pieces: nearly all of it is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

__all__ = ["CHUNK", "changed", "differing"]

CHUNK: Final = 64
"""Bytes of the pieces that are told."""
_COARSE: Final = 16 * CHUNK
_BY_ARRAYS: Final = 1024
"""Bytes from which on arrays take less time than a look at each byte of the pieces that differ."""


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


def changed(new: bytes, old: bytes) -> list[int]:
    """Where the bytes are that differ, rising.

    Args:
        new: any bytes.
        old: as many.
    """
    if len(new) >= _BY_ARRAYS and new != old:
        places: list[int] = np.flatnonzero(np.frombuffer(new, np.uint8) != np.frombuffer(old, np.uint8)).tolist()
        return places
    return [
        at for begin in differing(new, old) for at in range(begin, min(begin + CHUNK, len(new))) if new[at] != old[at]
    ]
