"""The live rows of a step: how many there are, and each one's token, position and places in the KV cache."""

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
        tables: int64 [max_rows], address of the page table of the row's sequence; equal addresses are one sequence.
        limits: int64 [max_rows], how many positions that table covers; of a row beyond, nothing is kept.
        states_in: int64 [max_rows], where the recurrent state of the row's sequence is read; 0 where there is none.
        states_out: int64 [max_rows], where it is written.
        first_row: the six of row 0, for who sets them one by one: a step of one text is short.
    """

    def __init__(self, max_rows: int) -> None:
        if max_rows < 1:
            raise UsageError(f"a batch holds at least one row, not {max_rows}")
        self.max_rows = max_rows
        self.count = np.zeros(1, np.int64)
        self._count = self.count.data
        self._columns = np.zeros((6, max_rows), np.int64)
        self.first_row = self._columns.reshape(-1).data[::max_rows]
        self.token_ids, self.positions, self.tables, self.limits, self.states_in, self.states_out = self._columns

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
        self._count[0] = rows

    def set(
        self,
        token_ids: Integers,
        positions: Integers,
        *,
        tables: int | Integers = 0,
        limits: int | Integers = 0,
        states_in: int | Integers = 0,
        states_out: int | Integers = 0,
    ) -> None:
        """Makes these the live rows.

        The others are one number for all rows, or one per row; without page tables nothing is kept in a cache.

        Args:
            token_ids: one per row.
            positions: one per row, within its sequence.
            tables: addresses of the sequences' page tables, which stay there while the rows are live.
            limits: positions that each table covers.
            states_in: places of the sequences' recurrent states that are read.
            states_out: places that are written.

        Raises:
            LimitExceeded: more rows than `max_rows`, or a negative position, limit or place.
            UsageError: the sequences differ in length.
        """
        rows = len(token_ids)
        columns: list[Integers] = [token_ids]
        for given in (positions, tables, limits, states_in, states_out):
            columns.append([given] * rows if isinstance(given, int) else given)
            if len(columns[-1]) != rows:
                raise UsageError(f"{rows} token ids need as many positions and page tables, not {len(positions)}")
        self.set_rows(rows)
        self._columns[:, :rows] = columns
        if rows and min(map(min, columns[1:])) < 0:
            self.set_rows(0)
            raise LimitExceeded("positions, limits and places of a batch are never negative")
