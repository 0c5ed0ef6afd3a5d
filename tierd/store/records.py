"""The layout of one expert record: gate, up and down with their scales in one aligned run of bytes.

A record begins and ends on a border of 4096 bytes and covers its own padding (zeros), so that one direct read
fetches one expert. Its parts begin on borders of 64 bytes. A record holds numbers only, never an index that
addresses memory: any bit pattern can be computed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from tierd.errors import StoreDamaged, UsageError
from tierd.store.formats import Activation, ExpertFormat

__all__ = [
    "FP8_BLOCK",
    "INT4_BLOCK",
    "INT4_GROUP",
    "MICRO_BLOCK",
    "MICRO_GROUP",
    "MICRO_SCALES",
    "PART_ALIGNMENT",
    "RECORD_ALIGNMENT",
    "RecordLayout",
    "RecordPart",
    "expert_layout",
    "matrix_parts",
    "round_up",
]

RECORD_ALIGNMENT: Final = 4096
PART_ALIGNMENT: Final = 64
INT4_GROUP: Final = 64
"""Columns of a row that share one scale."""
INT4_BLOCK: Final = 128
"""Columns packed together: low nibbles hold one group, high nibbles the next."""
FP8_BLOCK: Final = 128
"""Rows, and columns, that share one scale of fp8-e4m3."""
MICRO_GROUP: Final = 32
"""Columns of a row that share one scale of mxfp4 and int4-g32."""
MICRO_BLOCK: Final = 64
"""Columns of these formats packed together: low nibbles hold one group, high nibbles the next."""
MICRO_SCALES: Final = 16
"""A row has scales in multiples of this many, so that kernels load them together."""
MAX_RECORD_BYTES: Final = 1 << 30

_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "f32": np.dtype("<f4"),
    "bf16": np.dtype("<u2"),
    "f16": np.dtype("<f2"),
    "i8": np.dtype("i1"),
    "u8": np.dtype("u1"),
}


def round_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True, slots=True)
class RecordPart:
    """One array inside a record.

    Attributes:
        name: "gate", "up", "down", or one of these with ".scales" or ".bias".
        dtype: "f32", "bf16" (seen as uint16 by numpy), "f16", "i8" or "u8".
        shape: of the array, row-major; rows are outputs.
        offset: bytes from the start of the record, a multiple of 64.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without padding."""
        return prod(self.shape) * _DTYPES[self.dtype].itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The numpy type of the view: bf16 is seen as its uint16 bits."""
        return _DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where the parts of a record lie; shared by all experts of a layer.

    Attributes:
        format: name of the expert format, see `ExpertFormat`.
        parts: in rising order of offset, not overlapping.
        record_bytes: length of the record with its padding, a multiple of 4096.
        activation: name of what the expert does between its matrices, see `Activation`.

    Raises:
        StoreDamaged: the parts are unknown, misplaced or overlap, or the activation is unknown.
    """

    format: str
    parts: tuple[RecordPart, ...]
    record_bytes: int
    activation: str = Activation.SILU.value

    def __post_init__(self) -> None:
        if self.activation not in tuple(Activation):
            raise StoreDamaged(f"record layout: the activation {self.activation[:40]!r} is unknown")
        if not 0 < self.record_bytes <= MAX_RECORD_BYTES or self.record_bytes % RECORD_ALIGNMENT:
            raise StoreDamaged(
                f"record layout: {self.record_bytes} bytes is not a multiple of {RECORD_ALIGNMENT} "
                f"between {RECORD_ALIGNMENT} and {MAX_RECORD_BYTES}"
            )
        end = 0
        for part in self.parts:
            if part.dtype not in _DTYPES:
                raise StoreDamaged(f"record layout: part {part.name!r} has the unknown dtype {part.dtype!r}")
            if not part.shape or any(size < 1 for size in part.shape):
                raise StoreDamaged(f"record layout: part {part.name!r} has the shape {list(part.shape)}")
            if part.offset % PART_ALIGNMENT or part.offset < end:
                raise StoreDamaged(
                    f"record layout: part {part.name!r} at offset {part.offset} is not aligned to "
                    f"{PART_ALIGNMENT} bytes or overlaps the part before it"
                )
            end = part.offset + part.nbytes
        if end > self.record_bytes:
            raise StoreDamaged(f"record layout: parts end at byte {end}, the record at {self.record_bytes}")
        if len({part.name for part in self.parts}) != len(self.parts):
            raise StoreDamaged("record layout: two parts have the same name")

    @property
    def weights(self) -> int:
        """Number of weights of one expert: rows x columns of its matrices."""
        hidden, intermediate = self.sizes
        return (3 if self.gated else 2) * hidden * intermediate

    @property
    def biases(self) -> bool:
        """True if records have biases of gate, up and down."""
        return any(part.name == "up.bias" for part in self.parts)

    @property
    def gated(self) -> bool:
        """True if records have a gate, which all native experts do."""
        return any(part.name == "gate" for part in self.parts)

    @property
    def sizes(self) -> tuple[int, int]:
        """H and I of the expert."""
        return self.part("down").shape[0], self.part("up").shape[0]

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a record, padding included, for each weight."""
        return self.record_bytes / self.weights

    def part(self, name: str) -> RecordPart:
        """The part called `name`; UsageError if there is none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise UsageError(f"a record of format {self.format} has no part {name!r}")

    def views(self, buffer: memoryview | np.ndarray) -> dict[str, np.ndarray]:
        """Each part as an array over the same memory: no copy, read-only if the buffer is.

        Args:
            buffer: at least `record_bytes` contiguous bytes (a memoryview, or an array of uint8).

        Returns:
            Arrays by part name with the shapes of the layout; bf16 as uint16.

        Raises:
            UsageError: the buffer is too short or not a run of bytes.
        """
        data = np.frombuffer(buffer, dtype=np.uint8) if isinstance(buffer, memoryview) else buffer
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise UsageError("a record must be viewed through contiguous bytes in one dimension")
        if data.nbytes < self.record_bytes:
            raise UsageError(f"buffer of {data.nbytes} bytes for a record of {self.record_bytes} bytes")
        return {
            part.name: data[part.offset : part.offset + part.nbytes].view(part.numpy_dtype).reshape(part.shape)
            for part in self.parts
        }


def matrix_parts(name: str, expert_format: ExpertFormat, rows: int, cols: int) -> list[RecordPart]:
    """Parts of one matrix [rows, cols], all at offset 0 (the layout places them)."""
    match expert_format:
        case ExpertFormat.F32 | ExpertFormat.BF16:
            return [RecordPart(name, expert_format.value, (rows, cols), 0)]
        case ExpertFormat.INT8:
            return [RecordPart(name, "i8", (rows, cols), 0), RecordPart(f"{name}.scales", "f32", (rows,), 0)]
        case ExpertFormat.INT4_G64:
            blocks = round_up(cols, INT4_BLOCK) // INT4_BLOCK
            return [
                RecordPart(name, "u8", (rows, blocks * INT4_BLOCK // 2), 0),
                RecordPart(f"{name}.scales", "f16", (rows, blocks * (INT4_BLOCK // INT4_GROUP)), 0),
            ]
        case ExpertFormat.FP8:
            grid = tuple(round_up(size, FP8_BLOCK) // FP8_BLOCK for size in (rows, cols))
            return [RecordPart(name, "u8", (rows, cols), 0), RecordPart(f"{name}.scales", "f32", grid, 0)]
        case ExpertFormat.MXFP4 | ExpertFormat.INT4_G32:
            scales = round_up(round_up(cols, MICRO_GROUP) // MICRO_GROUP, MICRO_SCALES)
            return [
                RecordPart(name, "u8", (rows, round_up(cols, MICRO_BLOCK) // 2), 0),
                RecordPart(
                    f"{name}.scales", "u8" if expert_format is ExpertFormat.MXFP4 else "bf16", (rows, scales), 0
                ),
            ]


def expert_layout(
    expert_format: ExpertFormat | str,
    hidden_size: int,
    intermediate_size: int,
    *,
    record_bytes: int | None = None,
    activation: Activation | str = Activation.SILU,
    biases: bool = False,
    gated: bool = True,
) -> RecordLayout:
    """The layout of one expert: gate and up are [I, H], down is [H, I], scales and bias follow their matrix.

    * f32, bf16: the weights as they are.
    * int8: codes -127..127, and a float32 scale per row: weight = code * scale.
    * int4-g64: per 128 columns 64 bytes; byte j holds column j of group 2i in its low nibble and column j of
      group 2i+1 in its high nibble; weight = (code - 8) * scale of its group (float16). Columns beyond the
      matrix have code 8, groups beyond it the scale 0.
    * fp8-e4m3: a byte per weight (sign, 4 bits of exponent, 3 of mantissa; 0x7f and 0xff are NaN), and a float32
      scale per 128 x 128 weights, counted from the matrix's own first row; weight = value * scale.
    * mxfp4: per 64 columns 32 bytes; byte j holds column j of group 2i in its low nibble and column j of group
      2i+1 in its high nibble (published checkpoints put neighbours together). A nibble is a sign and one of 0,
      0.5, 1, 1.5, 2, 3, 4, 6; a scale byte b means 2^(b - 127), 255 is NaN. What is beyond the matrix is 0.
    * int4-g32: packed alike; weight = (nibble - 8) * scale of its group (bfloat16). Columns beyond the matrix
      have nibble 8, groups beyond it the scale 0.

    Scale rows of the last two are padded to multiples of 16. Biases are float32, one per row of their matrix.

    Args:
        expert_format: one of `ExpertFormat`.
        hidden_size: H, 1 or more.
        intermediate_size: I, 1 or more.
        record_bytes: pad the record to this length instead of the smallest possible one.
        activation: one of `Activation`.
        biases: records have biases.
        gated: records have a gate; without one, up and down only.

    Raises:
        UsageError: unknown format, a size below 1, or `record_bytes` that is too short.
    """
    try:
        chosen = ExpertFormat(expert_format)
    except ValueError:
        known = ", ".join(ExpertFormat)
        raise UsageError(f"unknown expert format {expert_format!r}", hint=f"Known formats: {known}.") from None
    if hidden_size < 1 or intermediate_size < 1:
        raise UsageError(f"an expert of hidden size {hidden_size} and width {intermediate_size} cannot be")
    unplaced: list[RecordPart] = []
    for name, rows, cols in (
        *((("gate", intermediate_size, hidden_size),) if gated else ()),
        ("up", intermediate_size, hidden_size),
        ("down", hidden_size, intermediate_size),
    ):
        unplaced += matrix_parts(name, chosen, rows, cols)
        if biases:
            unplaced.append(RecordPart(f"{name}.bias", "f32", (rows,), 0))
    parts: list[RecordPart] = []
    end = 0
    for part in unplaced:
        parts.append(RecordPart(part.name, part.dtype, part.shape, round_up(end, PART_ALIGNMENT)))
        end = parts[-1].offset + part.nbytes
    smallest = round_up(end, RECORD_ALIGNMENT)
    if record_bytes is not None and record_bytes < smallest:
        raise UsageError(f"record_bytes {record_bytes} is below the {smallest} that this expert needs")
    length = smallest if record_bytes is None else record_bytes
    return RecordLayout(chosen.value, tuple(parts), length, Activation(activation).value)
