"""A segment: ops that run one after the other, assembled once into a table that one native call runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compute_node.kernels.op import Op, address_of
from compute_node.kernels.run_loop import (
    FIELDS,
    OP_ADDRESS,
    OP_ARGS,
    OP_GRAIN,
    OP_HALT,
    OP_NEXT,
    OP_PER_ROW,
    OP_ROWS,
    OP_UNIT_BYTES,
    OP_UNITS,
    OP_WEIGHTS,
    OP_WORK,
)
from tierd.errors import UsageError

__all__ = ["Segment"]


class Segment:
    """Ops that run one after the other with nothing between them that needs Python.

    Attributes:
        name: for people, such as "layer 3 attention and router".
        ops: in order.
        count: how many they are.
        table: int64 [ops, FIELDS], what the native loop reads.
    """

    __slots__ = ("address", "count", "name", "ops", "table")

    def __init__(self, name: str, ops: Sequence[Op]) -> None:
        self.name = name
        self.ops = tuple(ops)
        self.count = len(self.ops)
        self.table = np.zeros((max(len(self.ops), 1), FIELDS), np.int64)
        for row, op in zip(self.table, self.ops, strict=False):
            if op.units < 0 or op.grain < 1 or op.work < 0 or op.address == 0:
                raise UsageError(f"{op.name}: an op needs a kernel, and units, grain and work that make sense")
            row[OP_ADDRESS], row[OP_ARGS] = op.address, address_of(op.args)
            row[OP_ROWS], row[OP_UNITS], row[OP_PER_ROW] = address_of(op.rows), op.units, int(op.per_row)
            row[OP_GRAIN], row[OP_WORK] = op.grain, op.work
            row[OP_HALT], row[OP_WEIGHTS], row[OP_UNIT_BYTES] = address_of(op.halt), op.weights, op.unit_bytes
        following = len(self.ops)
        for index in reversed(range(len(self.ops))):
            self.table[index, OP_NEXT] = following
            if self.ops[index].weights:
                following = index
        self.address = address_of(self.table)

    def live_work(self) -> int:
        """Multiply-adds of one run with the rows that are live now."""
        return sum(op.live_work() for op in self.ops)
