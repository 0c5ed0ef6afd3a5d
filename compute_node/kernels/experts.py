"""One routed expert's feed-forward network: `down(act(gate x, up x))` for the rows that chose it.

The record is re-pointed for each expert as it arrives; the result goes to one row per (row, place in the router's
order), so that nothing depends on the order in which experts arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compute_node.kernels.expert_records import (
    COLUMN_GRAIN,
    DOWN,
    GATE,
    UP,
    ExpertLayout,
    ExpertShape,
    gate_up_kernel,
    point_record,
)
from compute_node.kernels.matmul import BIAS, DATA, GRAIN, MATMUL_FIELDS, SCALES, matmul_kernel
from compute_node.kernels.matrix import Matrix
from compute_node.kernels.op import Op, address_of
from compute_node.kernels.quantised_rows import QuantisedRows
from compute_node.kernels.segment import Segment
from tierd.errors import LimitExceeded, UsageError
from tierd.store.formats import Activation

__all__ = ["ExpertFFN", "ExpertLayout"]


class ExpertFFN:
    """The ops of one expert at a time: `point` at weights, `assign` rows, run `segment`.

    Args:
        name: of the ops.
        x: float32 [max_rows, hidden], the layer's input to its experts.
        expert_rows: float32 [max_rows, k, hidden]; the result for row r at place s in its router order is
            `expert_rows[r, s]`. Nothing else is written.
        intermediate: width between up and down.
        format: of all three matrices.
        numerics: `exact` or `fast`.
        quantised: `x` as `quantise_rows` left it, where the numerics want it.
        activation: between gate, up and down.

    Raises:
        UsageError: buffers that do not fit.
    """

    def __init__(
        self,
        name: str,
        x: NDArray[np.float32],
        expert_rows: NDArray[np.float32],
        *,
        intermediate: int,
        format: str,  # noqa: A002 - the name that Matrix uses
        numerics: str = "exact",
        quantised: QuantisedRows | None = None,
        activation: str = Activation.SILU.value,
    ) -> None:
        shape = ExpertShape(name, x, expert_rows, intermediate, format, numerics, quantised, activation)
        self.name = name
        self.shape = shape
        self._sources = np.zeros(shape.max_rows, np.int64)
        self._targets = np.zeros(shape.max_rows, np.int64)
        records = shape.records(1, shape.max_rows, self._sources, self._targets)
        self._count, self._record = records.counts, records.table[0]
        down = self._record[DOWN : DOWN + MATMUL_FIELDS]
        self._weights: tuple[Matrix, ...] = ()
        keep = (shape, records, self._sources, self._targets)
        self.segment = Segment(
            name,
            (
                Op(
                    f"{name} gate_up", f"gate_up {format}", gate_up_kernel.address, self._record, self._count,
                    units=intermediate, per_row=False, grain=COLUMN_GRAIN, work=2 * shape.hidden, keep=keep,
                ),
                Op(
                    f"{name} down", f"matmul {format}", matmul_kernel.address, down, self._count,
                    units=shape.hidden, per_row=False, grain=GRAIN, work=intermediate, keep=keep,
                ),
            ),
        )  # fmt: skip

    def point(self, layout: ExpertLayout, address: int) -> None:
        """Makes the expert whose bytes begin at `address` the next one to be computed.

        The caller keeps those bytes mapped until the segment has run.

        Raises:
            UsageError: an expert of another shape or format.
        """
        shape = self.shape
        if (layout.kind, layout.hidden, layout.intermediate) != (shape.kind, shape.hidden, shape.intermediate):
            raise UsageError(
                f"{self.name}: an expert of {layout.hidden} x {layout.intermediate} in {', '.join(layout.kind)} "
                f"does not fit {shape.hidden} x {shape.intermediate} in {', '.join(shape.kind)}"
            )
        point_record.py_func(self._record, layout.places(), address)

    def point_matrices(self, gate: Matrix, up: Matrix, down: Matrix) -> None:
        """The same from three matrices without biases, which are kept alive until the next call.

        Raises:
            UsageError: a matrix of another shape or format.
        """
        wide = (self.shape.intermediate, self.shape.hidden)
        for matrix, (rows, cols) in ((gate, wide), (up, wide), (down, wide[::-1])):
            if (matrix.format, matrix.rows, matrix.cols) != (self.shape.format, rows, cols):
                raise UsageError(
                    f"{self.name}: a {matrix.format} matrix of {matrix.rows} x {matrix.cols} where "
                    f"{self.shape.format} of {rows} x {cols} belongs"
                )
        self._weights = (gate, up, down)
        for part, matrix in ((GATE, gate), (UP, up), (DOWN, down)):
            self._record[part + DATA], self._record[part + SCALES] = address_of(matrix.data), address_of(matrix.scales)
            self._record[part + BIAS] = 0

    def assign(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """The rows that chose the expert, and at which place in their router order.

        Raises:
            LimitExceeded: a row or place outside the buffers, or more pairs than rows.
            UsageError: the two differ in length, or no expert has been pointed at yet.
        """
        self._count[0] = 0
        count, places, most = len(rows), self.shape.slots, self.shape.max_rows
        if self._record[DOWN + DATA] == 0:
            raise UsageError(f"{self.name}: no weights to compute with", hint="call point before assign")
        if len(slots) != count:
            raise UsageError(f"{self.name}: {count} rows but {len(slots)} places")
        if count > most:
            raise LimitExceeded(f"{self.name}: {count} rows for one expert of at most {most}")
        for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            if not (0 <= row < most and 0 <= slot < places):
                raise LimitExceeded(f"{self.name}: row {row}, place {slot} outside {most} rows of {places}")
            self._sources[i] = row
            self._targets[i] = row * places + slot
        self._count[0] = count
