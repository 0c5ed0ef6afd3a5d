"""The live rows of a step: how many there are, and each one's token, position and place in the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tierd.errors import LimitExceeded, UsageError

__all__ = ["Batch"]

Integers = Sequence[int] | NDArray[np.int64]


class Batch:
    """Rows that one run of a program computes; shared by all ops of the program, which read it through addresses.

    Set it before each run, never during one. The arrays keep their addresses for the life of the object.

    Attributes:
        max_rows: rows that the program's buffers hold.
        count: int64 [1], the number of live rows.
        token_ids: int64 [max_rows].
        positions: int64 [max_rows], position of the row within its sequence, from 0.
        bases: int64 [max_rows], the slot of the KV cache that holds position 0 of the row's sequence.
    """

    def __init__(self, max_rows: int) -> None:
        if max_rows < 1:
            raise UsageError(f"a batch holds at least one row, not {max_rows}")
        self.max_rows = max_rows
        self.count = np.zeros(1, np.int64)
        self.token_ids = np.zeros(max_rows, np.int64)
        self.positions = np.zeros(max_rows, np.int64)
        self.bases = np.zeros(max_rows, np.int64)

    @property
    def rows(self) -> int:
        """Live rows."""
        return int(self.count[0])

    def set_rows(self, rows: int) -> None:
        """Changes only the number of live rows.

        Raises:
            LimitExceeded: more than `max_rows`, or fewer than none.
        """
        if not 0 <= rows <= self.max_rows:
            raise LimitExceeded(f"{rows} rows in a batch of at most {self.max_rows}")
        self.count[0] = rows

    def set(self, token_ids: Integers, positions: Integers, bases: int | Integers = 0) -> None:
        """Makes these the live rows.

        Args:
            token_ids: one per row.
            positions: one per row, within its sequence.
            bases: first slot of each row's sequence in the KV cache; one number for all rows, or one per row.

        Raises:
            LimitExceeded: more rows than `max_rows`, or a negative position or base.
            UsageError: the sequences differ in length.
        """
        rows = len(token_ids)
        if len(positions) != rows or (not isinstance(bases, int) and len(bases) != rows):
            raise UsageError(f"{rows} token ids need as many positions and bases, not {len(positions)}")
        self.set_rows(rows)
        self.token_ids[:rows] = token_ids
        self.positions[:rows] = positions
        self.bases[:rows] = bases
        if rows == 1:
            lowest = min(int(self.positions[0]), int(self.bases[0]))
        else:
            lowest = min(int(self.positions[:rows].min()), int(self.bases[:rows].min())) if rows else 0
        if lowest < 0:
            self.set_rows(0)
            raise LimitExceeded("positions and bases of a batch are never negative")
