"""The bandwidth of plain memory reading: measured once a machine, in a fraction of a second, and remembered."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from compute_node.engine.executor import Executor
from tierd.errors import ArenaError, DriveError
from tierd.memory_limits import group_limits, host_memory, private_bytes
from tierd.state import state_directory
from tierd.store.checksums import sha256
from tierd.store.reading import huge_page_buffer
from tierd.store.writing import write_atomic

__all__ = [
    "cache_bytes",
    "machine_key",
    "measure_bandwidth",
    "memory_bandwidth",
    "remeasured_bandwidth",
    "spare_memory",
]

_VERSION: Final = 2
_SECONDS: Final = 0.15
_LEAST_BYTES, _MOST_BYTES = 32 << 20, 1 << 30
_MEMORY_SHARE: Final = 8
"""No more than one part in so many of the memory that is available is taken, for this moment."""
_LEAST_RATE, _MOST_RATE = 1e8, 1e14
_MOST_TRIES: Final = 4


def measure_bandwidth(threads: int, nbytes: int, seconds: float = _SECONDS) -> float:
    """Bytes per second that `threads` threads read plainly from memory: the best of the passes that fit the time.

    Args:
        threads: native threads.
        nbytes: of the memory read, a multiple of a page; several times the last-level cache, or the cache is measured.
        seconds: for all passes; there are two at least.
    """
    # The kernel is compiled at the first use on a machine, which starting a node must not pay for.
    from compute_node.bench.plain_read import plain_read  # noqa: PLC0415

    data = huge_page_buffer(nbytes)
    segment, _ = plain_read(data)
    best = float("inf")
    with Executor(threads) as executor:
        executor.run(segment)
        end = time.perf_counter() + seconds
        for number in range(1000):
            begun = time.perf_counter()
            if number >= 2 and begun > end:
                break
            executor.run(segment)
            best = min(best, time.perf_counter() - begun)
    return nbytes / best


@cache
def memory_bandwidth(threads: int, directory: Path | None = None) -> float | None:
    """Bytes per second of plain reading by `threads` threads: as remembered, else measured and remembered.

    Nothing depends on it but what people are told: what cannot be written is measured again by the next process.

    Args:
        threads: native threads.
        directory: where it is remembered; None: in the user's state directory.

    Returns:
        None if too little memory is available for a measurement.
    """
    known = _load(_file(threads, directory))
    return known.rate if known is not None else _measure(threads, directory, None)


def remeasured_bandwidth(threads: int, directory: Path | None = None) -> float | None:
    """The same, measured again because an answer was faster than it allows, as when others took the memory meanwhile.

    The larger figure counts from then on. After a few tries the machine is believed: weights that stay in a cache are
    faster than memory every time.

    Returns:
        None if there is nothing new.
    """
    known = _load(_file(threads, directory))
    if known is None or known.tries >= _MOST_TRIES:
        return None
    rate = _measure(threads, directory, known)
    memory_bandwidth.cache_clear()
    return rate if rate is not None and rate > known.rate else None


def _measure(threads: int, directory: Path | None, before: _Known | None) -> float | None:
    nbytes = _bytes_to_read()
    if nbytes < _LEAST_BYTES:
        return None
    rate, tries = measure_bandwidth(threads, nbytes), 1
    if before is not None:
        rate, tries = max(rate, before.rate), before.tries + 1
    file, content = _file(threads, directory), {"version": _VERSION, "bytes_per_second": rate, "threads": threads}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(content | {"tries": tries}).encode())
    except (OSError, DriveError):
        pass
    return rate


def _file(threads: int, directory: Path | None) -> Path:
    return (state_directory() / "memory" if directory is None else directory) / f"{machine_key(threads)}.json"


def machine_key(threads: int) -> str:
    """Changes with the processor, the memory and the number of threads: a home folder may belong to many machines."""
    facts = [_VERSION, platform.node(), _line(Path("/proc/cpuinfo"), "model name"), os.cpu_count(),
             _line(Path("/proc/meminfo"), "MemTotal"), threads]  # fmt: skip
    return sha256(json.dumps(facts).encode())[:40]


@dataclass(frozen=True, slots=True)
class _Known:
    """Bytes per second as remembered, the best of so many measurements."""

    rate: float
    tries: int


def _load(file: Path) -> _Known | None:
    try:
        row = json.loads(file.read_bytes())
        known = _Known(float(row["bytes_per_second"]), int(row.get("tries", 1)))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return known if row.get("version") == _VERSION and _LEAST_RATE < known.rate < _MOST_RATE else None


def _bytes_to_read() -> int:
    """Four times the last-level caches, within bounds and within what memory has to spare; whole pages."""
    wanted = max(4 * cache_bytes(), 2 * _LEAST_BYTES)
    return min(wanted, _MOST_BYTES, spare_memory() // _MEMORY_SHARE) // 4096 * 4096


def cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of all caches of the third level together; large processors have one for every few cores.

    Args:
        root: where the kernel describes processors.
    """
    found = {}
    for folder in root.glob("cpu[0-9]*/cache/index3"):
        try:
            size, cores = ((folder / name).read_text(encoding="ascii").strip() for name in ("size", "shared_cpu_list"))
        except (OSError, ValueError):
            continue
        if size.endswith("K") and size[:-1].isdigit():
            found[cores] = int(size[:-1]) << 10
    return sum(found.values())


def spare_memory() -> int:
    """Bytes that this process may still take: of the host's, and of what the control groups around it have left."""
    try:
        available = host_memory().available
    except ArenaError:
        return 0
    own = private_bytes()
    return max(0, min([available, *(group.limit - group.used - own for group in group_limits())]))


def _line(file: Path, name: str) -> str:
    """The value of the first line NAME: VALUE of a file of the kernel; empty if there is none."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == name:
                    return value.strip()
    except OSError:
        pass
    return ""
