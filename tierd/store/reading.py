"""Buffered reads of an exact range of a file, into aligned memory; errors name file, offset and length."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING, Final

import numpy as np

from tierd.errors import DriveError, StoreDamaged

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["aligned_buffer", "huge_page_buffer", "read_exact", "read_into", "read_small_file"]

_HUGE_PAGE: Final = 2 << 20


def aligned_buffer(nbytes: int, alignment: int = 4096) -> np.ndarray:
    """A new array of `nbytes` uint8 whose first byte lies on a border of `alignment` bytes; not zeroed."""
    raw = np.empty(nbytes + alignment, dtype=np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


def huge_page_buffer(nbytes: int) -> np.ndarray:
    """A new array of `nbytes` zeros, uint8, from a border of 2 MiB on and in memory already, not only reserved.

    It lies on huge pages where the host has them: a drive may deliver three times as much into those.
    """
    # Private: a shared mapping has huge pages only where the host is set up for that.
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % _HUGE_PAGE
    buffer = raw[start : start + nbytes]
    buffer[:: mmap.PAGESIZE] = 0
    return buffer


def read_into(fd: int, buffer: np.ndarray, offset: int, path: Path) -> None:
    """Fills the whole `buffer` (uint8) from `offset` of the open file; DriveError on a failed or short read."""
    view = buffer.data
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise _failed(path, offset, len(view), error) from error
        if count == 0:
            raise DriveError(
                f"{path}: the file ends {len(view) - done} bytes before the end of a read "
                f"of {len(view)} bytes at offset {offset}",
                path=str(path),
                offset=offset,
                length=len(view),
                hint="The file was cut short after it was written; restore it from another copy.",
            )
        done += count


def read_exact(path: Path, offset: int, length: int) -> np.ndarray:
    """`length` bytes of a file from `offset`, as a new page-aligned array; DriveError if they cannot be read."""
    buffer = aligned_buffer(length)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _failed(path, offset, length, error) from error
    try:
        read_into(fd, buffer, offset, path)
    finally:
        os.close(fd)
    return buffer


def read_small_file(path: Path, limit: int) -> bytes:
    """All bytes of a file that should be small; StoreDamaged if it is missing or longer than `limit` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise StoreDamaged(f"{path} is missing") from None
    except OSError as error:
        raise _failed(path, 0, limit, error) from error
    if len(data) > limit:
        raise StoreDamaged(f"{path} is longer than the {limit} bytes that such a file may have")
    return data


def _failed(path: Path, offset: int, length: int, error: OSError) -> DriveError:
    return DriveError(
        f"{path}: reading {length} bytes at offset {offset} failed: {error.strerror}",
        path=str(path),
        offset=offset,
        length=length,
        errno=error.errno or 0,
        hint="One file that fails points to the drive; all files failing points to the mount.",
    )
