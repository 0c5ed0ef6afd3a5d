"""How fast a drive is and how many reads it wants at a time, measured on the files that will be served.

The reads go past the page cache. Where a filesystem refuses that, what comes back is memory speed: the result says so
and is not used. They go to memory like the arena's, on huge pages where the host has them: into small ones the same
drive may deliver a third.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import xxhash

from tierd.devices.device import RecordRead
from tierd.devices.shard_file import BLOCK_BYTES, ShardFile
from tierd.devices.transfers import Chain, Transfer, TransferWrapper, system_transfer
from tierd.errors import DriveError
from tierd.sizes import format_bytes
from tierd.store.reading import huge_page_buffer

__all__ = ["DEFAULT_DEPTH", "DriveProbe", "probe_drive", "with_some_in_hand"]

DEFAULT_DEPTH: Final = 4
"""Reads at a time where nothing was measured."""

_DEPTHS: Final = (1, 2, 4, 8)
_SECONDS: Final = 0.2
_MAX_IN_FLIGHT_BYTES: Final = 64 << 20
"""Records of many megabytes keep a drive busy by themselves; each one in flight costs a slot if the drive hangs."""
_PATIENCE: Final = 1.0
"""Seconds for reads in flight at the end; a drive that needs longer is served without figures."""
_GOOD_ENOUGH: Final = 0.95
_MIN_DEPTH: Final = 2
_MIN_IN_FLIGHT_BYTES: Final = 32 << 20
"""A drive that is fast with one small record at a time waits for us between two of them, unless more are begun."""
_IN_HAND_BYTES: Final = 24 << 20
"""Begun beyond what the drive wants, half as many reads again at least and twice as many at most: of the reads that
have ended some wait for the interpreter. With half as many again records of 1 MiB came at 0.93 of the drive's speed
instead of 0.86; with twice as many each takes a twentieth to a tenth less of a processor besides."""
_MAX_READ_BYTES: Final = 4 << 20
_MIN_FILE_BYTES: Final = 8 << 20
"""Below this, starting the threads takes longer than the reads."""
_MAX_SLICE_BYTES: Final = 256 << 20

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DriveProbe:
    """What a probe found.

    Attributes:
        bandwidth: bytes per second, checksums included; None if nothing could be trusted.
        depth: reads at a time: those that keep the drive busy, and some in hand.
        how: in words, for people.
    """

    bandwidth: float | None
    depth: int
    how: str


def probe_drive(
    paths: Sequence[Path], *, record_bytes: int, wrapper: TransferWrapper | None = None, seconds: float = _SECONDS
) -> DriveProbe:
    """Measure a drive; takes `seconds` plus one read, or a second more if that hangs. Problems are told in `how`.

    Args:
        paths: its shard files, at least one.
        record_bytes: size of the records; longer ones are measured by their first 4 MiB.
        wrapper: stands around the transfers, such as a throttle.
        seconds: bound on the time.
    """
    nbytes = max(min(record_bytes, _MAX_READ_BYTES) // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES)
    try:
        size, path = max((path.stat().st_size, path) for path in paths)
        file = ShardFile("probe", path, direct=True)
    except (OSError, DriveError) as error:
        return DriveProbe(None, DEFAULT_DEPTH, f"not measured: {error}")
    if not file.direct or size < _MIN_FILE_BYTES:
        why = "the files are too small to measure" if file.direct else "cached reads, not trusted"
        file.close()
        return DriveProbe(None, DEFAULT_DEPTH, why)
    found = _Measurement(file, nbytes, size // nbytes, wrapper or Chain()).run(seconds)
    if not found:
        return DriveProbe(None, DEFAULT_DEPTH, "not measured: the drive did not answer in time")
    most = _most_at_a_time(record_bytes)
    found = {depth: bandwidth for depth, bandwidth in found.items() if depth <= most}
    best = max(found.values())
    depth = next(depth for depth, bandwidth in found.items() if bandwidth >= _GOOD_ENOUGH * best)
    depth = max(depth, _MIN_DEPTH, min(_DEPTHS[-1], _MIN_IN_FLIGHT_BYTES // record_bytes))
    bandwidth = found.get(depth, best)
    depth = with_some_in_hand(depth, record_bytes)
    return DriveProbe(bandwidth, depth, f"direct reads of {format_bytes(nbytes)}, {depth} at a time")


def with_some_in_hand(wanted: int, record_bytes: int) -> int:
    """Reads at a time by which a drive that wants `wanted` of them always has so many."""
    in_hand = max(wanted // 2, min(wanted, _IN_HAND_BYTES // record_bytes))
    return min(wanted + in_hand, _most_at_a_time(record_bytes))


def _most_at_a_time(record_bytes: int) -> int:
    return max(_MIN_DEPTH, _MAX_IN_FLIGHT_BYTES // record_bytes)


class _Measurement:
    def __init__(self, file: ShardFile, nbytes: int, places: int, wrapper: TransferWrapper) -> None:
        self._file = file
        self._nbytes = nbytes
        self._places = places
        self._transfer: Transfer = wrapper.wrap(RecordRead(0, 0, 0, 0, 0, nbytes, 0), system_transfer)
        self._slice_bytes = min(_MAX_SLICE_BYTES, max(places * nbytes // 2, nbytes))
        self._lock = threading.Lock()
        # A golden-ratio walk visits a file evenly and never the same place twice in a row.
        self._place = secrets.randbelow(places)
        self._stride = max(1, int(places * 0.618034))
        self._bytes = 0
        self._ends = 0.0
        self._failed = False

    def run(self, seconds: float) -> dict[int, float]:
        """Bytes per second by depth."""
        found: dict[int, float] = {}
        memory = huge_page_buffer(_DEPTHS[-1] * self._nbytes).data
        buffers = [memory[start : start + self._nbytes] for start in range(0, len(memory), self._nbytes)]
        for depth in _DEPTHS:
            self._bytes = 0
            began = time.monotonic()
            self._ends = began + seconds / len(_DEPTHS)
            threads = [threading.Thread(target=self._read, args=(buffers[n],), daemon=True) for n in range(depth)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, self._ends + _PATIENCE - time.monotonic()))
            if any(thread.is_alive() for thread in threads):
                # Their buffers and the file must stay: the calls may still return.
                return found
            if self._failed or not self._bytes:
                break
            found[depth] = self._bytes / max(time.monotonic() - began, 1e-6)
        self._file.close()
        return found

    def _read(self, into: memoryview) -> None:
        while time.monotonic() < self._ends and self._bytes < self._slice_bytes and not self._failed:
            with self._lock:
                self._place = (self._place + self._stride) % self._places
                offset = self._place * self._nbytes
            try:
                self._file.read(offset, into, self._transfer)
            except DriveError as error:
                self._failed = True
                _log.warning("drive fails while it is measured", path=error.path, error=error.message)
                return
            xxhash.xxh3_64_intdigest(into)
            with self._lock:
                self._bytes += self._nbytes
