"""One shard file, read directly where its filesystem says yes, else through the page cache.

Whether direct reads work is found by opening and reading: filesystems refuse at open (EINVAL), or only at the first
transfer, and no list of platforms knows which.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from typing import TYPE_CHECKING, Final

import structlog

from tierd.devices.transfers import Transfer, system_transfer
from tierd.errors import DriveError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BLOCK_BYTES", "ShardFile"]

BLOCK_BYTES: Final = 4096
"""Offsets and lengths of direct reads are multiples of this."""
_REFUSALS: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})

_log = structlog.get_logger(__name__)


class ShardFile:
    """An open shard. Its reads may run in several threads at once.

    Descriptors stay open until `close`, so a file that is renamed or deleted meanwhile is still served in full.

    Args:
        drive: name of the drive, for the log.
        path: of the file.
        direct: whether to try direct reads.

    Attributes:
        path: of the file.
        direct: whether reads bypass the page cache; falls to False for good when the filesystem refuses one.

    Raises:
        DriveError: the file cannot be opened.
    """

    def __init__(self, drive: str, path: Path, *, direct: bool) -> None:
        self.path = path
        self._drive = drive
        self._lock = threading.Lock()
        self._buffered_fd = -1
        self._direct_fd = self._open_direct() if direct else -1
        self.direct = self._direct_fd >= 0
        if not self.direct:
            self._buffered()

    def read(self, offset: int, into: memoryview, transfer: Transfer = system_transfer) -> None:
        """Fill `into` from `offset` on, by means of `transfer`.

        Raises:
            DriveError: the read failed or the file ends before that; with path, offset, length and errno.
        """
        try:
            if self.direct:
                try:
                    self._fill(transfer, self._direct_fd, offset, into, BLOCK_BYTES)
                except OSError as error:
                    if error.errno not in _REFUSALS:
                        raise
                    self._fall_back(error)
                else:
                    return
            fd = self._buffered()
            self._fill(transfer, fd, offset, into, 1)
            # What is resident lies in the arena; a second copy in the page cache would take memory from it.
            os.posix_fadvise(fd, offset, into.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._error(
                f"cannot read {self.path} at offset {offset}, length {into.nbytes}: {error.strerror or error}",
                offset,
                into.nbytes,
                error.errno or errno.EIO,
                "If only this file fails, its drive is failing; if all do, look at the mount.",
            ) from error

    def close(self) -> None:
        """Close the descriptors. No read may be running."""
        for fd in (self._direct_fd, self._buffered_fd):
            if fd >= 0:
                os.close(fd)
        self._direct_fd = self._buffered_fd = -1
        self.direct = False

    def _fill(self, transfer: Transfer, fd: int, offset: int, into: memoryview, block: int) -> None:
        have = 0
        while have < into.nbytes:
            # A short direct read may end anywhere; go on from the last block border, which keeps all aligned.
            start = have - have % block
            count = transfer(fd, [into[start:]], offset + start)
            if start + count <= have:
                raise self._short(fd, offset, into.nbytes, have)
            have = start + count

    def _short(self, fd: int, offset: int, length: int, have: int) -> DriveError:
        missing = min(offset + length - os.fstat(fd).st_size, length)
        if missing > 0:
            return self._error(
                f"{self.path} ends early: {missing} of {length} bytes at offset {offset} are missing",
                offset,
                length,
                0,
                "The file was cut; copy or convert it again.",
            )
        return self._error(
            f"{self.path} gave only {have} of {length} bytes at offset {offset}, before its end",
            offset,
            length,
            0,
            "The drive or its filesystem is failing; look at the kernel's log.",
        )

    def _open_direct(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _REFUSALS:
                return -1
            raise self._cannot_open(error) from error
        # Anonymous memory begins on a page border.
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            try:
                os.preadv(fd, [block], 0)
            except OSError as error:
                if error.errno in _REFUSALS:
                    os.close(fd)
                    return -1
                # A failing drive is no reason to give up direct reads: the reads that need it will report it.
                _log.warning("drive fails at its first read", drive=self._drive, path=str(self.path), error=str(error))
        return fd

    def _buffered(self) -> int:
        with self._lock:
            if self._buffered_fd < 0:
                try:
                    # By the open descriptor where there is one: the path may lead to another file by now.
                    path = f"/proc/self/fd/{self._direct_fd}" if self._direct_fd >= 0 else self.path
                    self._buffered_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise self._cannot_open(error) from error
                # Records are read in no order: reading ahead would fetch what nobody asked for.
                os.posix_fadvise(self._buffered_fd, 0, 0, os.POSIX_FADV_RANDOM)
            return self._buffered_fd

    def _fall_back(self, error: OSError) -> None:
        with self._lock:
            if self.direct:
                self.direct = False
                _log.warning(
                    "direct read refused, reading through the page cache",
                    drive=self._drive,
                    path=str(self.path),
                    error=error.strerror,
                )

    def _cannot_open(self, error: OSError) -> DriveError:
        return self._error(
            f"cannot open {self.path}: {error.strerror or error}",
            0,
            0,
            error.errno or errno.EIO,
            "Check that the drive is mounted and the file readable.",
        )

    def _error(self, message: str, offset: int, length: int, number: int, hint: str) -> DriveError:
        return DriveError(message, path=str(self.path), offset=offset, length=length, errno=number, hint=hint)
