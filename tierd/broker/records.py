"""What the broker keeps in mind: residents, running reads, requests and sessions; and which requests it takes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tierd.broker.interfaces import Catalogue
from tierd.clock import Timer
from tierd.errors import LimitExceeded
from tierd.requests import AcquireRequest, Listener, Outcome, PhaseCounts

__all__ = ["Acquire", "Reading", "Resident", "Session", "check_request"]


@dataclass(frozen=True, slots=True)
class Resident:
    """An expert in RAM: its slot, and its word in the residency table."""

    slot: int
    word: int


@dataclass(slots=True, eq=False)
class Reading:
    """A read in flight: the slot that the drive was given, who waits, whether it is warm-up, and when it began."""

    slot: int
    waiters: list[Acquire] = field(default_factory=list)
    background: bool = False
    begun: float = 0.0


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

    @property
    def unanswered(self) -> Collection[int]:
        """Flat numbers of what is not decided."""
        return self.wanted if self.queued else self.pending

    def too_late(self) -> str:
        """What the node is told when its deadline has passed."""
        where = "for room in the arena" if self.queued else "for the drive"
        return (
            f"layer {self.request.layer}: {len(self.unanswered)} experts did not come within "
            f"{self.request.deadline:g} s; the request was waiting {where}"
        )


@dataclass(slots=True, eq=False)
class Session:
    """An open session: its one request, how many experts it asked for by message, and its highest step.

    `most` is how many experts it was told that it may ask for at once, `looked` the step in which what it used without
    asking was looked at last.
    """

    id: int
    listener: Listener
    most: int
    acquire: Acquire | None = None
    requests: int = 0
    step: int = 0
    looked: int = -1

    def asks(self, acquire: Acquire) -> None:
        """Its one request from now on."""
        self.acquire = acquire
        self.requests += len(acquire.wanted)
        self.step, self.looked = max(self.step, acquire.request.step), acquire.request.step


def check_request(request: AcquireRequest, most: int, catalogue: Catalogue) -> tuple[dict[int, int], list[int]]:
    """Flat numbers of what is wanted, with the layer's own, and of what is used without asking.

    Raises:
        LimitExceeded: no experts, more than `most`, one twice, or one that the store does not have.
    """
    count = len(request.experts) + len(request.resident)
    if not request.experts or count > most:
        raise LimitExceeded(
            f"acquire {request.id} names {count} experts; between 1 and {most} fit", hint="Ask for more in waves."
        )
    wanted = {catalogue.flat(request.layer, expert): expert for expert in request.experts}
    used = [catalogue.flat(request.layer, expert) for expert in request.resident]
    if len(wanted.keys() | set(used)) != count:
        raise LimitExceeded(f"acquire {request.id} names an expert of layer {request.layer} twice")
    return wanted, used
