"""From published bytes to stored bytes: matrices of expert records, and dense tensors window by window."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from tierd.checkpoint.decode import block_scales, plain_bits, read_bias, read_codes, read_weights, widen
from tierd.checkpoint.quantisation import Coding
from tierd.checkpoint.quantise import f32_to_bf16, quantise_int4, quantise_int8
from tierd.errors import UsageError
from tierd.store.formats import ExpertFormat
from tierd.store.number_formats import E4M3
from tierd.store.reading import read_exact
from tierd.store.records import FP8_BLOCK
from tierd.store.shards import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierd.checkpoint.expert_sources import MatrixSource
    from tierd.checkpoint.reader import SourceTensor

__all__ = ["dense_windows", "encode_matrix", "published_scales", "row_scales"]

WINDOW_WEIGHTS: Final = 2 << 20
"""Weights of a dense tensor that are in memory at once."""
_AS_PUBLISHED: Final = {"F32": "f32", "BF16": "bf16", "F8_E4M3": "fp8", "I64": "i64", "I32": "i32", "U8": "u8"}
"""What is stored byte for byte as it was published."""


def encode_matrix(source: MatrixSource, wanted: ExpertFormat, views: dict[str, np.ndarray], name: str) -> None:
    """Reads one matrix of an expert and writes it, with scales and bias, into the parts of its record.

    Raises:
        DriveError: the source cannot be read.
        UsageError: a weight cannot be quantised; the tensor is named.
        StoreDamaged: a scale that no store can hold; the tensor is named.
    """
    if f"{name}.bias" in views:
        views[f"{name}.bias"][...] = read_bias(source)
    if source.coding.stored is wanted:
        views[name][...], views[f"{name}.scales"][...] = read_codes(source)
        return
    if source.coding is Coding.PLAIN and (source.tensor.dtype, wanted) == ("BF16", ExpertFormat.BF16):
        views[name][...] = plain_bits(source)
        return
    weights = read_weights(source)
    try:
        match wanted:
            case ExpertFormat.F32:
                views[name][...] = weights
            case ExpertFormat.BF16:
                views[name][...] = f32_to_bf16(weights)
            case ExpertFormat.INT8:
                views[name][...], views[f"{name}.scales"][...] = quantise_int8(weights)
            case ExpertFormat.INT4_G64:
                views[name][...], views[f"{name}.scales"][...] = quantise_int4(weights)
            case _:
                raise AssertionError(f"{wanted} is taken over from checkpoints that have it, never made")
    except UsageError as error:
        raise UsageError(f"{source.tensor.path}: tensor {source.tensor.name}: {error.message}") from None


def dense_windows(tensor: SourceTensor, stored: str, scales: SourceTensor | None = None) -> Iterator[np.ndarray]:
    """The stored bytes of a dense tensor in order, a bounded number of whole rows at a time.

    Args:
        tensor: the source.
        stored: "f32", "bf16" or "i8" (codes; the tensor is a matrix then), or what it was published as.
        scales: of fp8 blocks, where the tensor has codes.
    """
    if _AS_PUBLISHED.get(tensor.dtype) == stored:
        yield from (raw for _, raw in _row_windows(tensor))
        return
    for weights in _weight_windows(tensor, scales):
        match stored:
            case "f32":
                yield weights
            case "bf16":
                yield f32_to_bf16(weights)
            case _:
                yield _quantise_rows(tensor, weights)[0]


def row_scales(tensor: SourceTensor, scales: SourceTensor | None = None) -> np.ndarray:
    """The row scales float32 [rows] of a matrix that is stored as int8; `scales` as for `dense_windows`."""
    return np.concatenate([_quantise_rows(tensor, weights)[1] for weights in _weight_windows(tensor, scales)])


def published_scales(scales: SourceTensor) -> np.ndarray:
    """The scales of a matrix that stays in fp8: float32, flat, exactly."""
    return block_scales(scales, read_exact(scales.path, scales.offset, scales.nbytes))


def _weight_windows(tensor: SourceTensor, scales: SourceTensor | None) -> Iterator[np.ndarray]:
    """The weights in order as float32, a bounded number of whole rows at a time."""
    if scales is None:
        yield from (widen(raw.reshape(-1), tensor.dtype) for _, raw in _row_windows(tensor))
        return
    blocks = published_scales(scales).reshape(scales.shape)
    for start, raw in _row_windows(tensor):
        codes = raw.reshape(-1, tensor.shape[1])
        rows = np.arange(start, start + len(codes)) // FP8_BLOCK
        yield E4M3[codes] * np.repeat(blocks[rows], FP8_BLOCK, axis=1)[:, : tensor.shape[1]]


def _quantise_rows(tensor: SourceTensor, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    try:
        return quantise_int8(weights.reshape(-1, tensor.shape[1]))
    except UsageError as error:
        raise UsageError(f"{tensor.path}: tensor {tensor.name}: {error.message}") from None


def _row_windows(tensor: SourceTensor) -> Iterator[tuple[int, np.ndarray]]:
    """First row and bytes of a bounded number of rows; a number alone counts as a row."""
    count, *inner = tensor.shape or (1,)
    row_bytes = tensor_bytes(tensor.dtype, inner)
    step = max(1, WINDOW_WEIGHTS // prod(inner))
    for start in range(0, count, step):
        rows = min(step, count - start)
        yield start, read_exact(tensor.path, tensor.offset + start * row_bytes, rows * row_bytes)
