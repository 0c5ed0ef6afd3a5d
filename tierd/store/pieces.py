"""The records and tensors of a shard, and whether a copy of the shard holds their bytes.

The same check serves the store itself and any directory with copies of its files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tierd.errors import DriveError, StoreDamaged
from tierd.store.checksums import RunningChecksum
from tierd.store.manifest import Shard
from tierd.store.reading import aligned_buffer, read_into
from tierd.store.store import ExpertStore, check_shard

__all__ = ["MISMATCH", "WINDOW_BYTES", "Piece", "Problem", "check_pieces", "piece_checksum", "shard_pieces"]

MISMATCH: Final = "the checksum does not match"
"""The reason of a problem whose bytes could be read, but are wrong."""

WINDOW_BYTES: Final = 16 << 20
"""Bytes of a piece that are in memory at once: a dense tensor may be larger than that is wise."""


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


@dataclass(frozen=True, slots=True)
class Piece:
    """A record (with layer and expert) or a dense tensor (with its name): its place in the shard and its checksum."""

    offset: int
    nbytes: int
    xxh3: int
    layer: int | None = None
    expert: int | None = None
    tensor: str | None = None

    def problem(self, file: str, reason: str) -> Problem:
        """What to say if this piece of `file` is not right."""
        return Problem(file, reason, self.layer, self.expert, self.tensor, self.offset, self.nbytes)


def shard_pieces(store: ExpertStore, shard: Shard) -> list[Piece]:
    """The pieces of a shard of the store, in the order in which they lie there, without gaps."""
    manifest = store.manifest
    if shard in manifest.shards:
        rows = store.index[store.index["shard"] == manifest.shards.index(shard)]
        rows.sort(order="offset")
        return [
            Piece(offset, nbytes, checksum, layer=layer, expert=expert)
            for layer, expert, _, offset, nbytes, checksum in rows.tolist()
        ]
    number = manifest.dense_shards.index(shard)
    tensors = [info for info in manifest.dense if info.shard == number]
    return sorted(
        (Piece(info.offset, info.nbytes, int(info.xxh3, 16), tensor=info.name) for info in tensors),
        key=lambda piece: (piece.offset, piece.nbytes),
    )


def check_pieces(path: Path, shard: Shard, pieces: list[Piece]) -> Iterator[tuple[Piece | None, Problem | None]]:
    """Reads a copy of a shard from its drive, piece by piece.

    Yields:
        For the file as a whole (None) if its length or header is wrong, then for each piece: what is wrong with it,
        None if nothing is. A file that cannot be opened yields one problem only.
    """
    try:
        check_shard(path, shard)
    except StoreDamaged as error:
        yield None, Problem(shard.file, error.message)
    except OSError as error:
        yield None, Problem(shard.file, f"{path} cannot be read: {error.strerror}")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        # What the drive holds is wanted, not what the page cache remembers.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = aligned_buffer(min(WINDOW_BYTES, max((piece.nbytes for piece in pieces), default=0)))
        for piece in pieces:
            problem = None
            try:
                if piece_checksum(fd, piece, buffer, path) != piece.xxh3:
                    problem = piece.problem(shard.file, MISMATCH)
            except DriveError as error:
                problem = piece.problem(shard.file, error.message)
            yield piece, problem
    finally:
        os.close(fd)


def piece_checksum(fd: int, piece: Piece, buffer: np.ndarray, path: Path) -> int:
    """The xxh3-64 of what a file holds in place of a piece, read through `buffer` (uint8, any length above 0).

    Raises:
        DriveError: the read failed, or the file ends before that.
    """
    running = RunningChecksum()
    for start in range(0, piece.nbytes, len(buffer)):
        window = buffer[: min(len(buffer), piece.nbytes - start)]
        read_into(fd, window, piece.offset + start, path)
        running.update(window)
        # Nobody reads these pages again; they must not push others out.
        os.posix_fadvise(fd, piece.offset + start, len(window), os.POSIX_FADV_DONTNEED)
    return running.value()
