"""Published weights and codes as they are read: in the form of a record, or as float32.

Scales are taken by their bits. What a code means is written in `tierd.store.number_formats`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tierd.checkpoint.quantisation import Coding
from tierd.checkpoint.quantise import bf16_to_f32
from tierd.errors import StoreDamaged
from tierd.store.number_formats import (
    E2M1,
    E4M3,
    e8m0_to_f32,
    micro_scales,
    repack_pairs,
    spread_blocks,
    spread_groups,
    unpack_nibbles,
)
from tierd.store.reading import read_exact
from tierd.store.records import MICRO_GROUP

if TYPE_CHECKING:
    from tierd.checkpoint.expert_sources import MatrixSource, Outputs, Span
    from tierd.checkpoint.reader import SourceTensor

__all__ = ["block_scales", "plain_bits", "read_bias", "read_codes", "read_weights", "widen"]

_LARGEST_SCALE: Final = 2.0**119
"""Kernels multiply a scale of fp8 by 256 first."""
_BEYOND: Final = {Coding.MXFP4: 0, Coding.INT4: 8}
"""The code that means 0."""


def widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Plain numbers of a tensor as float32, exactly; float32 ones are a view of the same bytes."""
    match dtype:
        case "F32":
            return raw.view(np.float32)
        case "BF16":
            return bf16_to_f32(raw.view(np.uint16))
        case _:
            return raw.view(np.float16).astype(np.float32)


def block_scales(tensor: SourceTensor, raw: np.ndarray) -> np.ndarray:
    """Scales of fp8 blocks as float32, exactly; StoreDamaged where one is no finite number below 2^119."""
    wide = e8m0_to_f32(raw) if tensor.dtype in ("F8_E8M0", "U8") else widen(raw, tensor.dtype)
    if not (np.abs(wide) < _LARGEST_SCALE).all():
        raise StoreDamaged(
            f"{tensor.path}: tensor {tensor.name} has a scale that is no finite number below 2^119",
            hint="The file is damaged: download it again.",
        )
    return wide


def read_codes(source: MatrixSource) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales as `expert_layout` describes them for the format `source.coding.stored`."""
    assert source.scales is not None
    raw, scales = _raw(source.weights).reshape(source.outputs.total, -1), _raw(source.scales)
    own = _own(raw, source.outputs, source.rows)
    if source.coding is Coding.FP8:
        grid = block_scales(source.scales.tensor, scales).reshape(-1, -(-source.cols // source.group_size))
        first = source.outputs.first // source.group_size
        return own, grid[first : first + -(-source.rows // source.group_size)]
    scales = scales if source.coding is Coding.MXFP4 else scales.view(np.uint16)
    groups = _own(scales.reshape(source.outputs.total, -1), source.outputs, source.rows)
    small = np.repeat(groups, source.group_size // MICRO_GROUP, axis=1)[:, : -(-source.cols // MICRO_GROUP)]
    return repack_pairs(own, source.cols, _BEYOND[source.coding]), micro_scales(small)


def read_weights(source: MatrixSource) -> np.ndarray:
    """The weights as float32 [rows, cols]: plain ones widened exactly, codes times scale rounded once."""
    if source.coding is Coding.PLAIN:
        return widen(plain_bits(source), source.tensor.dtype)
    codes, scales = read_codes(source)
    if source.coding is Coding.FP8:
        values, spread = E4M3[codes], spread_blocks(scales, source.rows, source.cols)
    elif source.coding is Coding.MXFP4:
        values = E2M1[unpack_nibbles(codes, source.cols)]
        spread = spread_groups(e8m0_to_f32(scales), source.cols)
    else:
        values = unpack_nibbles(codes, source.cols).astype(np.float32) - np.float32(8)
        spread = spread_groups(bf16_to_f32(scales), source.cols)
    weights: np.ndarray = values * spread
    return weights


def plain_bits(source: MatrixSource) -> np.ndarray:
    """Plain weights [rows, cols] as unsigned numbers of their bits, contiguous."""
    bits = _raw(source.weights).view(np.uint32 if source.tensor.dtype == "F32" else np.uint16)
    outputs = source.outputs
    block = bits.reshape(source.cols, outputs.total).T if outputs.transposed else bits.reshape(outputs.total, -1)
    return _own(block, outputs, source.rows)


def read_bias(source: MatrixSource) -> np.ndarray | None:
    """The bias as float32 [rows], or None."""
    if source.bias is None:
        return None
    return _own(widen(_raw(source.bias), source.bias.tensor.dtype), source.outputs, source.rows)


def _own(block: np.ndarray, outputs: Outputs, rows: int) -> np.ndarray:
    """The rows of a block [outputs, ...] that belong to a matrix, contiguous."""
    return np.ascontiguousarray(block[outputs.first :: outputs.step][:rows])


def _raw(span: Span) -> np.ndarray:
    return read_exact(span.tensor.path, span.offset, span.nbytes)
