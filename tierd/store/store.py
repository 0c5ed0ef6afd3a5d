"""An open expert store: everything a daemon or a node needs to know about the files, checked at once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tierd.errors import ChecksumMismatch, LimitExceeded, StoreDamaged, UsageError
from tierd.store.checksums import sha256, xxh3
from tierd.store.dense import check_dense
from tierd.store.index import check_index, decode_index
from tierd.store.manifest import MANIFEST_FILE, MAX_TEXT_BYTES, DenseTensorInfo, Manifest, Shard, read_manifest
from tierd.store.reading import read_exact, read_small_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierd.store.geometry import Geometry
    from tierd.store.records import RecordLayout

__all__ = ["DenseTensor", "ExpertStore", "RecordLocation", "check_shard"]

_DENSE_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "f32": np.dtype("<f4"),
    "bf16": np.dtype("<u2"),
    "i8": np.dtype("i1"),
    "fp8": np.dtype("u1"),
    "i64": np.dtype("<i8"),
    "i32": np.dtype("<i4"),
    "u8": np.dtype("u1"),
}


@dataclass(frozen=True, slots=True)
class RecordLocation:
    """Where the record of one expert lies on the primary, and its checksum.

    `offset` and `nbytes` are multiples of 4096; a mirror keeps the same file names, so `path.name` finds a copy.
    """

    path: Path
    offset: int
    nbytes: int
    xxh3: int
    layer: int
    expert: int
    shard: int


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A dense tensor in memory, 64-byte aligned.

    Attributes:
        data: float32, uint16 (the bits of bf16), int8 or uint8 (the bits of e4m3), in the checkpoint's shape; tables
            of whole numbers as they are.
        dtype: "f32", "bf16", "i8" or "fp8"; "i64", "i32" or "u8" for tables of whole numbers.
        scales: float32, else None: [rows] for "i8", weight = code * scale of its row; one per 128 x 128 for "fp8".
    """

    data: np.ndarray
    dtype: str
    scales: np.ndarray | None


