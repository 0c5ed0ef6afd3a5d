"""Which read a drive's threads begin next: wanted ones in the order in which they come, others while none is wanted.

The drive works on one read that nobody waits for at a time, or on several small ones: who asks meanwhile waits for
them. Yet it shall not stand still between two reads: from the end of one until a thread has begun the next, half a
millisecond passes on a busy machine. So a thread stands by, and begins the next one ahead shortly before the only one
at work will end, wanted or not, by the pace at which the drive read ahead before.

Large records are read in pieces, by all threads that have nothing older to read.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tierd.devices.device import ReadDone, RecordRead
from tierd.devices.pieces import Pieces
from tierd.devices.transfers import Transfer
from tierd.errors import DriveError

__all__ = ["Job", "ReadQueue"]

_AHEAD_BYTES: Final = 1 << 20
"""Of reads ahead at the drive, beyond the first: who asks meanwhile waits for them, half a millisecond at 2 GB/s."""
_LEAD_SECONDS: Final = 0.0004
"""So long before a read ends the next one ahead is begun: threads wake so late, and seldom later."""
_SMOOTHING: Final = 0.125


@dataclass(slots=True, eq=False)
class Job:
    """One attempt to read a record; the drive's own.

    Attributes:
        read: what to read.
        slot: of the arena, for `done`.
        into: the slot's memory; let go of before `done`.
        done: told of the end.
        submitted: when it came, in seconds of `time.perf_counter`.
        ahead: nobody waits for it.
        queued: it has been given to the threads, and the drive is not done with it.
        started: when a thread began it; 0 before.
        ended: when all was done about it.
        moved: bytes, by transfer; to append is atomic.
        error: that it ended in.
        transfer: what moves its bytes, for all of its pieces.
        pieces: in which it is read.
    """

    read: RecordRead
    slot: int
    into: memoryview
    done: ReadDone
    submitted: float
    ahead: bool = False
    queued: bool = False
    started: float = 0.0
    ended: float = 0.0
    moved: list[int] = field(default_factory=list)
    error: DriveError | None = None
    transfer: Transfer | None = None
    pieces: Pieces = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = Pieces(self.read.nbytes)


class _StandBy:
    """Given to a thread instead of a read: begin one when the time has come."""


_STAND_BY: Final = _StandBy()


class ReadQueue:
    """Reads that have not begun; used by the broker's thread and by those that read.

    Args:
        clock: seconds; as `Job.started` counts them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._jobs: queue.SimpleQueue[Job | _StandBy | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[int, Job] = {}  # reads ahead, by slot, until they are given to the threads
        self._handed: dict[int, Job] = {}  # all, by slot, from then on until their last byte has come
        self._pace = 0.0  # seconds that the drive takes for a byte of a read ahead; 0 if not known
        self._free_at = 0.0  # when the last read ended that went before those at work
        self._stands_by = False

    def add(self, job: Job) -> None:
        """A read comes."""
        with self._lock:
            if job.ahead:
                self._waiting[job.slot] = job
            else:
                self._hand_over(job)
            self._begin_ahead()

    def promote(self, job: Job) -> None:
        """Somebody waits for a read ahead, or for one that has ended."""
        with self._lock:
            job.ahead = False
            if self._waiting.get(job.slot) is job:
                del self._waiting[job.slot]
                self._hand_over(job)

    def take(self) -> tuple[Job, int] | None:
        """Wait for a piece of a read that the caller must now begin; None: there will be no more."""
        seconds: float | None = None
        while True:
            job: Job | _StandBy | None
            try:
                job = self._jobs.get(timeout=seconds)
            except queue.Empty:
                job = _STAND_BY
            else:
                if seconds is not None:
                    with self._lock:
                        self._stands_by = False
            if isinstance(job, _StandBy):
                with self._lock:
                    job, seconds = self._stand_by()
                if job is None:
                    continue
            if job is None:
                return None
            if (piece := job.pieces.take()) is not None:
                if not piece:
                    job.started = self._clock()
                return job, piece
            seconds = None

    def moved(self, job: Job, *, follows: bool = False) -> tuple[Job, int] | None:
        """The drive has nothing more to do with a read: perhaps it has time for the next one ahead.

        Returns:
            Its first piece, begun, if it `follows` in the caller's thread: to wake another takes long on a busy
            machine.
        """
        with self._lock:
            if job.queued:
                job.queued = False
                del self._handed[job.slot]
                if job.started:
                    if job.ahead and not self._any_wanted():
                        self._learn(job)
                    self._free_at = self._clock()
            elif self._waiting.get(job.slot) is job:
                del self._waiting[job.slot]
            following = self._begin_ahead(follows=follows)
        if following is None:
            return None
        if (piece := following.pieces.take()) is None:
            # It was withdrawn this very moment.
            return self.moved(following, follows=follows)
        following.started = following.started or self._clock()
        return following, piece

    def close(self, threads: int) -> None:
        """What has not begun goes to the threads, which refuse it, and then learn that there is no more."""
        with self._lock:
            for job in self._waiting.values():
                self._jobs.put(job)
            self._waiting.clear()
        for _ in range(threads):
            self._jobs.put(None)

    def _hand_over(self, job: Job) -> None:
        """Under the lock: to the threads, which take reads in the order in which they come."""
        self._begins(job, job.pieces.count)

    def _begins(self, job: Job, others: int) -> None:
        """Under the lock; for so many pieces somebody else must come."""
        for _ in range(others):
            self._jobs.put(job)
        job.queued = True
        self._handed[job.slot] = job

    def _any_wanted(self) -> bool:
        """Under the lock: whether somebody waits for a read that is at work."""
        return not all(job.ahead for job in self._handed.values())

    def _begin_ahead(self, *, follows: bool = False) -> Job | None:
        """Under the lock."""
        following = None
        while self._waiting and not self._any_wanted():
            slot, job = next(iter(self._waiting.items()))
            if self._handed and job.read.nbytes + sum(at.read.nbytes for at in self._handed.values()) > _AHEAD_BYTES:
                break
            del self._waiting[slot]
            if follows and following is None:
                self._begins(job, job.pieces.count - 1)
                following = job
            else:
                self._hand_over(job)
        if self._waiting and len(self._handed) == 1 and self._pace and not self._stands_by:
            self._stands_by = True
            self._jobs.put(_STAND_BY)
        return following

    def _learn(self, job: Job) -> None:
        """Under the lock: how fast the drive is."""
        pace = (self._clock() - max(job.started, self._free_at)) / job.read.nbytes
        self._pace += (pace - self._pace) * (_SMOOTHING if self._pace else 1.0)

    def _stand_by(self) -> tuple[Job | None, float | None]:
        """Under the lock: the read to begin now; or seconds until then, at most; or neither."""
        if self._waiting and len(self._handed) == 1:
            (at_work,) = self._handed.values()
            # One that no thread has begun yet must not be overtaken.
            begun = max(at_work.started, self._free_at) if at_work.started else self._clock() + _LEAD_SECONDS
            seconds = begun + at_work.read.nbytes * self._pace - _LEAD_SECONDS - self._clock()
            if seconds > 0:
                return None, seconds
            self._stands_by = False
            job = self._waiting.pop(next(iter(self._waiting)))
            self._begins(job, job.pieces.count - 1)
            return job, None
        self._stands_by = False
        return None, None
