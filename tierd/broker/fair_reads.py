"""Whose read the drives get next, where several sessions miss at once."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["FairReads"]

_PER_DEPTH: Final = 2
"""Reads at the drives for each that keeps them busy: enough that they never wait for the next one."""


class FairReads:
    """Takes turns between sessions, one read each, with few reads at the drives: drives serve them in their order.

    So a node that prefills, and misses whole layers at once, keeps another's token waiting for a few reads only. Where
    one session is alone all its reads go at once, and the drives see the whole of them. A read that waits for its turn
    is always somebody's: when the last who wanted it gives up it never begins, since it would take another's turn.

    Args:
        submit: hands a read to the drives; the read may end before this returns.
        sessions: tells how many there are.
        depth: tells how many reads keep all drives busy.
        size: bytes of a read.
        most_bytes: of one session's reads at the drives, beyond the first; None: no bound but its turns.

    Attributes:
        held: reads that waited because their session had as many bytes at the drives as it may.
    """

    def __init__(
        self,
        submit: Callable[[int], None],
        sessions: Callable[[], int],
        depth: Callable[[], int],
        size: Callable[[int], int] = lambda _flat: 1,
        *,
        most_bytes: int | None = None,
    ) -> None:
        self.held = 0
        self._submit = submit
        self._sessions = sessions
        self._depth = depth
        self._size = size
        self._most_bytes = most_bytes
        self._waiting: OrderedDict[int, deque[int]] = OrderedDict()
        self._owner: dict[int, int] = {}
        self._running: dict[int, int] = {}  # the session whose turn it was
        self._flying: dict[int, int] = {}  # bytes of each session's running reads
        self._held: set[int] = set()
        self._going_on = False

    def __len__(self) -> int:
        return len(self._owner)

    @property
    def waiting(self) -> frozenset[int]:
        """Experts whose reads wait for their turn."""
        return frozenset(self._owner)

    def begin(self, session: int, flats: Sequence[int]) -> None:
        """A session misses these experts, in its router's order; each is submitted once, unless all give it up."""
        if flats:
            self._join(session, flats)
            self._go_on()

    def joined(self, session: int, flat: int) -> None:
        """Another session wants the expert, too: the read is its own from now on, if it has not begun."""
        owner = self._owner.get(flat)
        if owner is not None and owner != session:
            self._leave(owner, flat)
            self._join(session, [flat])

    def given_up(self, flat: int, others: Sequence[int]) -> bool:
        """A session no longer wants the expert.

        Args:
            flat: its number.
            others: sessions that still want it; the last of them has its read from now on.

        Returns:
            Whether its read had not begun and never will.
        """
        if others:
            self.joined(others[-1], flat)
            return False
        owner = self._owner.get(flat)
        if owner is not None:
            self._leave(owner, flat)
        return owner is not None

    def ended(self, flat: int) -> None:
        """A read ended, whoever wanted it."""
        session = self._running.pop(flat, None)
        if session is not None:
            self._flying[session] -= self._size(flat)
            if not self._flying[session]:
                del self._flying[session]
        self._go_on()

    def _go_on(self) -> None:
        if self._going_on or not self._waiting:
            return
        self._going_on = True
        most = _PER_DEPTH * self._depth() if self._sessions() > 1 else math.inf
        try:
            while len(self._running) < most:
                session = next(filter(self._may_read, self._waiting), None)
                if session is None:
                    return
                flat = self._waiting[session][0]
                self._leave(session, flat)
                if session in self._waiting:
                    self._waiting.move_to_end(session)
                self._running[flat] = session
                self._flying[session] = self._flying.get(session, 0) + self._size(flat)
                self._submit(flat)
        finally:
            self._going_on = False

    def _may_read(self, session: int) -> bool:
        """Whether the next read of a waiting session fits into its quota."""
        flying = self._flying.get(session, 0)
        flat = self._waiting[session][0]
        if self._most_bytes is None or not flying or flying + self._size(flat) <= self._most_bytes:
            return True
        if flat not in self._held:
            self._held.add(flat)
            self.held += 1
        return False

    def _join(self, session: int, flats: Sequence[int]) -> None:
        self._waiting.setdefault(session, deque()).extend(flats)
        self._owner.update(dict.fromkeys(flats, session))

    def _leave(self, session: int, flat: int) -> None:
        flats = self._waiting[session]
        flats.remove(flat)
        del self._owner[flat]
        self._held.discard(flat)
        if not flats:
            del self._waiting[session]
