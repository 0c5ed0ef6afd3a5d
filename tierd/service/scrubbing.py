"""Reading all copies again inside a running daemon, behind every read that somebody waits for.

The thread keeps its ordinary place among threads: one of low priority that was stopped with the interpreter's lock in
its hands would stop the loop, too. It is the rate, and giving way to reads in flight, that keep it out of the way.

Drives lose bytes that nobody has read for long. A record found bad is read from other drives from then on, and the log
says how to repair it; nothing is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from tierd.devices.device import RecordRead
from tierd.errors import SessionRefused
from tierd.mirror.pace import Pace
from tierd.service.drives import Drives
from tierd.store.pieces import Piece, Problem, check_pieces, shard_pieces
from tierd.store.store import ExpertStore

__all__ = ["DEFAULT_RATE", "ScrubFinding", "ScrubState", "Scrubber"]

DEFAULT_RATE: Final = 100_000_000
"""Bytes per second."""

_TELL_SECONDS: Final = 0.5
_YIELD_SECONDS: Final = 0.002
_MAX_YIELDS: Final = 500
"""A drive that is never idle is read from all the same, once a second."""
_MAX_FINDINGS: Final = 10_000

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ScrubFinding:
    """Something wrong on a drive."""

    drive: str
    path: Path
    problem: Problem


@dataclass(slots=True)
class ScrubState:
    """How far it is. Written by the scrubbing thread, read by the loop.

    Attributes:
        bytes_total: of all copies.
        bytes_done: of these, read.
        records: expert records read.
        drive: where it is now.
        file: where it is now.
        findings: what is wrong, in order; bounded.
        done: whether all was read.
    """

    bytes_total: int = 0
    bytes_done: int = 0
    records: int = 0
    drive: str = ""
    file: str = ""
    findings: list[ScrubFinding] = field(default_factory=list)
    done: bool = False


class Scrubber:
    """Runs one scrub at a time.

    Args:
        store: that is served.
        drives: that hold it.
    """

    def __init__(self, store: ExpertStore, drives: Drives) -> None:
        self._store = store
        self._drives = drives
        self._running = False

    async def run(self, bytes_per_second: int) -> AsyncGenerator[ScrubState, None]:
        """Read everything; closing the iterator stops it.

        Args:
            bytes_per_second: bound on the rate.

        Yields:
            The same state again and again, about twice a second; the last time it is `done`.

        Raises:
            SessionRefused: a scrub is running already.
        """
        if self._running:
            raise SessionRefused("a scrub of this daemon is running already")
        self._running = True
        state, stop = ScrubState(), threading.Event()
        ended = asyncio.Event()
        arguments = (state, stop, Pace(bytes_per_second, sleep=stop.wait), asyncio.get_running_loop(), ended)
        threading.Thread(target=self._work, args=arguments, name="tierd-scrub", daemon=True).start()
        try:
            while not ended.is_set():
                yield state
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TELL_SECONDS):
                        await ended.wait()
            yield state
        finally:
            stop.set()

    def _work(
        self,
        state: ScrubState,
        stop: threading.Event,
        pace: Pace,
        loop: asyncio.AbstractEventLoop,
        ended: asyncio.Event,
    ) -> None:
        copies = [
            (info.name, number, path)
            for info in list(self._drives.info.values())
            for number, path in enumerate(info.paths)
            if path is not None
        ]
        state.bytes_total = sum(self._store.manifest.shards[number].bytes for _, number, _ in copies)
        for drive, number, path in copies:
            state.drive, state.file = drive, path.name
            self._read(drive, number, path, state, stop, pace, loop)
            if stop.is_set():
                break
        else:
            state.done = True
            _log.info("scrub ended", records=state.records, bytes=state.bytes_done, problems=len(state.findings))
        # A thread that hangs in a drive is never joined by a second one.
        self._running = False
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    def _read(
        self,
        drive: str,
        number: int,
        path: Path,
        state: ScrubState,
        stop: threading.Event,
        pace: Pace,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        shard = self._store.manifest.shards[number]
        before = state.bytes_done
        for piece, problem in check_pieces(path, shard, shard_pieces(self._store, shard)):
            if problem is not None and len(state.findings) < _MAX_FINDINGS:
                state.findings.append(ScrubFinding(drive, path, problem))
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._found, drive, number, path, piece, problem)
            if piece is not None:
                state.records += 1
                state.bytes_done = before + piece.offset + piece.nbytes
                pace(piece.nbytes)
            self._give_way(drive, stop)
            if stop.is_set():
                return
        state.bytes_done = before + shard.bytes

    def _give_way(self, drive: str, stop: threading.Event) -> None:
        """Wait while somebody reads from the drive."""
        member = next((d for d in self._drives.replicas.drives if d.name == drive), None)
        for _ in range(_MAX_YIELDS):
            if member is None or not member.device.stats.in_flight or stop.is_set():
                return
            time.sleep(_YIELD_SECONDS)

    def _found(self, drive: str, number: int, path: Path, piece: Piece | None, problem: Problem) -> None:
        """On the loop: say it, and let reads of the record prefer other drives."""
        command = f"tierd scrub {shlex.quote(str(path.parent))} --repair --from DIR"
        _log.warning(
            "scrub found a bad copy",
            drive=drive,
            path=str(path),
            problem=str(problem),
            advice=f"To repair the copy: {command}, with a good copy in DIR.",
        )
        if piece is None or piece.layer is None or piece.expert is None:
            return
        flat = self._store.geometry.flat(piece.layer, piece.expert)
        read = RecordRead(flat, piece.layer, piece.expert, number, piece.offset, piece.nbytes, piece.xxh3)
        for member in self._drives.replicas.drives:
            if member.name == drive:
                member.mark_bad(read)
