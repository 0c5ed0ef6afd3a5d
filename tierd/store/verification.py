"""Reading every byte of a store again: all problems are listed, none stops the reading."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tierd.errors import DriveError, StoreDamaged
from tierd.store.checksums import xxh3
from tierd.store.manifest import MANIFEST_FILE, DenseTensorInfo, Shard
from tierd.store.reading import aligned_buffer, read_into
from tierd.store.store import ExpertStore, check_shard

__all__ = ["Problem", "VerificationReport", "verify_store"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong; fields that do not apply are None.

    Attributes:
        file: name inside the store.
        reason: what is wrong, in words.
        layer: of the expert.
        expert: of the layer.
        tensor: dense tensor.
        offset: bytes from the start of the file.
        nbytes: of the record or tensor.
    """

    file: str
    reason: str
    layer: int | None = None
    expert: int | None = None
    tensor: str | None = None
    offset: int | None = None
    nbytes: int | None = None

    def __str__(self) -> str:
        what = f"tensor {self.tensor}: " if self.tensor else ""
        if self.expert is not None:
            what = f"layer {self.layer} expert {self.expert}: "
        where = "" if self.offset is None else f" (offset {self.offset}, {self.nbytes} bytes)"
        return f"{self.file}: {what}{self.reason}{where}"


@dataclass(slots=True)
class VerificationReport:
    """What was read and what is wrong with it."""

    store: str
    fingerprint: str = ""
    records: int = 0
    tensors: int = 0
    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems

    def to_table(self) -> dict[str, Any]:
        """The report for machines."""
        return {"ok": self.ok, **asdict(self)}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A record or tensor that is to be read: its place, its checksum, and the problem it would be."""

    offset: int
    nbytes: int
    xxh3: int
    label: dict[str, Any]


def verify_store(path: Path | str, progress: Callable[[int, int, str], None] | None = None) -> VerificationReport:
    """Reads all records, dense tensors and small files of a store and compares their checksums.

    Args:
        path: the store.
        progress: called with bytes read, bytes in all and the current file.

    Raises:
        UsageError: the path is no store.
    """
    root = Path(path)
    report = VerificationReport(str(root))
    try:
        store = ExpertStore.load(root)
    except StoreDamaged as error:
        report.problems.append(Problem(MANIFEST_FILE, error.message))
        return report
    report.fingerprint = store.fingerprint
    manifest = store.manifest
    total = sum(shard.bytes for shard in (*manifest.shards, *manifest.dense_shards))
    done = 0
    for number, shard in enumerate((*manifest.shards, *manifest.dense_shards)):
        if number < len(manifest.shards):
            pieces = _records(store, number)
        else:
            pieces = [_tensor(info) for info in manifest.dense if info.shard == number - len(manifest.shards)]
        for nbytes in _verify_shard(store.path, shard, pieces, report):
            done += nbytes
            if progress is not None:
                progress(done, total, shard.file)
    for name in store.text_files:
        try:
            report.bytes_read += len(store.read_file(name))
        except (StoreDamaged, DriveError) as error:
            report.problems.append(Problem(name, error.message))
    return report


def _records(store: ExpertStore, shard: int) -> list[_Piece]:
    rows = store.index[store.index["shard"] == shard]
    rows.sort(order="offset")
    return [
        _Piece(offset, nbytes, checksum, {"layer": layer, "expert": expert})
        for layer, expert, _, offset, nbytes, checksum in rows.tolist()
    ]


def _tensor(info: DenseTensorInfo) -> _Piece:
    return _Piece(info.offset, info.nbytes, int(info.xxh3, 16), {"tensor": info.name})


def _verify_shard(root: Path, shard: Shard, pieces: list[_Piece], report: VerificationReport) -> Iterator[int]:
    """Checks one shard; yields the bytes of each piece as it is done."""
    path = root / shard.file
    try:
        check_shard(path, shard)
    except StoreDamaged as error:
        report.problems.append(Problem(shard.file, error.message))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield shard.bytes
        return
    try:
        # What the drive holds is wanted, not what the page cache remembers.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = aligned_buffer(max((piece.nbytes for piece in pieces), default=0))
        for piece in pieces:
            data = buffer[: piece.nbytes]
            label = {**piece.label, "offset": piece.offset, "nbytes": piece.nbytes}
            try:
                read_into(fd, data, piece.offset, path)
            except DriveError as error:
                report.problems.append(Problem(shard.file, error.message, **label))
            else:
                if xxh3(data) != piece.xxh3:
                    report.problems.append(Problem(shard.file, "the checksum does not match", **label))
                report.bytes_read += piece.nbytes
            report.records += "expert" in label
            report.tensors += "tensor" in label
            yield piece.nbytes
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
