"""Writing the files of a store: temporary name, fsync, rename; the manifest comes last and makes it a store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from tierd.errors import DriveError, UsageError
from tierd.store.checksums import sha256
from tierd.store.index import encode_index
from tierd.store.manifest import (
    INDEX_FILE,
    MANIFEST_FILE,
    DenseTensorInfo,
    Interface,
    Manifest,
    Shard,
    StoredFile,
    compute_fingerprint,
    version_needed,
)
from tierd.store.records import RECORD_ALIGNMENT
from tierd.store.shards import ShardHeader, encode_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    import numpy as np

    from tierd.store.formats import DenseFormat, ExpertFormat
    from tierd.store.geometry import Geometry

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "PARTIAL_SUFFIX",
    "ExpertShardPlan",
    "ShardWriter",
    "expert_tensor_name",
    "plan_expert_shards",
    "seal_store",
    "sync_directory",
    "write_atomic",
]

DEFAULT_SHARD_BYTES: Final = 4 << 30
PARTIAL_SUFFIX: Final = ".partial"
FLUSH_BYTES: Final = 256 << 20
"""Written bytes after which the file is flushed, so that dirty pages stay bounded."""


def expert_tensor_name(layer: int, expert: int) -> str:
    """The name of an expert's record inside its shard."""
    return f"layers.{layer}.experts.{expert}"


@dataclass(frozen=True, slots=True)
class ExpertShardPlan:
    """One expert shard before it is written: its name, its header and the flat numbers of its experts."""

    file: str
    header: ShardHeader
    flats: range

    @property
    def shard(self) -> Shard:
        """Its entry in the manifest."""
        return shard_entry(self.file, self.header)


def shard_entry(file: str, header: ShardHeader) -> Shard:
    """The manifest's entry for a shard with this header."""
    return Shard(
        file=file,
        bytes=header.file_bytes,
        header_bytes=header.header_bytes,
        header_sha256=sha256(header.raw),
    )


def plan_expert_shards(geometry: Geometry, shard_bytes: int = DEFAULT_SHARD_BYTES) -> list[ExpertShardPlan]:
    """Cuts all experts, in flat order, into shards of at most `shard_bytes` of records (at least one each)."""
    if shard_bytes < RECORD_ALIGNMENT:
        raise UsageError(f"a shard size of {shard_bytes} bytes is below {RECORD_ALIGNMENT}")
    names: list[tuple[str, int]] = []
    for entry in geometry.layers:
        size = geometry.layouts[entry.layout].record_bytes
        names += [(expert_tensor_name(entry.layer, expert), size) for expert in range(entry.experts)]
    plans: list[ExpertShardPlan] = []
    start = 0
    while start < len(names):
        end, held = start + 1, names[start][1]
        while end < len(names) and held + names[end][1] <= shard_bytes:
            held += names[end][1]
            end += 1
        header = encode_header(((name, "U8", (size,)) for name, size in names[start:end]), alignment=RECORD_ALIGNMENT)
        plans.append(ExpertShardPlan(f"experts-{len(plans) + 1:05d}.safetensors", header, range(start, end)))
        start = end
    return plans


class ShardWriter:
    """Writes one shard under a temporary name; `commit` makes it visible, leaving without it removes it.

    Args:
        path: the final name.
        header: the planned header; exactly `header.file_bytes` bytes must be written in all.
    """

    def __init__(self, path: Path, header: ShardHeader) -> None:
        self.path = path
        self.partial = path.with_name(path.name + PARTIAL_SUFFIX)
        self._header = header
        self._written = 0
        self._flushed = 0
        self._fd = -1

    def __enter__(self) -> Self:
        try:
            self._fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _failed(self.partial, error) from error
        self.write(self._header.raw)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.partial.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview | np.ndarray) -> None:
        """Appends bytes; DriveError when the drive is full or fails."""
        view = memoryview(data if isinstance(data, bytes | memoryview) else data.data).cast("B")
        try:
            while view:
                count = os.write(self._fd, view)
                view = view[count:]
                self._written += count
            if self._written - self._flushed >= FLUSH_BYTES:
                os.fdatasync(self._fd)
                self._flushed = self._written
        except OSError as error:
            raise _failed(self.partial, error) from error

    @property
    def written(self) -> int:
        """Bytes so far, header included."""
        return self._written

    def skip_to_end(self) -> None:
        """Leaves all that was not written as a hole: zeros that take no space."""
        os.ftruncate(self._fd, self._header.file_bytes)
        self._written = self._header.file_bytes

    def commit(self, verify: Callable[[int, Path], None] | None = None) -> None:
        """Flushes to the drive, lets `verify(fd, path)` read the file back from it, and renames.

        Raises:
            UsageError: fewer or more bytes were written than the header describes.
            DriveError: the drive is full or fails.
        """
        if self._written != self._header.file_bytes:
            raise UsageError(
                f"{self.path}: {self._written} bytes written where the header describes {self._header.file_bytes}"
            )
        try:
            os.fsync(self._fd)
            # What is read back below shall come from the drive, not from the page cache.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if verify is not None:
                verify(self._fd, self.partial)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self.partial.replace(self.path)
        except OSError as error:
            raise _failed(self.partial, error) from error
        os.close(self._fd)
        self._fd = -1
        sync_directory(self.path.parent)


def sync_directory(path: Path) -> None:
    """Makes renames inside a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces a small file as a whole: a reader sees the old bytes or the new ones; DriveError on failure."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise _failed(path, error) from error


def seal_store(
    path: Path,
    *,
    family: str,
    model_type: str,
    expert_format: ExpertFormat,
    dense_format: DenseFormat,
    geometry: Geometry,
    shards: Sequence[Shard],
    index: np.ndarray,
    dense_shards: Sequence[Shard] = (),
    dense: Sequence[DenseTensorInfo] = (),
    files: Sequence[StoredFile] = (),
    interface: Interface | None = None,
) -> Manifest:
    """Writes the index and then `store.json`, after which the directory is a store."""
    data = encode_index(index)
    write_atomic(path / INDEX_FILE, data)
    unsigned = Manifest(
        format_version=version_needed(geometry, dense, interface),
        family=family,
        model_type=model_type,
        expert_format=expert_format,
        dense_format=dense_format,
        geometry=geometry,
        shards=tuple(shards),
        dense_shards=tuple(dense_shards),
        dense=tuple(dense),
        index=StoredFile(name=INDEX_FILE, bytes=len(data), sha256=sha256(data)),
        files=tuple(files),
        interface=interface,
        fingerprint="0" * 64,
    )
    manifest = unsigned.model_copy(update={"fingerprint": compute_fingerprint(unsigned)})
    write_atomic(path / MANIFEST_FILE, manifest.to_json().encode())
    return manifest


def _failed(path: Path, error: OSError) -> DriveError:
    return DriveError(
        f"{path}: writing failed: {error.strerror}",
        path=str(path),
        errno=error.errno or 0,
        hint="Free space or repair the drive, then run the same command again: it goes on where it stopped.",
    )
