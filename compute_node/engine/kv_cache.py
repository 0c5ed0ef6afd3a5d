"""Keys and values of the tokens seen so far: one contiguous float32 cache per layer, shared by a few sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierd.errors import LimitExceeded, UsageError

__all__ = ["KVCache", "Sequence"]


@dataclass(slots=True, eq=False)
class Sequence:
    """One conversation's place in the cache.

    Attributes:
        base: its first slot.
        context: most tokens it may hold.
        tokens: whose keys and values are in the cache, in order of position.
    """

    base: int
    context: int
    tokens: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        """How many more tokens fit."""
        return self.context - len(self.tokens)

    def require(self, count: int) -> None:
        """LimitExceeded if `count` more tokens do not fit."""
        if count > self.room:
            raise LimitExceeded(
                f"the context of {self.context} tokens is full: {len(self.tokens)} are in it, {count} more do not fit",
                hint="Use a larger --context or a shorter text.",
            )

    def keep_prefix(self, tokens: list[int]) -> int:
        """Forget everything after the longest common prefix with `tokens`; returns the length of that prefix."""
        length = 0
        for mine, theirs in zip(self.tokens, tokens, strict=False):
            if mine != theirs:
                break
            length += 1
        del self.tokens[length:]
        return length


class KVCache:
    """Float32 keys and values, `[kv_heads, slots, head_dim]` per layer; slots = sequences x context.

    Memory is taken as positions are written. What is forgotten is only overwritten, never cleared: attention reads the
    positions up to its row's own and no further.

    Args:
        layers: decoder layers.
        kv_heads: key/value heads.
        head_dim: width of a head.
        context: most tokens of a sequence.
        sequences: how many sequences fit.
    """

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, context: int, sequences: int = 1) -> None:
        if context < 1 or sequences < 1:
            raise UsageError(f"a KV cache of {sequences} sequences of {context} tokens cannot be")
        self.context = context
        shape = (layers, 2, kv_heads, sequences * context, head_dim)
        self.nbytes = 4 * int(np.prod(shape, dtype=np.int64))
        try:
            self._data: NDArray[np.float32] = np.zeros(shape, np.float32)
        except MemoryError:
            raise LimitExceeded(
                f"the KV cache of {context} tokens needs {self.nbytes / 1e9:.1f} GB, which this machine refuses",
                hint="Use a smaller --context.",
            ) from None
        self._free = [index * context for index in reversed(range(sequences))]

    def layer(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The layer's keys and values, float32 [kv_heads, slots, head_dim] each."""
        return self._data[layer, 0], self._data[layer, 1]

    def take(self) -> Sequence:
        """An empty sequence; LimitExceeded if all are taken."""
        if not self._free:
            raise LimitExceeded("all sequences of the KV cache are in use")
        return Sequence(self._free.pop(), self.context)

    def give_back(self, sequence: Sequence) -> None:
        """Frees the sequence's place. The caller must not use it afterwards."""
        sequence.tokens.clear()
        self._free.append(sequence.base)
