"""What the processors of this host did since it started, for measurements that others may disturb."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["ProcessorTime", "processor_time"]

_IDLE: Final = (3, 4)
"""Fields of /proc/stat (proc(5)): idle, and idle with reads or writes outstanding."""


class ProcessorTime(NamedTuple):
    """Seconds of all processors together since the host started: all of them, and those not idle, stolen ones too."""

    whole: float
    busy: float


def processor_time() -> ProcessorTime:
    """The seconds as of now."""
    line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    ticks = [int(field) for field in line.split()[1:9]]
    hertz = os.sysconf("SC_CLK_TCK")
    return ProcessorTime(sum(ticks) / hertz, sum(tick for n, tick in enumerate(ticks) if n not in _IDLE) / hertz)
