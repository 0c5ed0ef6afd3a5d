"""Whether a measurement had the machine to itself: time that other processes took from the cores."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tierd.processors import processor_time

__all__ = ["Quiet", "alternating", "processor_seconds"]

_MOST_FOREIGN: Final = 0.1
"""Share of the cores' time that others may take before a run is void."""


def processor_seconds(process: int) -> float:
    """Seconds that a process has computed; none of one that has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class Quiet:
    """Watches the cores while a measurement runs.

    Args:
        children: time of child processes that end meanwhile is not that of others.
        beside: process numbers whose time is not that of others either, such as a daemon's.

    Attributes:
        foreign: share of the cores' time that went to others; known at the end.
    """

    foreign: float = 0.0

    def __init__(self, *, children: bool = False, beside: Sequence[int] = ()) -> None:
        self._children = children
        self._beside = tuple(beside)

    def __enter__(self) -> Self:
        self._begun, self._busy, self._own = time.perf_counter(), processor_time().busy, self._own_seconds()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = (time.perf_counter() - self._begun) * (os.cpu_count() or 1)
        others = processor_time().busy - self._busy - (self._own_seconds() - self._own)
        self.foreign = max(0.0, others / seconds) if seconds > 0 else 0.0

    def _own_seconds(self) -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = used.ru_utime + used.ru_stime if self._children else 0.0
        return time.process_time() + ended + sum(map(processor_seconds, self._beside))

    def report(self) -> dict[str, Any]:
        """For the JSON of a measurement."""
        return {"foreign_cpu_share": self.foreign, "void": self.foreign > _MOST_FOREIGN}


def alternating(rounds: int, *sides: Any) -> list[list[float]]:
    """Seconds of each side in each of `rounds` alternating runs, after one run of each that does not count."""
    found: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for side, seconds in zip(sides, found, strict=True):
            begun = time.perf_counter()
            side()
            if number:
                seconds.append(time.perf_counter() - begun)
    return found
