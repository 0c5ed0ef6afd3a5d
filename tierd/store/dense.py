"""Checks of the dense tensors that a manifest lists: bounds, sizes, overlap, and the scales of codes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tierd.errors import StoreDamaged
from tierd.store.records import FP8_BLOCK

if TYPE_CHECKING:
    from tierd.store.manifest import DenseTensorInfo, Manifest

__all__ = ["DENSE_ITEM_BYTES", "check_dense", "scales_shape"]

DENSE_ITEM_BYTES = {"f32": 4, "bf16": 2, "i8": 1, "fp8": 1, "i64": 8, "i32": 4, "u8": 1}


def check_dense(manifest: Manifest, where: str) -> None:
    """Checks every dense tensor of a manifest against its shard and the others.

    Raises:
        StoreDamaged: naming the tensor.
    """
    by_name = {info.name: info for info in manifest.dense}
    if len(by_name) != len(manifest.dense):
        raise StoreDamaged(f"{where}: a dense tensor is listed twice")
    used = [shard.header_bytes for shard in manifest.dense_shards]
    for info in sorted(manifest.dense, key=lambda info: (info.shard, info.offset, info.nbytes)):
        label = f"{where}: dense tensor {info.name}"
        if info.nbytes != prod(info.shape) * DENSE_ITEM_BYTES[info.dtype]:
            raise StoreDamaged(f"{label}: {info.nbytes} bytes do not fit {info.dtype} {list(info.shape)}")
        if info.shard >= len(used):
            raise StoreDamaged(f"{label}: unknown shard {info.shard}")
        if info.offset != used[info.shard]:
            raise StoreDamaged(f"{label}: overlaps another tensor, or unused bytes lie before it")
        used[info.shard] += info.nbytes
        _check_scales(info, by_name, label)
    for shard, end in zip(manifest.dense_shards, used, strict=True):
        if end != shard.bytes:
            raise StoreDamaged(f"{where}: tensors cover {end} bytes of {shard.file}, it has {shard.bytes}")


def scales_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of the float32 scales of a dense tensor; None for types without."""
    if dtype == "i8":
        return shape[:1]
    return tuple(-(-size // FP8_BLOCK) for size in shape) if dtype == "fp8" else None


def _check_scales(info: DenseTensorInfo, by_name: dict[str, DenseTensorInfo], label: str) -> None:
    expected = scales_shape(info.dtype, info.shape)
    if (info.scales is None) != (expected is None) or (info.dtype == "fp8" and len(info.shape) != 2):
        raise StoreDamaged(f"{label}: codes and scales belong together")
    if info.scales is not None:
        scales = by_name.get(info.scales)
        if scales is None or scales.dtype != "f32" or scales.shape != expected:
            raise StoreDamaged(f"{label}: its scales {info.scales!r} are missing or have another shape")
