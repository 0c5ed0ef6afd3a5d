"""What became of hinted experts, in experts and in bytes; every one ends in exactly one of the sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

__all__ = ["DropReason", "PrefetchCounts", "Tally"]


class DropReason(Enum):
    """Why a hinted expert was never read, or not to the end."""

    EXPIRED = "expired"
    """Its layer had been reached before the hint came, or was passed before its turn."""
    DEADLINE = "deadline"
    """Its layer was expected to start before the read could."""
    OVERTAKEN = "overtaken"
    """A request for it came before its read was handed to a drive."""
    NO_ROOM = "no_room"
    """No slot was worth less than it."""
    THROTTLED = "throttled"
    """Too unlikely for the present level of the throttle."""
    OVERFLOW = "overflow"
    """Too many were waiting already."""
    FAILED = "failed"
    """No drive delivered it."""


@dataclass(slots=True)
class Tally:
    """Experts, and the bytes of their records."""

    experts: int = 0
    bytes: int = 0

    def add(self, nbytes: int) -> None:
        """One more expert."""
        self.experts += 1
        self.bytes += nbytes


@dataclass(slots=True)
class PrefetchCounts:
    """hinted = cut + known + issued; issued = used + late + wasted + cancelled + dropped + those still pending.

    Attributes:
        hinted: experts that hints named, and those that were guessed.
        guessed: of these, those that no node named: the daemon's own guesses.
        cut: of these, those that the store does not have, that were named twice, or that were more than a hint may
            name; and those with an impossible probability.
        known: in RAM, on their way, or hinted before.
        issued: taken up.
        used: read, and used before they left RAM.
        late: asked for while the read was running, or waited at a drive; the request joined it.
        wasted: read, and gone again without a use.
        cancelled: taken back before a drive began: another hint for the layer did not name it, the router disagreed,
            or the session ended.
        dropped: given up by the daemon, by reason.
    """

    hinted: int = 0
    guessed: int = 0
    cut: int = 0
    known: int = 0
    issued: Tally = field(default_factory=Tally)
    used: Tally = field(default_factory=Tally)
    late: Tally = field(default_factory=Tally)
    wasted: Tally = field(default_factory=Tally)
    cancelled: Tally = field(default_factory=Tally)
    dropped: dict[DropReason, Tally] = field(default_factory=lambda: {reason: Tally() for reason in DropReason})

    def ended(self) -> Tally:
        """All that were issued and are decided."""
        parts = [self.used, self.late, self.wasted, self.cancelled, *self.dropped.values()]
        return Tally(sum(part.experts for part in parts), sum(part.bytes for part in parts))
