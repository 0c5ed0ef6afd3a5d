"""The payload: shared memory that holds the experts' bytes, and the node's read-only mapping of it.

Pages of 2 MiB make direct reads into the payload about three times as fast. They come without any system setting from
`madvise(MADV_COLLAPSE)` (Linux 6.1), which needs a mapping that begins on a border of 2 MiB and at least one page to
start from: with one page of 4 KiB in each extent it costs 0.07 s of processor time per GiB, with all 512 of them, which
it must copy and free, ten times as much. Where the host gives none everything works on with small pages, and
`huge_page_bytes` says so.

The file is as long as the arena may ever become, and only its front is in use: addresses cost nothing. Memory goes
back to the host by punching holes, never by making the file shorter, which would kill readers by SIGBUS. A read of a
hole, even through a read-only mapping, gives it memory again: `allocated_bytes` shows that, and `punch` undoes it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections import deque
from pathlib import Path
from typing import Final, Self

import structlog

from tierd.errors import ArenaError, UsageError

__all__ = ["EXTENT_BYTES", "PayloadView", "SharedPayload"]

EXTENT_BYTES: Final = 2 << 20
"""The size of a huge page on x86-64, and the border at which the payload is mapped."""

_PAGE_BYTES: Final = 4096
_MAP_FIXED: Final = 0x10
_MADV_DONTDUMP: Final = 16
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_TMPFS_MAGIC: Final = 0x01021994
_FALLOC_FL_KEEP_SIZE: Final = 0x01
_FALLOC_FL_PUNCH_HOLE: Final = 0x02
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_log = structlog.get_logger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mlock.argtypes = _libc.munlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class SharedPayload:
    """The daemon's side. Made by `create`.

    Attributes:
        nbytes: size of the payload, a multiple of 2 MiB.
        used_bytes: how much of its front is in use, a multiple of 2 MiB; change it with `grow` and `shrink`.
        address: of its first byte in this process, a multiple of 2 MiB.
        huge_page_bytes: how much of it the host holds in huge pages; counted again when pre-faulting has ended.
        populated_bytes: how much of it is mapped to memory by now.
        locked_bytes: how much of it cannot be swapped out: all that is in use, where RLIMIT_MEMLOCK allows that, or 0.
    """

    def __init__(self, fd: int, nbytes: int, used_bytes: int, directory: Path | None = None) -> None:
        self.nbytes = nbytes
        self.used_bytes = used_bytes
        self.huge_page_bytes = 0
        self.populated_bytes = 0
        self.locked_bytes = 0
        self._fd = fd
        self._directory = directory
        self.address = _map_aligned(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        # Tens of gigabytes of weights have no place in a core dump.
        _libc.madvise(self.address, nbytes, _MADV_DONTDUMP)
        self._bytes = memoryview((ctypes.c_ubyte * nbytes).from_address(self.address)).cast("B")
        os.fchmod(fd, 0o400)
        self._reader_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._empty = deque(range(0, used_bytes, EXTENT_BYTES))
        self._small: list[int] = []
        self._lock = threading.Lock()
        """Held for one extent at a time, and while `used_bytes` changes: no extent is filled after it was punched."""
        self._stop = threading.Event()
        self._prefaulted = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def create(cls, nbytes: int, directory: Path | None = None, *, most_bytes: int = 0) -> Self:
        """Reserve and map shared memory.

        Args:
            nbytes: bytes to use; rounded up to a multiple of 2 MiB.
            directory: a directory on a tmpfs, where a nameless file is made that vanishes with its last user;
                None for a sealed memfd.
            most_bytes: how far it may grow later; addresses for that are set aside, no memory.

        Raises:
            UsageError: `nbytes` is below 1, or `directory` is not on a tmpfs or cannot be written.
            ArenaError: there is less memory than that; the message says how much is needed and how much there is. On
                a tmpfs all of it is reserved on return, which takes about 0.1 s per GiB.
        """
        if nbytes < 1:
            raise UsageError(f"an arena of {nbytes} bytes holds nothing", hint="Give --arena a positive size.")
        nbytes = _whole(nbytes)
        most_bytes = max(nbytes, _whole(most_bytes))
        if directory is not None:
            _require_tmpfs(directory)
        free = _available_bytes(directory)
        if nbytes > free:
            raise _too_little(nbytes, free, directory)
        fd = _open_memfd() if directory is None else _open_nameless(directory)
        try:
            os.ftruncate(fd, most_bytes)
            if directory is None:
                # Not F_SEAL_FUTURE_WRITE: it would also forbid punching holes, the way to give memory back.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            payload = cls(fd, most_bytes, nbytes, directory)
        except OSError as error:
            os.close(fd)
            raise ArenaError(f"the arena of {nbytes} bytes could not be made: {error.strerror}") from error
        if directory is not None:
            # Others share the tmpfs: reserve now, so that "too little" is an error here and not a failed read later.
            # A memfd has no limit but memory itself, which nobody can reserve; it is filled in the background.
            try:
                payload._fill()
            except OSError as error:
                payload.close()
                raise _too_little(nbytes, _available_bytes(directory), directory) from error
        return payload

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes `offset` to `offset + nbytes` of the payload itself; not to be used after `close`."""
        if not (offset >= 0 and nbytes >= 0 and offset + nbytes <= self.nbytes):
            raise ArenaError(f"bytes {offset} to {offset + nbytes} lie outside the arena of {self.nbytes} bytes")
        return self._bytes[offset : offset + nbytes]

    def reader_fd(self) -> int:
        """A read-only descriptor to hand to nodes; it belongs to the payload."""
        return self._reader_fd

    @property
    def allocated_bytes(self) -> int:
        """Memory that the file holds. More than is in use: readers touched holes, or nothing was punched yet."""
        return os.fstat(self._fd).st_blocks * 512

    def grow(self, used_bytes: int) -> None:
        """Use more of the payload; a tmpfs reserves it at once, which takes about 0.1 s per GiB.

        Raises:
            ArenaError: there is less memory than that, or it is beyond `nbytes`.
        """
        used_bytes, before = _whole(used_bytes), self.used_bytes
        if used_bytes > self.nbytes:
            raise ArenaError(f"the arena cannot grow to {used_bytes} bytes; it was made for {self.nbytes} at most")
        free = _available_bytes(self._directory)
        if used_bytes - before > free:
            raise _too_little(used_bytes - before, free, self._directory)
        if self._directory is not None:
            try:
                os.posix_fallocate(self._fd, before, used_bytes - before)
            except OSError as error:
                self.punch()
                raise _too_little(used_bytes - before, free, self._directory) from error
        with self._lock:
            self.used_bytes = used_bytes
            self._empty.extend(range(before, used_bytes, EXTENT_BYTES))
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._prefaulted.clear()
            self.start_prefault()

    def shrink(self, used_bytes: int) -> None:
        """Use less of it. What lies behind keeps its memory until `punch`."""
        with self._lock:
            self.used_bytes = min(self.used_bytes, _whole(used_bytes))
            if self.locked_bytes > self.used_bytes:
                # Before its memory goes back: a page that a reader touches again must not be kept.
                _libc.munlock(self.address + self.used_bytes, self.locked_bytes - self.used_bytes)
                self.locked_bytes = self.used_bytes
            self._empty = deque(offset for offset in self._empty if offset < self.used_bytes)
            self._small = [offset for offset in self._small if offset < self.used_bytes]

    def punch(self) -> None:
        """Give back the memory of all that is not in use, in whole extents; its bytes are zeros from now on.

        Raises:
            ArenaError: the kernel refuses.
        """
        with self._lock:
            length = self.nbytes - self.used_bytes
            if not length:
                return
            mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
            if _libc.fallocate(self._fd, mode, self.used_bytes, length) != 0:
                raise ArenaError(f"{length} bytes of the arena could not be given back: {_os_error().strerror}")
            self.populated_bytes = min(self.populated_bytes, self.used_bytes)
        self.huge_page_bytes = _huge_bytes_of(self.address, self.nbytes)

    def start_prefault(self) -> None:
        """Give every page its memory in a background thread, huge pages where the host has them."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._prefault, name="tierd-prefault", daemon=True)
            self._thread.start()

    def wait_prefault(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for pre-faulting; True when all of it is done."""
        return self._prefaulted.wait(timeout)

    def close(self) -> None:
        """Stop pre-faulting, unmap and give back the memory once the last node has unmapped it too."""
        if self._fd < 0:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._bytes.release()
        _libc.munmap(self.address, self.nbytes)
        os.close(self._reader_fd)
        os.close(self._fd)
        self._fd = self._reader_fd = -1

    def _fill(self) -> None:
        """Give every extent its memory. No byte changes, so reads may land meanwhile.

        An extent whose pages a read holds cannot be collapsed (EAGAIN, EBUSY): it is kept for a second try.
        """
        while not self._stop.is_set():
            with self._lock:
                if not self._empty:
                    return
                self._fill_extent(self._empty.popleft())

    def _fill_extent(self, offset: int) -> None:
        os.posix_fallocate(self._fd, offset, _PAGE_BYTES)
        if _libc.madvise(self.address + offset, EXTENT_BYTES, _MADV_COLLAPSE) == 0:
            self.huge_page_bytes += EXTENT_BYTES
        else:
            os.posix_fallocate(self._fd, offset, EXTENT_BYTES)
            _libc.madvise(self.address + offset, EXTENT_BYTES, _MADV_POPULATE_WRITE)
            self._small.append(offset)
        self.populated_bytes += EXTENT_BYTES

    def _prefault(self) -> None:
        try:
            self._fill()
        except OSError as error:
            _log.warning("memory for the arena is short, it fills as experts come", error=error.strerror)
        for offset in list(self._small):
            if self._stop.is_set():
                return
            with self._lock:
                if offset < self.used_bytes:
                    _libc.madvise(self.address + offset, EXTENT_BYTES, _MADV_COLLAPSE)
        self._lock_in_memory()
        self.huge_page_bytes = _huge_bytes_of(self.address, self.nbytes)
        self._prefaulted.set()

    def _lock_in_memory(self) -> None:
        """Keep the kernel from swapping what is in use, if this process may lock so much: all of it or nothing."""
        with self._lock:
            locked = _libc.mlock(self.address, self.used_bytes) == 0
            self.locked_bytes = self.used_bytes if locked else 0


