"""What is kept of the tokens seen so far, in pages that sequences take as they grow and share where they are alike."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.cache_layout import CacheLayout
from compute_node.engine.page_pool import Name, PagePool, prefix_names
from compute_node.kernels.op import address_of
from compute_node.kernels.pages import PAGE
from tierd.errors import LimitExceeded, UsageError
from tierd.sizes import format_bytes

__all__ = ["KVCache", "Sequence"]


@dataclass(slots=True, eq=False)
class Sequence:
    """One text's place in the cache.

    Attributes:
        place: its number, below the cache's `sequences`.
        context: most tokens it may hold.
        table: int64, its pages in order of position; as long as the context needs.
        address: of the table; no other open sequence has the same.
        tokens: what is in the cache, in order of position.
        pages: how many of the table are its own.
        names: of its pages that are full, as far as they are known; see `page_pool`.
        flipped: which copy of its recurrent states is read: the second one if set.
    """

    place: int
    context: int
    table: NDArray[np.int64]
    address: int = field(init=False)
    tokens: list[int] = field(default_factory=list)
    pages: int = 0
    names: list[Name] = field(default_factory=list)
    flipped: bool = False

    def __post_init__(self) -> None:
        self.address = address_of(self.table)

    @property
    def room(self) -> int:
        """How many more tokens fit the context."""
        return self.context - len(self.tokens)

    @property
    def limit(self) -> int:
        """Positions that its pages cover."""
        return self.pages * PAGE

    @property
    def state_in(self) -> int:
        """Where its recurrent states are read, an index into axis 0 of `KVCache.state`."""
        return 2 * self.place + int(self.flipped)

    @property
    def state_out(self) -> int:
        """Where they are written."""
        return 2 * self.place + int(not self.flipped)

    def held(self) -> list[int]:
        """Its pages."""
        pages: list[int] = self.table[: self.pages].tolist()
        return pages

    def require(self, count: int) -> None:
        """LimitExceeded if `count` more tokens do not fit the context."""
        if count > self.room:
            raise LimitExceeded(
                f"the context of {self.context} tokens is full: {len(self.tokens)} are in it, {count} more do not fit",
                hint="Use a larger --context or a shorter text.",
            )


class KVCache:
    """Planes of float32 rows in pages of 64 positions, and recurrent states.

    Memory is taken as positions are written. What is forgotten is only overwritten, never cleared: kernels read the
    positions up to their row's own and no further.

    Args:
        layout: what the model keeps.
        pages: how many there are; they bound the tokens of all sequences together.
        sequences: how many sequences may be open.
        context: most tokens of a sequence; None: as many as all pages hold.
    """

    def __init__(self, layout: CacheLayout, *, pages: int, sequences: int = 1, context: int | None = None) -> None:
        if pages < 1 or sequences < 1 or (context is not None and context < 1):
            raise UsageError(f"a KV cache of {sequences} sequences in {pages} pages cannot be")
        self.layout = layout
        self.context = pages * PAGE if context is None else min(context, pages * PAGE)
        self.sequences = sequences
        self.nbytes = pages * layout.page_bytes + sequences * layout.sequence_bytes
        try:
            self._planes = {
                name: np.zeros((plane.heads, pages * PAGE, plane.width), np.float32)
                for name, plane in layout.planes.items()
            }
            self._states = {
                name: np.zeros((2 * sequences, *shape), np.float32) for name, shape in layout.states.items()
            }
        except MemoryError:
            raise LimitExceeded(
                f"the KV cache of {pages * PAGE} tokens needs {format_bytes(self.nbytes)}, which this machine refuses",
                hint="Use a smaller --kv-cache or --context.",
            ) from None
        self.pool = PagePool(pages)
        self._places = list(range(sequences - 1, -1, -1))

    @property
    def open_places(self) -> int:
        """How many more sequences may be opened."""
        return len(self._places)

    def plane(self, name: str) -> NDArray[np.float32]:
        """Rows of a plane, float32 [heads, slots, width]; `kernels.pages.slot_of` says which slot is whose."""
        return self._planes[name]

    def state(self, name: str) -> NDArray[np.float32]:
        """A recurrent state of all sequences, float32 [2 * sequences, *shape]; see `Sequence.state_in`."""
        return self._states[name]

    def take(self) -> Sequence:
        """An empty sequence; LimitExceeded if all are taken."""
        if not self._places:
            raise LimitExceeded("all sequences of the KV cache are in use")
        return Sequence(self._places.pop(), self.context, np.zeros(-(-self.context // PAGE), np.int64))

    def begin(self, tokens: Listing[int], *, reuse: bool = True) -> Sequence | None:
        """A sequence with pages for these tokens, of which it has those already that another one left there.

        At least the last token is not among these: its logits are wanted.

        Args:
            tokens: that will be computed; they fit the context.
            reuse: take over pages of the same prefix.

        Returns:
            None, and nothing has changed, if there is no place or there are not enough pages now.
        """
        if not self._places:
            return None
        reuse = reuse and not self.layout.recurrent
        known = self.pool.find(prefix_names(tokens[:-1])) if reuse else {}
        found = list(known.values())
        fresh = self.pool.take(-(-len(tokens) // PAGE) - len(found))
        if fresh is None:
            self.pool.release(found)
            return None
        sequence = self.take()
        sequence.pages = len(found) + len(fresh)
        sequence.table[: sequence.pages] = found + fresh
        sequence.names.extend(known)
        sequence.tokens.extend(tokens[: len(found) * PAGE])
        return sequence

    def reserve(self, sequence: Sequence, count: int) -> bool:
        """Pages for so many more tokens, which fit the context; False, and no change, if there are too few."""
        lacking = -(-(len(sequence.tokens) + count) // PAGE) - sequence.pages
        if lacking > 0:
            fresh = self.pool.take(lacking)
            if fresh is None:
                return False
            sequence.table[sequence.pages : sequence.pages + lacking] = fresh
            sequence.pages += lacking
        return True

    def advance(self, sequence: Sequence, tokens: Listing[int]) -> None:
        """These tokens of the sequence have been computed: a step succeeded. Pages that are full may be taken over."""
        sequence.tokens.extend(tokens)
        sequence.flipped = not sequence.flipped
        if len(sequence.tokens) // PAGE > len(sequence.names) and not self.layout.recurrent:
            for name in prefix_names(sequence.tokens, sequence.names):
                self.pool.name(int(sequence.table[len(sequence.names)]), name)
                sequence.names.append(name)

    def keep_prefix(self, sequence: Sequence, tokens: Listing[int]) -> int:
        """Forgets everything after the longest prefix in common with `tokens`; returns how many tokens are left.

        Where the end falls into a page that others hold, it moves to the beginning of that page. A recurrent state
        cannot go back: it is kept whole or not at all.
        """
        length = 0
        for mine, theirs in zip(sequence.tokens, tokens, strict=False):
            if mine != theirs:
                break
            length += 1
        if length < len(sequence.tokens) and self.layout.recurrent:
            length = 0
        kept = -(-length // PAGE)
        if length % PAGE:
            last = int(sequence.table[kept - 1])
            if self.pool.shared(last):
                kept -= 1
                length = kept * PAGE
            else:
                self.pool.unname(last)
        del sequence.tokens[length:], sequence.names[length // PAGE :]
        self.pool.release(sequence.table[kept : sequence.pages].tolist())
        sequence.pages = kept
        return length

    def give_back(self, sequence: Sequence) -> None:
        """Frees the sequence's place and pages. The caller must not use it afterwards."""
        self.pool.release(sequence.held())
        sequence.tokens.clear()
        sequence.names.clear()
        sequence.pages = 0
        self._places.append(sequence.place)
