"""Weight matrices as they lie in memory: the formats, what their arrays look like, and the reference values.

A matrix has one row per output (`y = W x`), as published checkpoints store it. Its arrays may be views into a
read-only shared mapping: nothing here writes to them, and rows need no alignment.

- `f32`: float32.
- `bf16`: the upper 16 bits of a float32.
- `int8`: a signed byte, times one float32 scale per row.
- `int4-g64`: a code 0..15 minus 8, times one float16 scale per 64 columns. The columns are padded to a multiple of
  128 with code 8 and scale 0. Byte j of each 64 bytes holds column j of an even group in its low half and column j
  of the following odd group in its high half.
- `fp8-e4m3`: an 8-bit float, times one float32 scale per 128 x 128 weights.
- `mxfp4`: a 4-bit float, times a power of two (a byte, E8M0) per 32 columns. The columns are padded to a multiple of
  64; byte j of each 32 bytes holds column j of an even group in its low half, of the following odd group in its high
  half. A row's scales are padded to a multiple of 16.
- `int4-g32`: packed alike, a code 0..15 minus 8, times one bf16 scale per 32 columns.

Of the last three, as of f32 and bf16, a weight is one float32: value times scale, rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError
from tierd.store.number_formats import (
    E2M1,
    E4M3,
    e8m0_to_f32,
    micro_scales,
    pack_nibbles,
    spread_blocks,
    spread_groups,
    unpack_nibbles,
)
from tierd.store.records import FP8_BLOCK, MICRO_BLOCK, MICRO_GROUP, MICRO_SCALES, round_up

__all__ = [
    "FORMATS",
    "GROUP",
    "MICRO_FORMATS",
    "Matrix",
    "bf16_bits",
    "data_dtype",
    "data_shape",
    "dequantise",
    "from_float32",
    "quantise_int4",
    "quantise_int8",
    "scales_dtype",
    "scales_rows_shift",
    "scales_shape",
]

Array = NDArray[Any]

FORMATS: Final = ("f32", "bf16", "int8", "int4-g64", "fp8-e4m3", "mxfp4", "int4-g32")
MICRO_FORMATS: Final = ("mxfp4", "int4-g32")
"""Formats of 4-bit codes with a scale per 32 columns."""
GROUP: Final = 64
"""Columns that share a scale in `int4-g64`."""

_DATA: Final = {
    "f32": np.float32, "bf16": np.uint16, "int8": np.int8, "int4-g64": np.uint8, "fp8-e4m3": np.uint8,
    "mxfp4": np.uint8, "int4-g32": np.uint8,
}  # fmt: skip
_SCALES: Final = {
    "int8": np.float32, "int4-g64": np.float16, "fp8-e4m3": np.float32, "mxfp4": np.uint8, "int4-g32": np.uint16,
}  # fmt: skip
_LARGEST_SIDE: Final = 1 << 31


def _known(weight_format: str) -> str:
    if weight_format not in FORMATS:
        raise UsageError(f"unknown weight format {weight_format!r}", hint=f"known formats: {', '.join(FORMATS)}")
    return weight_format


def _blocks(cols: int) -> int:
    """Blocks of two groups (128 columns, 64 bytes) that an int4 row takes."""
    return -(-cols // (2 * GROUP))


def data_dtype(weight_format: str) -> np.dtype[Any]:
    """Element type of `Matrix.data`."""
    return np.dtype(_DATA[_known(weight_format)])


def scales_dtype(weight_format: str) -> np.dtype[Any] | None:
    """Element type of `Matrix.scales`, or None for the formats without."""
    scale = _SCALES.get(_known(weight_format))
    return None if scale is None else np.dtype(scale)


def data_shape(weight_format: str, rows: int, cols: int) -> tuple[int, int]:
    """Shape of `Matrix.data` for a matrix of rows x cols."""
    if _known(weight_format) == "int4-g64":
        return rows, _blocks(cols) * GROUP
    return rows, (round_up(cols, MICRO_BLOCK) // 2 if weight_format in MICRO_FORMATS else cols)


def scales_shape(weight_format: str, rows: int, cols: int) -> tuple[int, ...] | None:
    """Shape of `Matrix.scales` for a matrix of rows x cols, or None for the formats without."""
    match _known(weight_format):
        case "int8":
            return (rows,)
        case "int4-g64":
            return rows, _blocks(cols) * 2
        case "fp8-e4m3":
            return -(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK)
        case "mxfp4" | "int4-g32":
            return rows, round_up(-(-cols // MICRO_GROUP), MICRO_SCALES)
        case _:
            return None


def scales_rows_shift(weight_format: str) -> int:
    """Binary logarithm of how many rows of a matrix share a row of `Matrix.scales`."""
    return FP8_BLOCK.bit_length() - 1 if weight_format == "fp8-e4m3" else 0


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix of `rows` outputs and `cols` inputs.

    Attributes:
        format: one of `FORMATS`.
        rows: outputs.
        cols: inputs, without padding.
        data: of the type `data_dtype` and the shape `data_shape`; bf16 as the uint16 of its bits. C-contiguous.
        scales: None, or of the type `scales_dtype` and the shape `scales_shape`. C-contiguous.

    Raises:
        UsageError: an unknown format, or an array of another shape, type or layout.
    """

    format: str
    rows: int
    cols: int
    data: Array
    scales: Array | None = None

    def __post_init__(self) -> None:
        _known(self.format)
        if not (0 < self.rows < _LARGEST_SIDE and 0 < self.cols < _LARGEST_SIDE):
            raise UsageError(f"a {self.format} matrix of {self.rows} x {self.cols} is outside 1..2^31-1")
        self._check("data", self.data, data_shape(self.format, self.rows, self.cols), data_dtype(self.format))
        shape, dtype = scales_shape(self.format, self.rows, self.cols), scales_dtype(self.format)
        if shape is None or dtype is None:
            if self.scales is not None:
                raise UsageError(f"a {self.format} matrix has no scales")
        elif self.scales is None:
            raise UsageError(f"a {self.format} matrix needs scales of shape {shape}")
        else:
            self._check("scales", self.scales, shape, dtype)

    def _check(self, part: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
            raise UsageError(
                f"{part} of a {self.format} matrix of {self.rows} x {self.cols} must be a contiguous {dtype} array of "
                f"shape {shape}, not {array.dtype} of {array.shape}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


def dequantise(matrix: Matrix) -> NDArray[np.float32]:
    """The values that the kernels compute with, float32 [rows, cols]: the reference for every format."""
    if matrix.format == "f32":
        return np.array(matrix.data, np.float32)
    if matrix.format == "bf16":
        return (matrix.data.astype(np.uint32) << 16).view(np.float32)
    assert matrix.scales is not None
    if matrix.format == "int8":
        return matrix.data.astype(np.float32) * matrix.scales[:, None]
    if matrix.format == "fp8-e4m3":
        blocks: NDArray[np.float32] = E4M3[matrix.data] * spread_blocks(matrix.scales, matrix.rows, matrix.cols)
        return blocks
    if matrix.format in MICRO_FORMATS:
        return _dequantise_micro(matrix, matrix.scales)
    packed = matrix.data.reshape(matrix.rows, -1, 1, GROUP)
    codes = np.concatenate([packed & 15, packed >> 4], axis=2).astype(np.float32) - 8
    values = codes * matrix.scales.astype(np.float32).reshape(matrix.rows, -1, 2, 1)
    return np.ascontiguousarray(values.reshape(matrix.rows, -1)[:, : matrix.cols])


def _dequantise_micro(matrix: Matrix, scales: Array) -> NDArray[np.float32]:
    codes = unpack_nibbles(matrix.data, matrix.cols)
    if matrix.format == "mxfp4":
        values, wide = E2M1[codes], e8m0_to_f32(scales)
    else:
        values = codes.astype(np.float32) - np.float32(8)
        wide = (scales.astype(np.uint32) << 16).view(np.float32)
    weights: NDArray[np.float32] = values * spread_groups(wide, matrix.cols)
    return weights


def bf16_bits(values: Array) -> NDArray[np.uint16]:
    """Rounds float32 values to bf16, to nearest, ties to even; NaN stays NaN. Returns the 16 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def from_float32(values: Array, weight_format: str = "f32") -> Matrix:
    """A matrix in any format from float32 values [rows, cols], by plain rounding to nearest."""
    w = np.ascontiguousarray(values, np.float32)
    if w.ndim != 2:
        raise UsageError(f"a matrix has two dimensions, not shape {w.shape}")
    if _known(weight_format) == "f32":
        return Matrix("f32", w.shape[0], w.shape[1], w)
    if weight_format == "bf16":
        return Matrix("bf16", w.shape[0], w.shape[1], bf16_bits(w))
    make = {"int8": quantise_int8, "int4-g64": quantise_int4, "fp8-e4m3": quantise_fp8}
    return make[weight_format](w) if weight_format in make else quantise_micro(w, weight_format)


def quantise_int8(values: Array) -> Matrix:
    """Rounds each row to 255 levels of its largest magnitude."""
    w = np.ascontiguousarray(values, np.float32)
    scales = (np.abs(w).max(axis=1) / np.float32(127)).astype(np.float32)
    codes = np.rint(w / np.where(scales == 0, np.float32(1), scales)[:, None])
    return Matrix("int8", w.shape[0], w.shape[1], np.clip(codes, -127, 127).astype(np.int8), scales)


def quantise_int4(values: Array) -> Matrix:
    """Rounds each group of 64 columns to 16 levels: scale = the value of largest magnitude / -8, codes 0..15."""
    w = np.ascontiguousarray(values, np.float32)
    rows, cols = w.shape
    padded = np.zeros((rows, _blocks(cols) * 2, GROUP), np.float32)
    padded.reshape(rows, -1)[:, :cols] = w
    largest = np.take_along_axis(padded, np.abs(padded).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    scales = (largest / np.float32(-8)).astype(np.float16)
    divisor = np.where(scales == 0, np.float16(1), scales).astype(np.float32)
    codes = (np.clip(np.rint(padded / divisor[:, :, None]), -8, 7) + 8).astype(np.uint8)
    codes.reshape(rows, -1)[:, cols:] = 8
    pairs = codes.reshape(rows, -1, 2, GROUP)
    data = np.ascontiguousarray((pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(rows, -1))
    scales.reshape(rows, -1)[:, -(-cols // GROUP) :] = 0
    return Matrix("int4-g64", rows, cols, data, scales)


def quantise_fp8(values: Array) -> Matrix:
    """Rounds each weight to the nearest 8-bit float; the largest magnitude of 128 x 128 weights becomes 448."""
    w = np.ascontiguousarray(values, np.float32)
    rows, cols = w.shape
    padded = np.zeros((round_up(rows, FP8_BLOCK), round_up(cols, FP8_BLOCK)), np.float32)
    padded[:rows, :cols] = np.abs(w)
    largest = padded.reshape(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK).max(axis=(1, 3))
    scales = np.where(largest > 0, largest / np.float32(448), np.float32(1))
    return Matrix("fp8-e4m3", rows, cols, _nearest(w / spread_blocks(scales, rows, cols), E4M3[:127], 128), scales)


def quantise_micro(values: Array, weight_format: str) -> Matrix:
    """Rounds to the 16 values of `mxfp4` or `int4-g32`, under the scale that the largest magnitude of a group asks."""
    w = np.ascontiguousarray(values, np.float32)
    rows, cols = w.shape
    padded = np.zeros((rows, round_up(cols, MICRO_GROUP)), np.float32)
    padded[:, :cols] = np.abs(w)
    largest = padded.reshape(rows, -1, MICRO_GROUP).max(axis=2)
    if weight_format == "mxfp4":
        exponents = np.clip(np.frexp(largest)[1] + 124, 0, 254).astype(np.uint8)  # 4 to 6 for the largest
        codes = _nearest(w / spread_groups(e8m0_to_f32(exponents), cols), E2M1[:8], 8)
        return Matrix("mxfp4", rows, cols, pack_nibbles(codes, 0), micro_scales(exponents))
    scales = bf16_bits(np.where(largest > 0, largest / np.float32(7), np.float32(1)))
    wide = (scales.astype(np.uint32) << 16).view(np.float32)
    codes = (np.clip(np.rint(w / spread_groups(wide, cols)), -8, 7) + 8).astype(np.uint8)
    return Matrix("int4-g32", rows, cols, pack_nibbles(codes, 8), micro_scales(scales))


def _nearest(values: Array, magnitudes: Array, sign: int) -> NDArray[np.uint8]:
    """Code of the nearest of rising `magnitudes`, with the bit `sign` for negative values."""
    borders = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = np.searchsorted(borders, np.abs(values)).astype(np.uint8)
    return np.where(values < 0, codes | sign, codes).astype(np.uint8)
