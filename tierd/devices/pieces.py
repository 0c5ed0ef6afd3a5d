"""A record that several threads read and check together, piece by piece.

Large records that are read side by side land late and all at once: then whoever waits has all of them to check and to
compute with, and meanwhile the drive has nothing to do. In pieces, the oldest record's first, each lands in its turn.
"""

from __future__ import annotations

import threading
from typing import Final

import xxhash

from tierd.errors import DriveError

__all__ = ["PIECE_BYTES", "Pieces"]

PIECE_BYTES: Final = 4 << 20
"""A drive of 2 GB/s is busy with one for two milliseconds; to check it takes a thread less than half of one."""


class Pieces:
    """The pieces of one record. Each thread that comes for one calls `take`, and if it got one `moved`, then `leave`.

    Args:
        nbytes: of the record.

    Attributes:
        count: of pieces; for each somebody must come.
        error: the first one that a piece ended in; no other piece is begun then.
    """

    __slots__ = (
        "_at_work", "_bytes", "_checked", "_checking", "_digest", "_here", "_lock", "_moving", "_next", "count", "error"
    )  # fmt: skip

    def __init__(self, nbytes: int) -> None:
        self._bytes = PIECE_BYTES
        self.count = max(1, -(-nbytes // PIECE_BYTES))
        self.error: DriveError | None = None
        self._lock = threading.Lock()
        self._next = 0
        self._moving = 0
        self._at_work = 0
        self._here = bytearray(self.count)
        self._checked = 0
        self._checking = False
        self._digest = xxhash.xxh3_64()

    @property
    def xxh3(self) -> int:
        """The checksum of the bytes that came; of the record, when the last thread has left and there is no error."""
        return self._digest.intdigest()

    def withdraw(self) -> bool:
        """True if no piece was begun: none will be."""
        with self._lock:
            if self._next:
                return False
            self._next = self.count
            return True

    def take(self) -> int | None:
        """The next piece, which the caller must read now; None if there is none left to begin."""
        with self._lock:
            if self._next == self.count or self.error is not None:
                return None
            self._next += 1
            self._moving += 1
            self._at_work += 1
            return self._next - 1

    def span(self, piece: int) -> slice:
        """Where in the record a piece lies, in bytes; the last one ends where the record does."""
        return slice(piece * self._bytes, (piece + 1) * self._bytes)

    def moved(self, piece: int, error: DriveError | None) -> bool:
        """The drive is done with a piece. True for the one caller after whom it is done with all of them."""
        with self._lock:
            self._moving -= 1
            if error is None:
                self._here[piece] = True
            elif self.error is None:
                self.error = error
            return not self._moving and self._all_begun()

    def leave(self, into: memoryview) -> bool:
        """Checks what has come and was not checked, in order. True for the last thread, after which none comes back.

        Args:
            into: the record's memory, uint8; not touched after the last thread has left.
        """
        while (piece := self._unchecked()) is not None:
            self._digest.update(into[self.span(piece)])
            with self._lock:
                self._checked += 1
                self._checking = False
        with self._lock:
            self._at_work -= 1
            return not self._at_work and self._all_begun()

    def fail(self, error: DriveError) -> bool:
        """Instead of `leave`, which raised: the record ends in this error. True as there."""
        with self._lock:
            self._checking = False
            self._at_work -= 1
            if self.error is None:
                self.error = error
            return not self._at_work and self._all_begun()

    def _all_begun(self) -> bool:
        """Under the lock."""
        return self._next == self.count or self.error is not None

    def _unchecked(self) -> int | None:
        """The piece that the caller must check now; None if it has not come, or another thread is at one."""
        with self._lock:
            piece = self._checked
            if self._checking or self.error is not None or piece == self.count or not self._here[piece]:
                return None
            self._checking = True
            return piece