class ExpertStore:
    """A store whose manifest, index, file sizes and shard headers have been checked; nothing in it is written.

    Attributes:
        path: the directory.
        manifest: the content of store.json.
        index: [experts_total] rows of `INDEX_DTYPE` in flat order, read-only.
    """

    def __init__(self, path: Path, manifest: Manifest, index: np.ndarray) -> None:
        self.path = path
        self.manifest = manifest
        self.index = index
        self._paths = [path / shard.file for shard in manifest.shards]
        self._dense = {info.name: info for info in manifest.dense}
        self._scales = {info.scales for info in manifest.dense if info.scales is not None}
        self._files = {file.name: file for file in manifest.files}

    @classmethod
    def open(cls, path: Path | str, also: Sequence[Path] = ()) -> ExpertStore:
        """Opens a store and checks everything that can be checked without reading the weights.

        Args:
            path: the directory with the manifest.
            also: directories where expert shards lie that are not in `path`; the first one that has a shard counts.

        Raises:
            UsageError: the path is no store (or one of another format version).
            StoreDamaged: a file is missing, short, long or changed; the file is named.
        """
        store = cls.load(path)
        store.find_shards(also)
        for own, shard in zip(store.shard_paths, store.manifest.shards, strict=True):
            check_shard(own, shard)
        for shard in store.manifest.dense_shards:
            check_shard(store.path / shard.file, shard)
        for file in store.manifest.files:
            _check_size(store.path / file.name, file.bytes)
        return store

    @classmethod
    def load(cls, path: Path | str) -> ExpertStore:
        """Reads manifest and index and checks them against each other, but looks at no other file.

        Raises:
            UsageError: the path is no store (or one of another format version).
            StoreDamaged: manifest or index is missing or changed.
        """
        root = Path(path)
        if not root.is_dir():
            raise UsageError(f"{root} is not a directory", hint="Give the directory of a converted store.")
        if not (root / MANIFEST_FILE).exists():
            raise UsageError(
                f"{root} is not a store: it has no {MANIFEST_FILE}",
                hint="Convert a checkpoint with `tierd convert SRC DST`; an interrupted conversion goes on "
                "when the same command is run again.",
            )
        manifest = read_manifest(root / MANIFEST_FILE)
        index_path = root / manifest.index.name
        data = read_small_file(index_path, manifest.index.bytes)
        if sha256(data) != manifest.index.sha256:
            raise StoreDamaged(
                f"{index_path}: the index is not the one that was written with the store",
                hint="Restore the file from another copy, or convert the checkpoint again.",
            )
        index = decode_index(data, manifest.geometry, str(index_path))
        check_index(index, manifest.geometry, manifest.shards, str(index_path))
        check_dense(manifest, str(root / MANIFEST_FILE))
        return cls(root, manifest, index)

    def __repr__(self) -> str:
        geometry = self.manifest.geometry
        return (
            f"<ExpertStore {self.path} {self.manifest.family or 'synthetic'} {self.manifest.expert_format} "
            f"{len(geometry.layers)} layers, {geometry.experts_total} experts, "
            f"{geometry.expert_bytes / 1e9:.3f} GB, {self.fingerprint[:12]}>"
        )

    @property
    def geometry(self) -> Geometry:
        """Layers, experts and record layouts."""
        return self.manifest.geometry

    @property
    def fingerprint(self) -> str:
        """64 hex digits over everything that decides a token."""
        return self.manifest.fingerprint

    def find_shards(self, also: Sequence[Path]) -> None:
        """Take expert shards that are not in the store's own directory from the first of these that has them."""
        for number, own in enumerate(self._paths):
            if not own.exists():
                elsewhere = (directory / own.name for directory in also)
                self._paths[number] = next((path for path in elsewhere if path.exists()), own)

    @property
    def shard_paths(self) -> list[Path]:
        """The expert shards, in the order that the index counts."""
        return list(self._paths)

    @property
    def text_files(self) -> list[str]:
        """Names that `read_file` accepts: config.json, tokenizer and chat template files."""
        return list(self._files)

    def layout(self, layer: int) -> RecordLayout:
        """The record layout of a layer; LimitExceeded if it has no routed experts."""
        return self.manifest.geometry.layout(layer)

    def location(self, layer: int, expert: int) -> RecordLocation:
        """Where an expert's record lies; LimitExceeded on an unknown layer or expert."""
        row = self.index[self.manifest.geometry.flat(layer, expert)]
        shard = int(row["shard"])
        return RecordLocation(
            self._paths[shard],
            int(row["offset"]),
            int(row["bytes"]),
            int(row["xxh3"]),
            int(row["layer"]),
            int(row["expert"]),
            shard,
        )

    def read_record(self, layer: int, expert: int) -> np.ndarray:
        """One record by a buffered read, checked: uint8 [record_bytes], page-aligned.

        Raises:
            DriveError: the read failed or the file ended early.
            ChecksumMismatch: the bytes are not those that were converted.
        """
        place = self.location(layer, expert)
        record = read_exact(place.path, place.offset, place.nbytes)
        if xxh3(record) != place.xxh3:
            raise ChecksumMismatch(
                f"{place.path}: checksum of layer {layer} expert {expert} does not match "
                f"(offset {place.offset}, {place.nbytes} bytes)",
                path=str(place.path),
                offset=place.offset,
                length=place.nbytes,
                hint="Restore the file from another copy, or convert the checkpoint again.",
            )
        return record

    def dense_names(self) -> list[str]:
        """Names of the dense tensors as in the checkpoint, without the row scales of int8 matrices."""
        return [name for name in self._dense if name not in self._scales]

    def dense_info(self, name: str) -> DenseTensorInfo:
        """Type, shape and place of a dense tensor; LimitExceeded if the store has none of that name."""
        info = self._dense.get(name)
        if info is None:
            raise LimitExceeded(f"{self.path}: the store has no dense tensor {name[:200]!r}")
        return info

    def read_dense(self, name: str) -> DenseTensor:
        """One dense tensor with its scales, checked.

        Raises:
            LimitExceeded: no tensor of that name.
            DriveError: the read failed or the file ended early.
            ChecksumMismatch: the bytes are not those that were converted.
        """
        info = self.dense_info(name)
        scales = None if info.scales is None else self._read_dense(self.dense_info(info.scales))
        return DenseTensor(self._read_dense(info), info.dtype, scales)

    def read_dense_bytes(self, name: str) -> memoryview:
        """The bytes of one dense tensor, or of row scales, as they lie in the shard; checked like `read_dense`."""
        return self._read_dense(self.dense_info(name)).reshape(-1).view(np.uint8).data

    def _read_dense(self, info: DenseTensorInfo) -> np.ndarray:
        path = self.path / self.manifest.dense_shards[info.shard].file
        data = read_exact(path, info.offset, info.nbytes)
        if xxh3(data) != int(info.xxh3, 16):
            raise ChecksumMismatch(
                f"{path}: checksum of tensor {info.name} does not match (offset {info.offset}, {info.nbytes} bytes)",
                path=str(path),
                offset=info.offset,
                length=info.nbytes,
                hint="Restore the file from another copy, or convert the checkpoint again.",
            )
        return data.view(_DENSE_DTYPES[info.dtype]).reshape(info.shape)

    def read_file(self, name: str) -> bytes:
        """The bytes of a text file of the store, checked.

        Only names that the manifest lists are opened, whatever the caller asks for.

        Raises:
            LimitExceeded: the store lists no such file.
            StoreDamaged: the file is missing or was changed.
        """
        file = self._files.get(name)
        if file is None:
            raise LimitExceeded(
                f"{self.path}: the store has no file {name[:200]!r}", hint=f"It has {', '.join(self._files)}."
            )
        data = read_small_file(self.path / file.name, min(file.bytes, MAX_TEXT_BYTES))
        if sha256(data) != file.sha256:
            raise StoreDamaged(f"{self.path / file.name}: the file was changed after conversion")
        return data


def _check_size(path: Path, expected: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise StoreDamaged(
            f"{path} cannot be read: {error.strerror}", hint="Restore the file from another copy."
        ) from None
    if size < expected:
        raise StoreDamaged(
            f"{path}: {expected - size} bytes are missing at the end ({size} of {expected})",
            hint="Restore the file from another copy; a copy may not have finished.",
        )
    if size > expected:
        raise StoreDamaged(f"{path}: {size - expected} bytes too many ({size} instead of {expected})")


def check_shard(path: Path, shard: Shard) -> None:
    """StoreDamaged unless a shard has its length and header; names the file and the missing bytes."""
    _check_size(path, shard.bytes)
    with path.open("rb", buffering=0) as file:
        header = os.pread(file.fileno(), shard.header_bytes, 0)
    if sha256(header) != shard.header_sha256:
        raise StoreDamaged(
            f"{path}: the header is not the one that was written with the store",
            hint="Restore the file from another copy, or convert the checkpoint again.",
        )
