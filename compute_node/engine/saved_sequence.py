"""A sequence's part of the KV cache as arrays, to be kept elsewhere and put back later."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.kv_cache import KVCache, Sequence
from compute_node.kernels.pages import PAGE
from tierd.errors import LimitExceeded, UsageError

__all__ = ["restore_sequence", "save_sequence"]

F32 = NDArray[np.float32]


def save_sequence(cache: KVCache, sequence: Sequence) -> dict[str, F32]:
    """Copies of what is kept of a sequence, by the names of the cache's layout.

    Returns:
        For each plane float32 [heads, tokens, width], for each recurrent state float32 of its shape.
    """
    slots = _slots(sequence, len(sequence.tokens))
    rows = {name: cache.plane(name)[:, slots] for name in cache.layout.planes}
    return rows | {name: cache.state(name)[sequence.state_in].copy() for name in cache.layout.states}


def restore_sequence(cache: KVCache, sequence: Sequence, tokens: Listing[int], saved: Mapping[str, F32]) -> None:
    """Puts back what `save_sequence` gave for these tokens; the sequence goes on as if it had computed them.

    Args:
        cache: of the same layout, of a model with the same fingerprint and numerics.
        sequence: an empty one.
        tokens: of the saved sequence.
        saved: its arrays.

    Raises:
        UsageError: arrays of another layout or number of tokens.
        LimitExceeded: the tokens do not fit the context or the cache; nothing has changed.
    """
    layout, count = cache.layout, len(tokens)
    shapes = {name: (plane.heads, count, plane.width) for name, plane in layout.planes.items()} | dict(layout.states)
    for name in sorted(shapes.keys() | saved.keys()):
        found = saved.get(name)
        if name not in shapes or found is None or found.shape != shapes[name] or found.dtype != np.float32:
            raise UsageError(f"the saved cache does not fit this model: {name}", hint="It belongs to another model.")
    sequence.require(count)
    if not cache.reserve(sequence, count):
        raise LimitExceeded(
            f"the KV cache has no room for the {count} saved tokens", hint="Use a larger --kv-cache."
        )  # fmt: skip
    slots = _slots(sequence, count)
    for name in layout.planes:
        cache.plane(name)[:, slots] = saved[name]
    for name in layout.states:
        cache.state(name)[sequence.state_out] = saved[name]
    cache.advance(sequence, tokens)


def _slots(sequence: Sequence, count: int) -> NDArray[np.int64]:
    positions = np.arange(count)
    slots: NDArray[np.int64] = sequence.table[positions // PAGE] * PAGE + positions % PAGE
    return slots
