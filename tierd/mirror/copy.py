"""Copying one shard: under a temporary name, checked against the index on the way, flushed, then renamed.

While one window is checked and written, a thread reads the next. Neither side stays in the page cache, and memory is
bounded by two windows. A temporary file that an interrupted run left is checked and continued.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from tierd.errors import ChecksumMismatch, DriveError, StoreDamaged
from tierd.store.checksums import RunningChecksum, sha256
from tierd.store.manifest import Shard
from tierd.store.pieces import WINDOW_BYTES, Piece, piece_checksum
from tierd.store.reading import aligned_buffer, read_into
from tierd.store.writing import PARTIAL_SUFFIX, sync_directory

__all__ = ["copy_shard", "write_failed"]

_FLUSH_BYTES: Final = 64 << 20
"""Written bytes after which the file is flushed and dropped from the page cache."""


def copy_shard(source: Path, target: Path, shard: Shard, pieces: list[Piece], moved: Callable[[int], None]) -> None:
    """Copies a shard; on return it is whole, checked, durable and visible.

    Args:
        source: a copy that should be good; links are followed, the file itself is copied.
        target: final name; whatever is there is replaced when the new file is complete.
        shard: what the file should be.
        pieces: all of its pieces, in order.
        moved: called with bytes as they are written or found written; may sleep or raise.

    Raises:
        ChecksumMismatch: the source is wrong; says where.
        StoreDamaged: the source is missing, short or another file.
        DriveError: reading or writing failed.
    """
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    try:
        reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreDamaged(
            f"{source} cannot be read: {error.strerror}", hint="Restore the file from another copy."
        ) from error
    try:
        header = _header(reading, source, shard)
        try:
            # A link here would lead the writing somewhere else, even to the source.
            writing = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise write_failed(partial, error) from error
        try:
            done = _good_start(writing, partial, header, pieces)
            first = next((n for n, piece in enumerate(pieces) if piece.offset >= done), len(pieces))
            os.ftruncate(writing, done)
            if done == 0:
                _write(writing, memoryview(header), 0)
            moved(max(done, len(header)))
            _copy(reading, source, writing, pieces[first:], moved)
            os.fsync(writing)
            os.posix_fadvise(writing, 0, 0, os.POSIX_FADV_DONTNEED)
            partial.replace(target)
            sync_directory(target.parent)
        except OSError as error:
            raise write_failed(partial, error) from error
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def write_failed(path: Path, error: OSError) -> DriveError:
    """The error for a mirror's file that cannot be written."""
    return DriveError(
        f"{path}: writing failed: {error.strerror or error}",
        path=str(path),
        errno=error.errno or 0,
        hint="Free space or repair the drive, then run the same command again: it goes on where it stopped.",
    )


def _header(fd: int, path: Path, shard: Shard) -> bytes:
    size = os.fstat(fd).st_size
    if size != shard.bytes:
        raise StoreDamaged(
            f"{path} has {size} bytes instead of {shard.bytes}", hint="Restore the file from another copy."
        )
    header = np.empty(shard.header_bytes, dtype=np.uint8)
    read_into(fd, header, 0, path)
    if sha256(header.data) != shard.header_sha256:
        raise StoreDamaged(f"{path}: the header is not the one that was written with the store")
    return header.tobytes()


def _good_start(fd: int, path: Path, header: bytes, pieces: list[Piece]) -> int:
    """Bytes of an interrupted copy that are right: the header and whole pieces."""
    size = os.fstat(fd).st_size
    if size < len(header):
        return 0
    have = np.empty(len(header), dtype=np.uint8)
    read_into(fd, have, 0, path)
    if have.tobytes() != header:
        return 0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    buffer = aligned_buffer(WINDOW_BYTES)
    done = len(header)
    for piece in pieces:
        if piece.offset + piece.nbytes > size or piece_checksum(fd, piece, buffer, path) != piece.xxh3:
            break
        done = piece.offset + piece.nbytes
    return done


def _windows(pieces: list[Piece]) -> Iterator[tuple[Piece, int, int]]:
    """Each piece in windows: (piece, offset in the file, length)."""
    for piece in pieces:
        for start in range(0, piece.nbytes, WINDOW_BYTES):
            yield piece, piece.offset + start, min(WINDOW_BYTES, piece.nbytes - start)


def _copy(reading: int, source: Path, writing: int, pieces: list[Piece], moved: Callable[[int], None]) -> None:
    largest = min(WINDOW_BYTES, max((piece.nbytes for piece in pieces), default=0))
    buffers = [aligned_buffer(largest), aligned_buffer(largest)]
    running = RunningChecksum()
    flushed = unflushed = 0
    with ThreadPoolExecutor(1) as reader:
        windows = list(_windows(pieces))
        ahead = reader.submit(_read, reading, buffers[0], windows[0], source) if windows else None
        for number, (piece, offset, nbytes) in enumerate(windows):
            assert ahead is not None
            data = ahead.result()
            if number + 1 < len(windows):
                ahead = reader.submit(_read, reading, buffers[(number + 1) % 2], windows[number + 1], source)
            running.update(data)
            if offset + nbytes == piece.offset + piece.nbytes:
                if running.value() != piece.xxh3:
                    raise _mismatch(source, piece)
                running = RunningChecksum()
            _write(writing, data.data, offset)
            unflushed += nbytes
            if unflushed >= _FLUSH_BYTES:
                os.fdatasync(writing)
                os.posix_fadvise(writing, flushed, offset + nbytes - flushed, os.POSIX_FADV_DONTNEED)
                flushed, unflushed = offset + nbytes, 0
            moved(nbytes)


def _read(fd: int, buffer: np.ndarray, window: tuple[Piece, int, int], path: Path) -> np.ndarray:
    _, offset, nbytes = window
    data = buffer[:nbytes]
    read_into(fd, data, offset, path)
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
    return data


def _write(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view = view[count:]
        offset += count


def _mismatch(path: Path, piece: Piece) -> ChecksumMismatch:
    problem = piece.problem(str(path), "the checksum does not match, so it is not copied")
    return ChecksumMismatch(
        str(problem),
        path=str(path),
        offset=piece.offset,
        length=piece.nbytes,
        hint="Restore the file from another copy, or convert the checkpoint again.",
    )
