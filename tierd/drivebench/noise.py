"""Whether others used the processors while something was measured."""

from __future__ import annotations

import resource
from typing import Any, Final

from tierd.processors import processor_time
from tierd.sizes import format_share

__all__ = ["TOO_MUCH", "OtherWork"]

TOO_MUCH: Final = 0.1
"""Share of the processors in others' hands from which a measurement is void."""


class OtherWork:
    """From its making on, counts what others do. Children count as our own once they have been waited for."""

    def __init__(self) -> None:
        self._total, self._busy = processor_time()
        self._own = _own_seconds()

    def share(self) -> float:
        """Share of all processors that others had since then."""
        total, busy = processor_time()
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


def _own_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
