"""The records by which kernels compute routed experts: `down(act(gate x, up x))` for the rows that chose one.

`act` is an `Activation`, such as silu(gate) * up; each of the three products may have a bias. One record of
`EXPERT_FIELDS` int64 describes one expert: the matmuls of gate, up and down, and where the fast numerics leave the
quantised product between them. A record is re-pointed at other weights without being built again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.elementwise import gpt_oss_glu, silu
from compute_node.kernels.lanes import f32_at, i64_at
from compute_node.kernels.matmul import (
    BIAS,
    COLS,
    COUNT,
    DATA,
    DATA_STRIDE,
    GRAIN,
    KIND,
    MATMUL_FIELDS,
    NEXT,
    SCALES,
    SCALES_SHIFT,
    SCALES_STRIDE,
    X_INDEX,
    X_STRIDE,
    Y_INDEX,
    Y_STRIDE,
    X,
    Y,
    kernel_kind,
    matmul_kernel,
    quantises,
)
from compute_node.kernels.matrix import (
    FORMATS,
    GROUP,
    data_dtype,
    data_shape,
    scales_dtype,
    scales_rows_shift,
    scales_shape,
)
from compute_node.kernels.op import KERNEL, address_of, check_buffer
from compute_node.kernels.quantised_rows import QuantisedRows, quantise_span, row_layout
from compute_node.kernels.threads import call_kernel
from tierd.errors import UsageError
from tierd.store.formats import Activation

__all__ = [
    "ACTIVATION",
    "CODE",
    "COLUMN_GRAIN",
    "DOWN",
    "EXPERT_FIELDS",
    "GATE",
    "UP",
    "ExpertLayout",
    "ExpertShape",
    "gate_up_kernel",
    "gate_up_rows",
    "point_record",
]

GATE: Final = 0
UP: Final = MATMUL_FIELDS
DOWN: Final = 2 * MATMUL_FIELDS
PRODUCT, PRODUCT_STRIDE, PRODUCT_START = range(3 * MATMUL_FIELDS, 3 * MATMUL_FIELDS + 3)
"""The quantised product of gate and up: address of its row 0 or 0, stride in bytes, where groups begin in a row."""
CODE: Final = 3 * MATMUL_FIELDS + 3
"""Address of the matmul kernel: called, not compiled in, so that its machine code is made once."""
ACTIVATION: Final = CODE + 1
"""0 for silu, 1 for gpt-oss."""
EXPERT_FIELDS: Final = 56

COLUMN_GRAIN: Final = max(GRAIN, GROUP)
"""Columns of gate and up: a slice holds whole groups of the quantised product."""


_ACTIVATIONS: Final = (Activation.SILU.value, Activation.GPT_OSS.value)


@njit(nogil=True, cache=True, error_model="numpy")
def point_record(m: Any, places: Any, address: int) -> None:
    """Points a record at the expert whose bytes begin at `address`; `places` as in `ExpertLayout.places`."""
    m[GATE + DATA], m[GATE + SCALES] = address + places[0], address + places[1]
    m[UP + DATA], m[UP + SCALES] = address + places[2], address + places[3]
    m[DOWN + DATA], m[DOWN + SCALES] = address + places[4], address + places[5]
    m[GATE + NEXT] = m[UP + DATA]
    m[GATE + BIAS] = 0 if places[6] < 0 else address + places[6]
    m[UP + BIAS] = 0 if places[7] < 0 else address + places[7]
    m[DOWN + BIAS] = 0 if places[8] < 0 else address + places[8]


@njit(nogil=True, cache=True, error_model="numpy")
def gate_up_rows(args: int, lo: int, hi: int) -> None:
    """Columns lo..hi of `act(gate x, up x)`, left where gate wrote and, for fast numerics, quantised as well."""
    m = i64_at(args)
    call_kernel(m[CODE], args + GATE * 8, lo, hi)
    call_kernel(m[CODE], args + UP * 8, lo, hi)
    for row in range(i64_at(m[COUNT])[0]):
        out = m[Y] + row * m[Y_STRIDE]
        gate, up = f32_at(out), f32_at(m[UP + Y] + row * m[UP + Y_STRIDE])
        if m[ACTIVATION] == 0:
            for j in range(lo, hi):
                gate[j] = silu(gate[j]) * up[j]
        else:
            for j in range(lo, hi):
                gate[j] = gpt_oss_glu(gate[j], up[j])
        if m[PRODUCT] != 0:
            quantise_span(out, m[PRODUCT] + row * m[PRODUCT_STRIDE], m[PRODUCT_START], lo, hi)


@cfunc(KERNEL, cache=True, error_model="numpy")
def gate_up_kernel(args: int, lo: int, hi: int) -> None:
    """`gate_up_rows` of one expert as an op."""
    gate_up_rows(args, lo, hi)


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where the parts of an expert lie, in bytes from its first; what it does not have is at -1.

    Matrices are [outputs, inputs]: gate and up [intermediate, hidden], down [hidden, intermediate]. Biases are float32,
    one per output; there are three or none.
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
    gate_bias: int = -1
    up_bias: int = -1
    down_bias: int = -1
    activation: str = Activation.SILU.value

    @property
    def kind(self) -> tuple[str, str]:
        """Format and activation: what a record of kernels is made for."""
        return self.format, self.activation

    def places(self) -> tuple[int, ...]:
        """Data and scales of gate, up and down, then the three biases, in the order in which kernels read them."""
        return (
            self.gate_data, self.gate_scales, self.up_data, self.up_scales, self.down_data, self.down_scales,
            self.gate_bias, self.up_bias, self.down_bias,
        )  # fmt: skip

    def size(self) -> int:
        """Bytes from the expert's first to the end of its last part."""
        ends = []
        for rows, cols, data, scales, bias in (
            (self.intermediate, self.hidden, self.gate_data, self.gate_scales, self.gate_bias),
            (self.intermediate, self.hidden, self.up_data, self.up_scales, self.up_bias),
            (self.hidden, self.intermediate, self.down_data, self.down_scales, self.down_bias),
        ):
            ends.append(0 if bias < 0 else bias + rows * 4)
            shape, kind = data_shape(self.format, rows, cols), data_dtype(self.format)
            ends.append(data + shape[0] * shape[1] * kind.itemsize)
            scale_shape, scale_kind = scales_shape(self.format, rows, cols), scales_dtype(self.format)
            if scale_shape is not None and scale_kind is not None:
                ends.append(scales + int(np.prod(scale_shape)) * scale_kind.itemsize)
        return max(ends)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertShape:
    """Buffers and arithmetic that all experts of one kind share.

    Attributes:
        name: of the ops, for messages.
        x: float32 [max_rows, hidden], the layer's input to its experts.
        expert_rows: float32 [max_rows, k, hidden], contiguous; row r at place s of its router order is [r, s].
        intermediate: width between up and down.
        format: of all three matrices.
        numerics: `exact` or `fast`.
        quantised: `x` as `quantise_rows` left it, where the numerics want it.
        activation: between gate, up and down.

    Raises:
        UsageError: buffers that do not fit, an unknown format, numerics or activation.
    """

    name: str
    x: NDArray[np.float32]
    expert_rows: NDArray[np.float32]
    intermediate: int
    format: str
    numerics: str = "exact"
    quantised: QuantisedRows | None = None
    activation: str = Activation.SILU.value

    def __post_init__(self) -> None:
        check_buffer(self.name, "x", self.x, (None, None))
        max_rows, hidden = self.x.shape
        check_buffer(self.name, "expert_rows", self.expert_rows, (max_rows, None, hidden), writable=True)
        if not self.expert_rows.flags.c_contiguous:
            raise UsageError(f"{self.name}: expert_rows must be contiguous")
        if self.intermediate < 1 or self.format not in FORMATS:
            raise UsageError(f"{self.name}: no expert of width {self.intermediate} in format {self.format!r}")
        if self.activation not in _ACTIVATIONS:
            raise UsageError(f"{self.name}: no kernel for the activation {self.activation!r}")
        kernel_kind(self.name, self.numerics, self.format)
        if self.quantises and (
            self.quantised is None or self.quantised.cols != hidden or self.quantised.max_rows < max_rows
        ):
            raise UsageError(f"{self.name}: {self.numerics} {self.format} experts want quantised rows of {hidden}")

    @property
    def kind(self) -> tuple[str, str]:
        """Format and activation, as `ExpertLayout.kind`."""
        return self.format, self.activation

    @property
    def hidden(self) -> int:
        """H."""
        return int(self.x.shape[1])

    @property
    def max_rows(self) -> int:
        """Rows of a batch."""
        return int(self.x.shape[0])

    @property
    def slots(self) -> int:
        """Places in a row's router order, k."""
        return int(self.expert_rows.shape[1])

    @property
    def quantises(self) -> bool:
        """True if activations are quantised."""
        return quantises(self.numerics, self.format)

    def records(self, count: int, pairs: int, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> Records:
        """Records of `count` experts that compute at most `pairs` (row, place) pairs together.

        All begin at the first pair; whoever assigns pairs moves the addresses.
        """
        return Records(self, count, pairs, sources, targets)


class Records:
    """`count` expert records and the buffers between their ops.

    Attributes:
        table: int64 [count, EXPERT_FIELDS].
        counts: int64 [count], pairs of each expert.
        gate: float32 [pairs, intermediate].
        up: float32 [pairs, intermediate].
        product: quantised gate rows, or None.
    """

    __slots__ = ("_shape", "counts", "gate", "product", "table", "up")

    def __init__(
        self, shape: ExpertShape, count: int, pairs: int, sources: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> None:
        self._shape = shape
        hidden, width = shape.hidden, shape.intermediate
        self.counts = np.zeros(count, np.int64)
        self.gate = np.zeros((pairs, width), np.float32)
        self.up = np.zeros((pairs, width), np.float32)
        self.product = QuantisedRows(pairs, width) if shape.quantises else None
        inputs = shape.x if shape.quantised is None or not shape.quantises else shape.quantised.data
        middle = self.gate if self.product is None else self.product.data
        self.table = np.zeros((count, EXPERT_FIELDS), np.int64)
        for number, row in enumerate(self.table):
            for part, result in ((GATE, self.gate), (UP, self.up)):
                self._fill(row[part : part + MATMUL_FIELDS], number, hidden, width, inputs, result)
                row[part + X_INDEX] = address_of(sources)
            down = row[DOWN : DOWN + MATMUL_FIELDS]
            self._fill(down, number, width, hidden, middle, shape.expert_rows)
            down[Y_STRIDE], down[Y_INDEX] = shape.expert_rows.strides[1], address_of(targets)
            row[CODE], row[ACTIVATION] = matmul_kernel.address, _ACTIVATIONS.index(shape.activation)
            if self.product is not None:
                start, stride = row_layout(width)
                row[PRODUCT], row[PRODUCT_STRIDE], row[PRODUCT_START] = address_of(middle), stride, start

    def _fill(
        self,
        part: NDArray[np.int64],
        number: int,
        cols: int,
        rows: int,
        x: NDArray[np.generic],
        y: NDArray[np.float32],
    ) -> None:
        weight_format = self._shape.format
        part[COUNT] = address_of(self.counts) + number * 8
        part[KIND] = kernel_kind(self._shape.name, self._shape.numerics, weight_format)
        part[X], part[X_STRIDE] = address_of(x), x.strides[0]
        part[Y], part[Y_STRIDE] = address_of(y), y.strides[0]
        part[COLS] = cols
        part[BIAS] = 0
        part[DATA_STRIDE] = data_shape(weight_format, rows, cols)[1] * data_dtype(weight_format).itemsize
        scales = scales_shape(weight_format, rows, cols)
        kind = scales_dtype(weight_format)
        part[SCALES_STRIDE] = 0 if scales is None or kind is None or len(scales) == 1 else scales[1] * kind.itemsize
        part[SCALES_SHIFT] = scales_rows_shift(weight_format)
