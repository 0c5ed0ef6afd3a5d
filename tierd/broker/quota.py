"""What one session may have of the daemon at once, whatever it asks for: the rest is the others'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tierd.errors import UsageError

__all__ = ["NO_QUOTA", "SessionQuota"]


@dataclass(frozen=True, slots=True)
class SessionQuota:
    """Bounds of each session. Nothing is refused for them: a node asks in smaller waves, reads wait, hints are dropped.

    A node that fetches experts as bytes has a session for each of its streams.

    Attributes:
        experts: granted to it at once, because it asked; None: as many as a request may name on this arena.
        read_bytes: of its reads at the drives; one read always goes. None: as many as its turns allow.
        hints: experts that it hinted and that wait to be read.
    """

    experts: int | None = None
    read_bytes: int | None = None
    hints: int = 256

    def __post_init__(self) -> None:
        """UsageError for a bound that lets nothing through."""
        if (self.experts is not None and self.experts < 1) or (self.read_bytes is not None and self.read_bytes < 1):
            raise UsageError("a session's quota of experts or of bytes must be at least 1")
        if self.hints < 0:
            raise UsageError("a session's quota of hints must be at least 0")

    def most(self, fitting: int) -> int:
        """Experts that a session may ask for at once where so many fit into the arena."""
        return fitting if self.experts is None else min(fitting, self.experts)


NO_QUOTA: Final = SessionQuota()
"""What the arena, turns at the drives and the book of hints bound by themselves."""
