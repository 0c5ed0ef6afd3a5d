"""What the broker keeps in mind: residents, running reads, requests and sessions."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierd.clock import Timer
from tierd.requests import AcquireRequest, Listener, Outcome, PhaseCounts

__all__ = ["Acquire", "Reading", "Resident", "Session"]


@dataclass(frozen=True, slots=True)
class Resident:
    """An expert in RAM: its slot, and its word in the residency table."""

    slot: int
    word: int


@dataclass(slots=True, eq=False)
class Reading:
    """A read in flight, and the requests that wait for it."""

    waiters: list[Acquire] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Acquire:
    """A request in the queue, or admitted and not yet released.

    Attributes:
        session: who asks.
        request: what for.
        wanted: flat number to the layer's expert number, in the router's order.
        asked_at: time on the broker's clock.
        counts: where its experts are counted.
        used: flat numbers that the session reads without asking, while they are resident.
        pending: admitted and not yet readable.
        granted: what the session holds.
        queued: it waits for room.
        timer: its deadline, while something is unanswered.
    """

    session: Session
    request: AcquireRequest
    wanted: dict[int, int]
    asked_at: float
    counts: PhaseCounts
    used: list[int]
    pending: dict[int, Outcome] = field(default_factory=dict)
    granted: list[Resident] = field(default_factory=list)
    queued: bool = True
    timer: Timer | None = None


@dataclass(slots=True, eq=False)
class Session:
    """An open session: its one request, how many experts it asked for by message, and its highest step."""

    id: int
    listener: Listener
    acquire: Acquire | None = None
    requests: int = 0
    step: int = 0
