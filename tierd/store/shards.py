"""Reading and writing the headers of safetensors files, with every field checked.

The format: 8 bytes little-endian length, a JSON object of that length (tensor name to dtype, shape and
data_offsets, which count from the end of the header), then the data without holes
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

from tierd.errors import DriveError, StoreDamaged, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["DTYPE_BITS", "ShardHeader", "TensorEntry", "encode_header", "parse_header", "read_header"]

MAX_HEADER_BYTES: Final = 100_000_000
LENGTH_BYTES: Final = 8

DTYPE_BITS: Final = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element by safetensors dtype name."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a shard; `begin` and `end` are bytes from the start of the *file*."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The checked header of one safetensors file.

    Attributes:
        tensors: by name, in rising order of position.
        header_bytes: length field, JSON and padding together: where the data begins.
        file_bytes: length of the whole file.
        raw: the bytes of length field and JSON.
    """

    tensors: dict[str, TensorEntry]
    header_bytes: int
    file_bytes: int
    raw: bytes


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor of a known dtype; sub-byte types are rounded up."""
    return -(-prod(shape) * DTYPE_BITS[dtype] // 8)


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], *, alignment: int) -> ShardHeader:
    """The header for tensors (name, dtype, shape) stored in this order without holes.

    The JSON is padded with spaces, which the format allows, so that the data begins at a multiple of `alignment`.
    """
    table: dict[str, dict[str, Any]] = {}
    position = 0
    for name, dtype, shape in tensors:
        if name in table:
            raise UsageError(f"tensor {name} would be written twice into one shard")
        end = position + tensor_bytes(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    length = -(-(len(text) + LENGTH_BYTES) // alignment) * alignment - LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise UsageError(f"a shard header of {length} bytes is beyond the limit of {MAX_HEADER_BYTES}")
    raw = length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)
    base = len(raw)
    entries = {
        name: TensorEntry(
            name, row["dtype"], tuple(row["shape"]), base + row["data_offsets"][0], base + row["data_offsets"][1]
        )
        for name, row in table.items()
    }
    return ShardHeader(entries, base, base + position, raw)


def read_header(path: Path) -> ShardHeader:
    """Reads and checks the header of a file.

    Raises:
        StoreDamaged: any field does not fit the others or the file's length; the file is named.
        DriveError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            field = file.read(LENGTH_BYTES)
            length = int.from_bytes(field, "little") if len(field) == LENGTH_BYTES else 0
            _check_length(length, size, str(path))
            raw = field + file.read(length)
    except FileNotFoundError:
        raise StoreDamaged(f"{path} is missing") from None
    except OSError as error:
        raise DriveError(
            f"{path}: reading the header failed: {error.strerror}", path=str(path), errno=error.errno or 0
        ) from error
    return parse_header(raw, size, str(path))


def _check_length(length: int, size: int, where: str) -> None:
    if size < LENGTH_BYTES or length < 2:
        raise StoreDamaged(f"{where}: no safetensors header (file of {size} bytes, header length {length})")
    if length > MAX_HEADER_BYTES:
        raise StoreDamaged(f"{where}: header length {length} is beyond the limit of {MAX_HEADER_BYTES} bytes")
    if length > size - LENGTH_BYTES:
        raise StoreDamaged(
            f"{where}: the header needs {length + LENGTH_BYTES} bytes, the file has {size}",
            hint="This looks like an incomplete download or copy.",
        )


def parse_header(raw: bytes, file_bytes: int, where: str) -> ShardHeader:
    """Checks the bytes of length field and JSON against each other and against the length of the file.

    Args:
        raw: length field and JSON.
        file_bytes: length of the whole file.
        where: name of the file, for messages.

    Raises:
        StoreDamaged: anything does not fit.
    """
    _check_length(int.from_bytes(raw[:LENGTH_BYTES], "little"), file_bytes, where)
    try:
        table = json.loads(raw[LENGTH_BYTES:], object_pairs_hook=lambda pairs: _no_duplicates(pairs, where))
    except (ValueError, RecursionError) as error:
        raise StoreDamaged(f"{where}: the header is not JSON: {str(error)[:200]}") from None
    if not isinstance(table, dict):
        raise StoreDamaged(f"{where}: the header is not a JSON object")
    base = len(raw)
    entries = [_entry(name, row, base, where) for name, row in table.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    position = base
    for entry in entries:
        if entry.begin < position:
            raise StoreDamaged(f"{where}: tensor {entry.name} overlaps the tensor before it")
        if entry.begin > position:
            raise StoreDamaged(f"{where}: {entry.begin - position} unused bytes before tensor {entry.name}")
        position = entry.end
    if position > file_bytes:
        raise StoreDamaged(
            f"{where}: {position - file_bytes} bytes are missing at the end "
            f"(the header describes {position} bytes, the file has {file_bytes})",
            hint="This looks like an incomplete download or copy.",
        )
    if position < file_bytes:
        raise StoreDamaged(f"{where}: {file_bytes - position} bytes after the last tensor belong to nothing")
    return ShardHeader({entry.name: entry for entry in entries}, base, file_bytes, raw)


def _no_duplicates(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise StoreDamaged(f"{where}: the header names {twice[:200]!r} twice")
    return table


def _entry(name: str, row: Mapping[str, Any] | Any, base: int, where: str) -> TensorEntry:
    label = f"{where}: tensor {name[:200]!r}"
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise StoreDamaged(f"{label}: the entry needs dtype, shape and data_offsets")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise StoreDamaged(f"{label}: unknown dtype {str(dtype)[:40]!r}")
    if not _sizes(shape) or len(shape) > 16:
        raise StoreDamaged(f"{label}: the shape is not a short list of sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise StoreDamaged(f"{label}: data_offsets are not two rising offsets")
    if tensor_bytes(dtype, shape) != offsets[1] - offsets[0]:
        raise StoreDamaged(
            f"{label}: {dtype} {shape} needs {tensor_bytes(dtype, shape)} bytes, "
            f"its offsets span {offsets[1] - offsets[0]}"
        )
    return TensorEntry(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
