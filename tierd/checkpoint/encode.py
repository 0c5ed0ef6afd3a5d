"""From published bytes to stored bytes: whole expert records, and dense tensors window by window."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

import numpy as np

from tierd.checkpoint.quantise import bf16_to_f32, f32_to_bf16, quantise_int4, quantise_int8
from tierd.errors import UsageError
from tierd.store.formats import ExpertFormat
from tierd.store.reading import aligned_buffer, read_exact
from tierd.store.shards import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierd.checkpoint.reader import SourceTensor
    from tierd.checkpoint.resolve import ExpertSource, MatrixSource
    from tierd.store.records import RecordLayout

__all__ = ["dense_scales", "dense_windows", "encode_expert"]

WINDOW_WEIGHTS: Final = 2 << 20
"""Weights of a dense tensor that are in memory at once."""


def encode_expert(source: ExpertSource, layout: RecordLayout) -> np.ndarray:
    """Reads one expert and writes its record: uint8 [record_bytes], padding zero.

    Raises:
        DriveError: the source cannot be read.
        UsageError: a weight cannot be quantised; the tensor is named.
    """
    record = aligned_buffer(layout.record_bytes)
    record[:] = 0
    views = layout.views(record)
    for name, matrix in source:
        raw = read_exact(matrix.tensor.path, matrix.offset, matrix.nbytes)
        _encode_matrix(raw, matrix, ExpertFormat(layout.format), views, name)
    return record


def _encode_matrix(
    raw: np.ndarray, matrix: MatrixSource, wanted: ExpertFormat, views: dict[str, np.ndarray], name: str
) -> None:
    shape = (matrix.rows, matrix.cols)
    dtype = matrix.tensor.dtype
    if wanted is ExpertFormat.BF16 and dtype == "BF16":
        views[name][...] = raw.view(np.uint16).reshape(shape)
        return
    weights = _widen(raw, dtype).reshape(shape)
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
    except UsageError as error:
        raise UsageError(f"{matrix.tensor.path}: tensor {matrix.tensor.name}: {error.message}") from None


def dense_windows(tensor: SourceTensor, stored: str) -> Iterator[np.ndarray]:
    """The stored bytes of a dense tensor in order, a bounded number of whole rows at a time.

    Args:
        tensor: the source.
        stored: "f32", "bf16" or "i8" (codes; the tensor is a matrix then).
    """
    for raw in _row_windows(tensor):
        if stored == "bf16" and tensor.dtype == "BF16":
            yield raw
            continue
        weights = _widen(raw.reshape(-1), tensor.dtype)
        match stored:
            case "f32":
                yield weights
            case "bf16":
                yield f32_to_bf16(weights)
            case _:
                yield _quantise_rows(tensor, weights)[0]


def dense_scales(tensor: SourceTensor) -> np.ndarray:
    """The row scales float32 [rows] of a matrix that is stored as int8."""
    rows = [_quantise_rows(tensor, _widen(raw.reshape(-1), tensor.dtype))[1] for raw in _row_windows(tensor)]
    return np.concatenate(rows)


def _quantise_rows(tensor: SourceTensor, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    try:
        return quantise_int8(weights.reshape(-1, tensor.shape[1]))
    except UsageError as error:
        raise UsageError(f"{tensor.path}: tensor {tensor.name}: {error.message}") from None


def _row_windows(tensor: SourceTensor) -> Iterator[np.ndarray]:
    row_bytes = tensor_bytes(tensor.dtype, tensor.shape[1:])
    step = max(1, WINDOW_WEIGHTS // prod(tensor.shape[1:]))
    for start in range(0, tensor.shape[0], step):
        rows = min(step, tensor.shape[0] - start)
        yield read_exact(tensor.path, tensor.offset + start * row_bytes, rows * row_bytes)


def _widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    match dtype:
        case "F32":
            return raw.view(np.float32)
        case "BF16":
            return bf16_to_f32(raw.view(np.uint16))
        case _:
            return raw.view(np.float16).astype(np.float32)
