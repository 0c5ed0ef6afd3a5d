"""One routed expert's feed-forward network: `down(silu(gate x) * up x)` for the rows that chose it.

The record is re-pointed for each expert as it arrives; the result goes to one row per (row, place in the router's
order), so that nothing depends on the order in which experts arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numba import cfunc
from numpy.typing import NDArray

from compute_node.kernels.elementwise import silu
from compute_node.kernels.lanes import f32_at, i64_at
from compute_node.kernels.matmul import (
    BIAS,
    COLS,
    COUNT,
    DATA,
    DATA_STRIDE,
    FORMAT,
    GRAIN,
    MATMUL_FIELDS,
    SCALES,
    SCALES_STRIDE,
    X_INDEX,
    X_STRIDE,
    Y_INDEX,
    Y_STRIDE,
    X,
    Y,
    kernel_address,
    matmul_rows,
)
from compute_node.kernels.matrix import FORMATS, Matrix, data_dtype, data_shape, scales_dtype, scales_shape
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer
from compute_node.kernels.segment import Segment
from tierd.errors import LimitExceeded, UsageError

__all__ = ["ExpertFFN", "ExpertLayout"]

_GATE: Final = slice(0, MATMUL_FIELDS)
_UP: Final = slice(MATMUL_FIELDS, 2 * MATMUL_FIELDS)


@cfunc(KERNEL, cache=True, error_model="numpy")
def _gate_up_kernel(args: int, lo: int, hi: int) -> None:
    """Columns lo..hi of `silu(gate x) * up x`, left where gate wrote. Record: those of gate and of up."""
    matmul_rows(args, lo, hi)
    matmul_rows(args + MATMUL_FIELDS * 8, lo, hi)
    m = i64_at(args)
    for row in range(i64_at(m[COUNT])[0]):
        gate = f32_at(m[Y] + row * m[Y_STRIDE])
        up = f32_at(m[MATMUL_FIELDS + Y] + row * m[MATMUL_FIELDS + Y_STRIDE])
        for j in range(lo, hi):
            gate[j] = silu(gate[j]) * up[j]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where the parts of an expert lie, in bytes from its first; the scales of a format without are at -1.

    Matrices are [outputs, inputs]: gate and up [intermediate, hidden], down [hidden, intermediate].
    """

    format: str
    hidden: int
    intermediate: int
    gate_data: int
    gate_scales: int
    up_data: int
    up_scales: int
    down_data: int
    down_scales: int

    def size(self) -> int:
        """Bytes from the expert's first to the end of its last part."""
        ends = []
        for rows, cols, data, scales in (
            (self.intermediate, self.hidden, self.gate_data, self.gate_scales),
            (self.intermediate, self.hidden, self.up_data, self.up_scales),
            (self.hidden, self.intermediate, self.down_data, self.down_scales),
        ):
            shape, kind = data_shape(self.format, rows, cols), data_dtype(self.format)
            ends.append(data + shape[0] * shape[1] * kind.itemsize)
            scale_shape, scale_kind = scales_shape(self.format, rows, cols), scales_dtype(self.format)
            if scale_shape is not None and scale_kind is not None:
                ends.append(scales + int(np.prod(scale_shape)) * scale_kind.itemsize)
        return max(ends)


