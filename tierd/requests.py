"""The words in which sessions and broker talk: what is asked, what is answered, and how it is counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from tierd.prefetch.counts import PrefetchCounts

__all__ = [
    "AcquireRequest",
    "BrokerStats",
    "EvictionReason",
    "Granted",
    "Listener",
    "Outcome",
    "Phase",
    "PhaseCounts",
    "Reason",
    "Refused",
]


class Phase(Enum):
    """What kind of step wants the experts."""

    PREFILL = "prefill"
    DECODE = "decode"

    # An enum's own hash is of its name, computed anew each time; every expert is counted by these some times.
    __hash__ = object.__hash__


class Outcome(Enum):
    """How a wanted expert was come by."""

    HIT = "hit"
    MISS = "miss"
    JOINED = "joined"

    __hash__ = object.__hash__


class Reason(Enum):
    """Why a wanted expert was not delivered."""

    DATA_LOSS = "data_loss"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"


class EvictionReason(Enum):
    """What an expert's room in RAM was wanted for."""

    DEMAND = "demand"
    PREFETCH = "prefetch"
    SHRINK = "shrink"


class AcquireRequest(NamedTuple):
    """Experts of one layer that a session wants to read.

    Attributes:
        id: the session's own number for it, rising.
        layer: model layer number.
        experts: distinct expert numbers, in the router's order.
        phase: prefill or decode.
        deadline: seconds until what is unanswered fails.
        repeated: the same need was asked for before (new attach, or bytes changed under use).
        resident: other experts of the layer that the session found in RAM and uses without asking, in the router's
            order. Those still there are granted with the rest; they are neither counted nor answered here.
        step: decode step or prefill chunk, rising in a session.
    """

    id: int
    layer: int
    experts: tuple[int, ...]
    phase: Phase = Phase.DECODE
    deadline: float = 60.0
    repeated: bool = False
    resident: tuple[int, ...] = ()
    step: int = 0


class Granted(NamedTuple):
    """An expert that is readable at the slot named by the residency table's `word`, until release."""

    expert: int
    word: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Refused:
    """An expert that will not come, and why."""

    expert: int
    reason: Reason
    detail: str


class Listener(Protocol):
    """A session's ear: called on the broker's thread, and must not call the broker from within."""

    def answered(self, acquire_id: int, granted: list[Granted], refused: list[Refused]) -> None:
        """Some experts of an acquire are decided. Every wanted expert is decided exactly once."""


@dataclass(slots=True)
class PhaseCounts:
    """requests = hits + misses + joined + cancelled + failed + those still pending."""

    requests: int = 0
    hits: int = 0
    misses: int = 0
    joined: int = 0
    cancelled: int = 0
    failed: int = 0

    def granted(self, outcome: Outcome) -> None:
        """One more expert is readable."""
        match outcome:
            case Outcome.HIT:
                self.hits += 1
            case Outcome.MISS:
                self.misses += 1
            case Outcome.JOINED:
                self.joined += 1

    def refused(self, reason: Reason, experts: int) -> None:
        """So many experts will not come."""
        if reason is Reason.CANCELLED:
            self.cancelled += experts
        else:
            self.failed += experts

    @property
    def answered(self) -> int:
        """Requests that are decided."""
        return self.hits + self.misses + self.joined + self.cancelled + self.failed


@dataclass(slots=True)
class BrokerStats:
    """What the broker counted since it started.

    Attributes:
        phases: counts of wanted experts by phase.
        unasked: hits that no message asked for, counted by the sessions; among the requests and hits of the phases.
        repeated: wanted experts that were asked for again; in none of the phase counts.
        evicted: experts that left RAM, by what their room was wanted for.
        prefetch: what became of hinted experts.
        wait_seconds: from being asked for to being granted, summed by outcome.
    """

    phases: dict[Phase, PhaseCounts] = field(default_factory=lambda: {phase: PhaseCounts() for phase in Phase})
    unasked: int = 0
    repeated: int = 0
    evicted: dict[EvictionReason, int] = field(default_factory=lambda: dict.fromkeys(EvictionReason, 0))
    prefetch: PrefetchCounts = field(default_factory=PrefetchCounts)
    wait_seconds: dict[Outcome, float] = field(default_factory=lambda: dict.fromkeys(Outcome, 0.0))

    @property
    def evictions(self) -> int:
        """Experts that left RAM, for whatever reason."""
        return sum(self.evicted.values())

    def asked(self, phase: Phase, experts: int, *, repeated: bool) -> PhaseCounts:
        """So many experts are wanted; returns where their answers are counted."""
        counts = PhaseCounts() if repeated else self.phases[phase]
        counts.requests += experts
        self.repeated += experts * repeated
        return counts

    def total(self) -> PhaseCounts:
        """The counts of all phases together."""
        sums = PhaseCounts()
        for counts in self.phases.values():
            sums.requests += counts.requests
            sums.hits += counts.hits
            sums.misses += counts.misses
            sums.joined += counts.joined
            sums.cancelled += counts.cancelled
            sums.failed += counts.failed
        return sums