class PayloadView:
    """The node's side: the same pages, read-only. Made by `attach`.

    Attributes:
        nbytes: size of the mapping, a multiple of 2 MiB.
        address: of its first byte in this process, a multiple of 2 MiB; valid until `close`.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._bytes = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B").toreadonly()

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Self:
        """Map the payload behind `fd`, which stays the caller's.

        Args:
            fd: what the daemon handed over.
            nbytes: size that the daemon told.

        Raises:
            ArenaError: the file is shorter than that, or cannot be mapped.
        """
        try:
            size = os.fstat(fd).st_size
            if nbytes < 1 or nbytes % EXTENT_BYTES or size < nbytes:
                raise ArenaError(f"the daemon told an arena of {nbytes} bytes, but its file has {size}")
            return cls(_map_aligned(fd, nbytes, mmap.PROT_READ), nbytes)
        except OSError as error:
            raise ArenaError(f"the arena of {nbytes} bytes cannot be mapped: {error.strerror}") from error

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Read-only bytes `offset` to `offset + nbytes` of the payload; not to be used after `close`."""
        if not (offset >= 0 and nbytes >= 0 and offset + nbytes <= self.nbytes):
            raise ArenaError(f"bytes {offset} to {offset + nbytes} lie outside the arena of {self.nbytes} bytes")
        return self._bytes[offset : offset + nbytes]

    def close(self) -> None:
        """Give back the mapping; no address inside it may be used afterwards."""
        if self.address:
            self._bytes.release()
            _libc.munmap(self.address, self.nbytes)
            self.address = 0