class ExpertFFN:
    """The ops of one expert at a time: `assign` rows, `point` at weights, run `segment`.

    Args:
        name: of the ops.
        x: float32 [max_rows, hidden], the layer's input to its experts.
        expert_rows: float32 [max_rows, k, hidden]; the result for row r at place s in its router order is
            `expert_rows[r, s]`. Nothing else is written.
        intermediate: width between up and down.
        format: of all three matrices.
        numerics: `exact`.

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
    ) -> None:
        check_buffer(name, "x", x, (None, None))
        max_rows, hidden = x.shape
        check_buffer(name, "expert_rows", expert_rows, (max_rows, None, hidden), writable=True)
        if not expert_rows.flags.c_contiguous:
            raise UsageError(f"{name}: expert_rows must be contiguous")
        if intermediate < 1 or format not in FORMATS:
            raise UsageError(f"{name}: no expert of width {intermediate} in format {format!r}")
        self.name = name
        self.format = format
        self.hidden = hidden
        self.intermediate = intermediate
        self._max_rows, self._slots = max_rows, expert_rows.shape[1]
        self._count = np.zeros(1, np.int64)
        self._sources = np.zeros(max_rows, np.int64)
        self._targets = np.zeros(max_rows, np.int64)
        gate = np.zeros((max_rows, intermediate), np.float32)
        up = np.zeros((max_rows, intermediate), np.float32)
        self._pair = np.zeros(2 * MATMUL_FIELDS, np.int64)
        self._down = np.zeros(MATMUL_FIELDS, np.int64)
        for part, result in ((self._pair[_GATE], gate), (self._pair[_UP], up)):
            self._fill(part, hidden, intermediate, x, result)
            part[X_INDEX] = address_of(self._sources)
        self._fill(self._down, intermediate, hidden, gate, expert_rows)
        self._down[Y_STRIDE], self._down[Y_INDEX] = expert_rows.strides[1], address_of(self._targets)
        self._weights: tuple[Matrix, ...] = ()
        keep = (x, expert_rows, gate, up, self._sources, self._targets)
        down_kernel = kernel_address(name, numerics, format)
        self.segment = Segment(
            name,
            (
                Op(
                    f"{name} gate_up", f"gate_up {format}", _gate_up_kernel.address, self._pair, self._count,
                    units=intermediate, per_row=False, grain=GRAIN, work=2 * hidden, keep=keep,
                ),
                Op(
                    f"{name} down", f"matmul {format}", down_kernel, self._down, self._count,
                    units=hidden, per_row=False, grain=GRAIN, work=intermediate, keep=keep,
                ),
            ),
        )  # fmt: skip

    def _fill(
        self, part: NDArray[np.int64], cols: int, rows: int, x: NDArray[np.float32], y: NDArray[np.float32]
    ) -> None:
        """The fields that stay the same from expert to expert."""
        part[COUNT] = address_of(self._count)
        part[FORMAT] = FORMATS.index(self.format)
        part[X], part[X_STRIDE] = address_of(x), x.strides[0]
        part[Y], part[Y_STRIDE] = address_of(y), y.strides[0]
        part[COLS] = cols
        part[BIAS] = 0
        part[DATA_STRIDE] = data_shape(self.format, rows, cols)[1] * data_dtype(self.format).itemsize
        scales = scales_shape(self.format, rows, cols)
        part[SCALES_STRIDE] = 0 if scales is None or len(scales) == 1 else scales[1] * 2

    def point(self, layout: ExpertLayout, address: int) -> None:
        """Makes the expert whose bytes begin at `address` the next one to be computed.

        The caller keeps those bytes mapped until the segment has run.

        Raises:
            UsageError: an expert of another shape or format.
        """
        if (layout.format, layout.hidden, layout.intermediate) != (self.format, self.hidden, self.intermediate):
            raise UsageError(
                f"{self.name}: an expert of {layout.hidden} x {layout.intermediate} in {layout.format} does not fit "
                f"{self.hidden} x {self.intermediate} in {self.format}"
            )
        pair, down = self._pair, self._down
        pair[DATA], pair[SCALES] = address + layout.gate_data, address + layout.gate_scales
        pair[MATMUL_FIELDS + DATA], pair[MATMUL_FIELDS + SCALES] = address + layout.up_data, address + layout.up_scales
        down[DATA], down[SCALES] = address + layout.down_data, address + layout.down_scales

    def point_matrices(self, gate: Matrix, up: Matrix, down: Matrix) -> None:
        """The same from three matrices, which are kept alive until the next call.

        Raises:
            UsageError: a matrix of another shape or format.
        """
        shape = (self.intermediate, self.hidden)
        wanted = ((gate, shape), (up, shape), (down, shape[::-1]))
        for matrix, (rows, cols) in wanted:
            if (matrix.format, matrix.rows, matrix.cols) != (self.format, rows, cols):
                raise UsageError(
                    f"{self.name}: a {matrix.format} matrix of {matrix.rows} x {matrix.cols} where "
                    f"{self.format} of {rows} x {cols} belongs"
                )
        self._weights = (gate, up, down)
        for part, matrix in ((self._pair[_GATE], gate), (self._pair[_UP], up), (self._down, down)):
            part[DATA], part[SCALES] = address_of(matrix.data), address_of(matrix.scales)

    def assign(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """The rows that chose the expert, and at which place in their router order.

        Raises:
            LimitExceeded: a row or place outside the buffers, or more pairs than rows.
            UsageError: the two differ in length, or no expert has been pointed at yet.
        """
        self._count[0] = 0
        count = len(rows)
        if self._down[DATA] == 0:
            raise UsageError(f"{self.name}: no weights to compute with", hint="call point before assign")
        if len(slots) != count:
            raise UsageError(f"{self.name}: {count} rows but {len(slots)} places")
        if count > self._max_rows:
            raise LimitExceeded(f"{self.name}: {count} rows for one expert of at most {self._max_rows}")
        for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            if not (0 <= row < self._max_rows and 0 <= slot < self._slots):
                raise LimitExceeded(
                    f"{self.name}: row {row}, place {slot} outside {self._max_rows} rows of {self._slots}"
                )
            self._sources[i] = row
            self._targets[i] = row * self._slots + slot
        self._count[0] = count
