"""`experts.npy`: where the record of each routed expert lies, with its checksum; one row per expert, in flat order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from tierd.errors import StoreDamaged
from tierd.store.records import RECORD_ALIGNMENT, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierd.store.geometry import Geometry
    from tierd.store.manifest import Shard

__all__ = ["INDEX_DTYPE", "check_index", "decode_index", "encode_index", "new_index"]

INDEX_DTYPE: Final = np.dtype(
    [
        ("layer", "<u4"),
        ("expert", "<u4"),
        ("shard", "<u4"),
        ("offset", "<u8"),
        ("bytes", "<u8"),
        ("xxh3", "<u8"),
    ]
)
NPY_MAGIC: Final = b"\x93NUMPY\x01\x00"


def new_index(geometry: Geometry) -> np.ndarray:
    """An index [experts_total] with layer, expert and bytes filled in, the rest zero."""
    index = np.zeros(geometry.experts_total, dtype=INDEX_DTYPE)
    start = 0
    for entry in geometry.layers:
        rows = index[start : start + entry.experts]
        rows["layer"] = entry.layer
        rows["expert"] = np.arange(entry.experts)
        rows["bytes"] = geometry.layouts[entry.layout].record_bytes
        start += entry.experts
    return index


def encode_index(index: np.ndarray) -> bytes:
    """The bytes of an `.npy` file (version 1.0) that any numpy can load; the same index gives the same bytes."""
    return _npy_header(len(index)) + np.ascontiguousarray(index).tobytes()


def _npy_header(rows: int) -> bytes:
    """Magic, version, length and description, padded with spaces and a line end to a multiple of 64 bytes."""
    text = f"{{'descr': {INDEX_DTYPE.descr!r}, 'fortran_order': False, 'shape': ({rows},), }}"
    length = round_up(len(NPY_MAGIC) + 2 + len(text) + 1, 64) - len(NPY_MAGIC) - 2
    return NPY_MAGIC + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"


def decode_index(data: bytes, geometry: Geometry, where: str) -> np.ndarray:
    """Reads an index of exactly this geometry: its header can have one form only, so nothing is interpreted.

    Raises:
        StoreDamaged: not an `.npy` file of this kind and length.
    """
    header = _npy_header(geometry.experts_total)
    if not data.startswith(header):
        raise StoreDamaged(f"{where}: not the header of an index of {geometry.experts_total} experts")
    body = memoryview(data)[len(header) :]
    if len(body) != geometry.experts_total * INDEX_DTYPE.itemsize:
        raise StoreDamaged(f"{where}: {len(body)} bytes of rows for {geometry.experts_total} experts")
    return np.frombuffer(body, dtype=INDEX_DTYPE)


def check_index(index: np.ndarray, geometry: Geometry, shards: Sequence[Shard], where: str) -> None:
    """Checks each row against geometry and shards: order, sizes, alignment, bounds, overlap, no unused bytes.

    Raises:
        StoreDamaged: naming the first expert that is wrong.
    """
    expected = new_index(geometry)
    if index.shape != expected.shape:
        raise StoreDamaged(f"{where}: {index.shape[0]} rows for {geometry.experts_total} experts")
    for field in ("layer", "expert", "bytes"):
        _refuse(index, index[field] != expected[field], f"{where}: wrong {field}")
    _refuse(index, index["shard"] >= len(shards), f"{where}: unknown shard")
    file_bytes = np.array([shard.bytes for shard in shards], dtype=np.uint64)
    header_bytes = np.array([shard.header_bytes for shard in shards], dtype=np.uint64)
    ends, starts = file_bytes[index["shard"]], header_bytes[index["shard"]]
    offset, length = index["offset"], index["bytes"]
    _refuse(index, offset % np.uint64(RECORD_ALIGNMENT) != 0, f"{where}: offset is not a multiple of 4096")
    _refuse(index, offset < starts, f"{where}: record begins inside the shard's header")
    _refuse(
        index, (length > ends) | (offset > ends - np.minimum(length, ends)), f"{where}: record ends after its shard"
    )
    order = np.lexsort((offset, index["shard"]))
    same_shard = np.diff(index["shard"][order].astype(np.int64)) == 0
    overlap = np.zeros(len(index), dtype=bool)
    overlap[order[1:]] = same_shard & (offset[order][1:] < (offset + length)[order][:-1])
    _refuse(index, overlap, f"{where}: record overlaps another one")
    used = np.zeros(len(shards), dtype=np.uint64)
    np.add.at(used, index["shard"], length)
    for shard, count in zip(shards, used.tolist(), strict=True):
        if count != shard.bytes - shard.header_bytes:
            raise StoreDamaged(
                f"{where}: records cover {count} bytes of {shard.file}, it holds {shard.bytes - shard.header_bytes}"
            )


def _refuse(index: np.ndarray, wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        row = index[int(np.argmax(wrong))]
        raise StoreDamaged(f"{what} (layer {row['layer']}, expert {row['expert']}, offset {row['offset']})")
