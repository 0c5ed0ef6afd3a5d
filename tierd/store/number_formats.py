"""What the codes and scales of published formats mean, as float32 by bits, and how records pack 4-bit codes.

8-bit floats: OCP 8-bit Floating Point Specification (E4M3 without infinities). 4-bit floats and their scales: OCP
Microscaling Formats (E2M1, E8M0).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tierd.store.records import FP8_BLOCK, MICRO_BLOCK, MICRO_GROUP, MICRO_SCALES, round_up

__all__ = [
    "E2M1",
    "E4M3",
    "e8m0_to_f32",
    "micro_scales",
    "pack_nibbles",
    "repack_pairs",
    "spread_blocks",
    "spread_groups",
    "unpack_nibbles",
]

_MAGNITUDES: Final = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1: Final = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
"""float32 [16]: value of each 4-bit code."""


def _e4m3() -> np.ndarray:
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3: Final = _e4m3()
"""float32 [256]: value of each 8-bit code."""


def e8m0_to_f32(exponents: np.ndarray) -> np.ndarray:
    """2^(b - 127) of each byte b as float32 of the same shape, exactly; 255 is NaN."""
    bits = exponents.astype(np.uint32) << np.uint32(23)
    bits = np.where(exponents == 0, np.uint32(1 << 22), bits)
    return np.where(exponents == 255, np.uint32(0x7FC00000), bits).view(np.float32)


def pack_nibbles(codes: np.ndarray, beyond: int) -> np.ndarray:
    """Packs 4-bit codes as records of mxfp4 and int4-g32 hold them.

    Args:
        codes: uint8 [rows, cols], 0 to 15.
        beyond: the code of columns beyond the matrix.

    Returns:
        uint8 [rows, ceil(cols / 64) * 32].
    """
    rows, cols = codes.shape
    padded = np.full((rows, round_up(cols, MICRO_BLOCK)), beyond, np.uint8)
    padded[:, :cols] = codes
    pairs = padded.reshape(rows, -1, 2, MICRO_GROUP)
    return np.ascontiguousarray(pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(rows, -1)


def repack_pairs(pairs: np.ndarray, cols: int, beyond: int) -> np.ndarray:
    """Packs codes of which two neighbours share a byte, the first in its low half, as records hold them.

    Args:
        pairs: uint8 [rows, at least cols / 2].
        cols: columns of the matrix; codes behind them are dropped.
        beyond: the code of columns beyond the matrix.

    Returns:
        uint8 [rows, ceil(cols / 64) * 32].
    """
    rows = len(pairs)
    if cols % MICRO_BLOCK:
        codes = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(rows, -1)
        return pack_nibbles(codes[:, :cols], beyond)
    blocks = pairs[:, : cols // 2].reshape(rows, -1, 2, MICRO_GROUP // 2)
    low, high = blocks[:, :, 0], blocks[:, :, 1]
    packed = np.empty((rows, cols // MICRO_BLOCK, MICRO_GROUP), np.uint8)
    packed[:, :, 0::2] = low & 15 | high << 4
    packed[:, :, 1::2] = low >> 4 | high & 0xF0
    return packed.reshape(rows, -1)


def unpack_nibbles(packed: np.ndarray, cols: int) -> np.ndarray:
    """The codes again: uint8 [rows, cols]."""
    blocks = packed.reshape(len(packed), -1, 1, MICRO_GROUP)
    codes = np.concatenate([blocks & 15, blocks >> 4], axis=2).reshape(len(packed), -1)
    return np.ascontiguousarray(codes[:, :cols])


def micro_scales(scales: np.ndarray) -> np.ndarray:
    """Scales [rows, groups], padded by zeros to the multiple of 16 that records have."""
    rows, groups = scales.shape
    padded = np.zeros((rows, round_up(groups, MICRO_SCALES)), scales.dtype)
    padded[:, :groups] = scales
    return padded


def spread_groups(scales: np.ndarray, cols: int) -> np.ndarray:
    """Scales [rows, groups of 32 columns or more] for each weight: [rows, cols]."""
    return np.repeat(scales, MICRO_GROUP, axis=1)[:, :cols]


def spread_blocks(scales: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Scales of 128 x 128 blocks for each weight: [rows, cols]."""
    return np.repeat(np.repeat(scales, FP8_BLOCK, axis=0)[:rows], FP8_BLOCK, axis=1)[:, :cols]
