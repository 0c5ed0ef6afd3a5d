"""Records read from ordinary files by a few threads, past the page cache where the filesystem allows it.

Threads and `preadv`, not an event loop: a direct read of some megabytes keeps a drive busy by itself, the system call
and the checksum both release the interpreter's lock, and few large reads in flight beat many.
"""

from __future__ import annotations

import ctypes
import errno
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import structlog

from tierd.devices.device import AttemptMemory, DeviceStats, ReadDone, ReadWatch, RecordRead
from tierd.devices.read_queue import Job, ReadQueue
from tierd.devices.shard_file import BLOCK_BYTES, ShardFile
from tierd.devices.transfers import Chain, Transfer, TransferWrapper, system_transfer
from tierd.errors import ChecksumMismatch, DriveError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = ["FileDevice"]

_CHECKERS: Final = 2
"""Threads that check records of several pieces. One keeps up with any drive; it may have to wait for a processor. What
is read in one piece is checked by the thread that read it: to wake another would cost about as much, and of such reads
a drive has some in hand."""
_MEMORY_ALIGNMENT: Final = 512
"""What drives ask of an address; the arena's slots are aligned to 4096 and more."""
_NO_MEMORY: Final = memoryview(b"")

_log = structlog.get_logger(__name__)


class FileDevice:
    """One drive: the shards of a store under one directory, behind `tierd.devices.device.Device`.

    Every queued read owns the memory it goes to, so the queue is bounded by the arena's slots.

    Args:
        name: of the drive, for messages and metrics.
        shard_paths: the shard files; their position is the shard number of a `RecordRead`. None for a shard that this
            drive does not hold.
        loop_call: runs a function on the broker's thread, such as `loop.call_soon_threadsafe`; called once for all
            reads that end before it does.
        threads: reads at a time, of pieces of large records, the oldest record's first. Others check these, so that the
            drive has the next piece at once.
        direct: False reads through the page cache on purpose.
        close_timeout: seconds that `close` waits for reads that a drive does not answer.
        wrapper: stands around every transfer, below the checksum.

    Attributes:
        name: of the drive.
        stats: changed on the broker's thread only.
        on_read: told of every read that ended, on the broker's thread; see `ReadWatch`.

    Raises:
        DriveError: a file cannot be opened.
        UsageError: `threads` is below 1.
    """

    def __init__(
        self,
        name: str,
        shard_paths: Sequence[Path | None],
        loop_call: Callable[[Callable[[], None]], object],
        *,
        threads: int = 4,
        direct: bool = True,
        close_timeout: float = 10.0,
        wrapper: TransferWrapper | None = None,
    ) -> None:
        if threads < 1:
            raise UsageError(f"drive {name}: {threads} read threads read nothing", hint="Give at least one.")
        self.name = name
        self._loop_call = loop_call
        self._close_timeout = close_timeout
        self._wrapper: TransferWrapper = wrapper if wrapper is not None else Chain()
        self._shards: list[ShardFile | None] = []
        try:
            for path in shard_paths:
                self._shards.append(None if path is None else ShardFile(name, path, direct=direct))
        except DriveError:
            self._close_files()
            raise
        self._files = [file for file in self._shards if file is not None]
        self.on_read: ReadWatch | None = None
        self.stats = DeviceStats(direct=all(file.direct for file in self._files))
        buffered = [str(file.path) for file in self._files if not file.direct]
        if direct and buffered:
            _log.warning(
                "direct reads refused, reading through the page cache",
                drive=name,
                first=buffered[0],
                files=len(buffered),
                of=len(self._files),
            )
        self._closing = threading.Event()
        self._queue = ReadQueue()
        self._moved: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._by_slot: dict[int, Job] = {}
        self._ended: deque[Job] = deque()
        self._called = False
        self._readers = [
            threading.Thread(target=self._read_all, name=f"tierd-{name}-{n}", daemon=True) for n in range(threads)
        ]
        self._checkers = [
            threading.Thread(target=self._check_all, name=f"tierd-{name}-check-{n}", daemon=True)
            for n in range(_CHECKERS)
        ]
        for thread in (*self._readers, *self._checkers):
            thread.start()

    def __repr__(self) -> str:
        mode = "direct" if self.stats.direct else "buffered"
        return f"<FileDevice {self.name}: {len(self._files)} files, {mode}, {self.stats.in_flight} in flight>"

    def submit(
        self, read: RecordRead, slot: int, memory: AttemptMemory, done: ReadDone, *, ahead: bool = False
    ) -> None:
        """See `Device.submit`. Called on the broker's thread only; returns at once."""
        self.stats.in_flight += 1
        job = Job(read, slot, memory.view(slot, read.nbytes), done, time.perf_counter(), ahead=ahead)
        self._by_slot[slot] = job
        if self._closing.is_set():
            self._finish(job, self._refusal(read, "the drive is closed", errno.ECANCELED))
            return
        self._queue.add(job)

    def promote(self, slot: int) -> None:
        """See `Device.promote`. Called on the broker's thread only; returns at once."""
        job = self._by_slot.get(slot)
        if job is not None and job.ahead:
            self._queue.promote(job)

    def withdraw(self, slot: int) -> bool:
        """See `Device.withdraw`. Called on the broker's thread only."""
        job = self._by_slot.get(slot)
        if job is None or not job.pieces.withdraw():
            return False
        del self._by_slot[slot]
        job.into = _NO_MEMORY
        self.stats.in_flight -= 1
        self._queue.moved(job)
        return True

    def close(self) -> None:
        """Fail what has not started, wait for what has, then give back threads and descriptors.

        Reads that do not return within the bound keep their descriptors open until the process ends: the memory
        behind them must stay as well, and a closed number would be reused by another file.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._wrapper.close()
        self._queue.close(len(self._readers))
        deadline = time.monotonic() + self._close_timeout
        for thread in self._readers:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._readers):
            _log.warning("drive does not answer, its files stay open", drive=self.name, seconds=self._close_timeout)
            return
        for _ in self._checkers:
            self._moved.put(None)
        for thread in self._checkers:
            thread.join()
        self._close_files()

    def _close_files(self) -> None:
        for file in self._shards:
            if file is not None:
                file.close()

    def _read_all(self) -> None:
        following: tuple[Job, int] | None = None
        while (taken := following or self._queue.take()) is not None:
            job, piece = taken
            error, following = self._outcome(job, piece), None
            if job.pieces.moved(piece, error):
                following = self._queue.moved(job, follows=job.ahead)
            if error is None and (following is not None or job.pieces.count > 1):
                self._moved.put(job)
            else:
                self._leave(job)
            del job, taken

    def _check_all(self) -> None:
        while (job := self._moved.get()) is not None:
            self._leave(job)
            del job

    def _leave(self, job: Job) -> None:
        """Somebody has read a piece: check what has come, and end the read after the last one."""
        try:
            last = job.pieces.leave(job.into)
        except Exception as unforeseen:  # noqa: BLE001 - a read must end in `done`, whatever happens
            last = job.pieces.fail(self._refusal(job.read, f"unforeseen {unforeseen!r}", errno.EIO))
            # Pieces that nobody has begun are never read.
            self._queue.moved(job)
        if last:
            self._finish(job, job.pieces.error or self._verdict(job))

    def _outcome(self, job: Job, piece: int) -> DriveError | None:
        try:
            return self._move(job, piece)
        except Exception as unforeseen:  # noqa: BLE001 - a read must end in `done`, whatever happens
            return self._refusal(job.read, f"unforeseen {unforeseen!r}", errno.EIO)

    def _move(self, job: Job, piece: int) -> DriveError | None:
        """The system call: a piece's bytes into the record's slot."""
        read, into = job.read, job.into
        if self._closing.is_set():
            return self._refusal(read, "the drive is closing", errno.ECANCELED)
        file = self._file(read)
        if file is None:
            return self._refusal(read, f"there is no shard {read.shard}", errno.EINVAL)
        if into.nbytes != read.nbytes or into.readonly or not into.contiguous:
            return self._refusal(read, f"the memory given has {into.nbytes} bytes or is not writable", errno.EINVAL)
        if read.offset % BLOCK_BYTES or read.nbytes % BLOCK_BYTES or _address(into) % _MEMORY_ALIGNMENT:
            return self._refusal(read, "offset, length or memory is not aligned", errno.EINVAL)
        transfer, span = self._transfer(job), job.pieces.span(piece)

        def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
            count = transfer(fd, buffers, offset)
            job.moved.append(count)
            return count

        try:
            file.read(read.offset + span.start, into[span], counted)
        except DriveError as error:
            error.message = f"{self._subject(read)}: {error.message}"
            return error
        return None

    def _transfer(self, job: Job) -> Transfer:
        """What moves the bytes of this attempt: one for all of its pieces."""
        with self._lock:
            if job.transfer is None:
                job.transfer = self._wrapper.wrap(job.read, system_transfer)
            return job.transfer

    def _verdict(self, job: Job) -> DriveError | None:
        """Whether the bytes are the converted ones."""
        read, found = job.read, job.pieces.xxh3
        if found == read.xxh3:
            return None
        file = self._file(read)
        path = "" if file is None else str(file.path)
        return ChecksumMismatch(
            f"{self._subject(read)}: wrong checksum in {path} at offset {read.offset}, length {read.nbytes}: "
            f"found {found:016x}, converted {read.xxh3:016x}",
            path=path,
            offset=read.offset,
            length=read.nbytes,
            hint="The file changed or the drive returns wrong bytes; run `tierd doctor`.",
        )

    def _finish(self, job: Job, error: DriveError | None) -> None:
        """Have it reported on the broker's thread. Its memory is let go before, and not touched afterwards."""
        job.error, job.into, job.ended = error, _NO_MEMORY, time.perf_counter()
        self._ended.append(job)
        if not self._called:
            self._called = True
            self._call_reports()

    def _call_reports(self) -> None:
        try:
            self._loop_call(self._report_all)
        except RuntimeError:
            # The loop is closed: nobody is left to tell, and the memory was let go of above.
            _log.debug("read ended after the loop was closed", drive=self.name)

    def _report_all(self) -> None:
        """What has ended until now; on the broker's thread."""
        # Before looking: a read that ends from now on is either seen below or calls again.
        self._called = False
        try:
            while self._ended:
                self._report(self._ended.popleft())
        finally:
            if self._ended:
                self._call_reports()

    def _report(self, job: Job) -> None:
        read, slot, error, stats = job.read, job.slot, job.error, self.stats
        queued, reading = (job.started - job.submitted, job.ended - job.started) if job.started else (0.0, 0.0)
        if self._by_slot.get(slot) is job:
            del self._by_slot[slot]
        file = self._file(read)
        if file is not None and not file.direct:
            stats.direct = False
        moved = sum(job.moved)
        stats.ended(error, queued=queued, reading=reading, moved=moved)
        if self.on_read is not None:
            self.on_read(self.name, read, queued, reading, moved, error)
        job.done(error, slot)

    def _file(self, read: RecordRead) -> ShardFile | None:
        return self._shards[read.shard] if 0 <= read.shard < len(self._shards) else None

    def _subject(self, read: RecordRead) -> str:
        return f"drive {self.name}, layer {read.layer}, expert {read.index}"

    def _refusal(self, read: RecordRead, reason: str, number: int) -> DriveError:
        file = self._file(read)
        path = str(file.path) if file is not None else ""
        return DriveError(
            f"{self._subject(read)}: {reason} ({path or 'no file'}, offset {read.offset}, length {read.nbytes})",
            path=path,
            offset=read.offset,
            length=read.nbytes,
            errno=number,
        )


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory.nbytes else 0