def _map_aligned(fd: int, nbytes: int, protection: int) -> int:
    """Map `fd` at a multiple of 2 MiB: reserve more addresses than needed, map inside, give back both ends."""
    reserved = nbytes + EXTENT_BYTES
    start = _libc.mmap(None, reserved, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if start == _MAP_FAILED:
        raise _os_error()
    address: int = -(-start // EXTENT_BYTES) * EXTENT_BYTES
    if _libc.mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        error = _os_error()
        _libc.munmap(start, reserved)
        raise error
    if address > start:
        _libc.munmap(start, address - start)
    if tail := start + reserved - (address + nbytes):
        _libc.munmap(address + nbytes, tail)
    return address


def _whole(nbytes: int) -> int:
    """Rounded up to whole extents."""
    return -(-nbytes // EXTENT_BYTES) * EXTENT_BYTES


def _os_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _open_memfd() -> int:
    try:
        return os.memfd_create("tierd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ArenaError(f"the kernel gives no shared memory: {error.strerror}") from error


def _open_nameless(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(
            f"the arena directory {directory} cannot hold the arena: {error.strerror}",
            hint="Give --arena-dir a writable directory on a tmpfs, such as /dev/shm, or leave it out.",
        ) from error


def _require_tmpfs(directory: Path) -> None:
    """On any other filesystem the kernel would write the arena to a drive, again and again."""
    status = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(directory), status) != 0:
        raise UsageError(f"the arena directory {directory} cannot be used: {_os_error().strerror}")
    # The first field of struct statfs is a long, the filesystem's type (statfs(2)).
    if ctypes.c_long.from_buffer(status).value != _TMPFS_MAGIC:
        raise UsageError(
            f"the arena directory {directory} is not on a tmpfs",
            hint="Give --arena-dir a directory on a tmpfs, such as /dev/shm, or leave it out.",
        )


def _available_bytes(directory: Path | None) -> int:
    if directory is not None:
        stats = os.statvfs(directory)
        return stats.f_bavail * stats.f_frsize
    # A memfd has no limit of its own: reserving too much would wake the kernel's out-of-memory killer.
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ArenaError("/proc/meminfo does not say how much memory is available")


def _too_little(needed: int, free: int, directory: Path | None) -> ArenaError:
    place = "of memory" if directory is None else f"in {directory}"
    return ArenaError(
        f"the arena needs {needed} bytes {place}, {free} are free",
        hint="Make --arena smaller, free memory, or give the tmpfs a larger size.",
    )


def _huge_bytes_of(address: int, nbytes: int) -> int:
    """Bytes of this process's mapping at `address` that are mapped by huge pages, as the kernel counts them."""
    total, inside = 0, False
    with Path("/proc/self/smaps").open(encoding="utf-8") as lines:
        for line in lines:
            key = line.split(maxsplit=1)[0]
            if not key.endswith(":"):
                inside = address <= int(key.partition("-")[0], 16) < address + nbytes
            elif inside and key in ("ShmemPmdMapped:", "FilePmdMapped:"):
                total += int(line.split()[1]) * 1024
    return total
