"""Whether others used the processors while something was measured."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any, Final

from tierd.sizes import format_share

__all__ = ["TOO_MUCH", "OtherWork"]

TOO_MUCH: Final = 0.1
"""Share of the processors in others' hands from which a measurement is void."""

_IDLE: Final = (3, 4)
"""Fields of /proc/stat (proc(5)): idle, and idle with reads or writes outstanding."""


class OtherWork:
    """From its making on, counts what others do. Children count as our own once they have been waited for."""

    def __init__(self) -> None:
        self._total, self._busy = _processors()
        self._own = _own_seconds()

    def share(self) -> float:
        """Share of all processors that others had since then."""
        total, busy = _processors()
        own = _own_seconds() - self._own
        elapsed = total - self._total
        return min(1.0, max(0.0, (busy - self._busy - own) / elapsed)) if elapsed > 0 else 0.0

    def judge(self, answer: dict[str, Any]) -> None:
        """Adds that share to a measurement's answer, and says there whether it is void."""
        answer["other_cpu_share"] = share = self.share()
        answer["void"] = share > TOO_MUCH
        if answer["void"]:
            answer["notes"].append(
                f"VOID: others had {format_share(share)} of the processors meanwhile; measure on a quiet machine"
            )


def _processors() -> tuple[float, float]:
    """Seconds of all processors since the start, all and not idle."""
    line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    ticks = [int(field) for field in line.split()[1:9]]
    hertz = os.sysconf("SC_CLK_TCK")
    return sum(ticks) / hertz, sum(tick for n, tick in enumerate(ticks) if n not in _IDLE) / hertz


def _own_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
