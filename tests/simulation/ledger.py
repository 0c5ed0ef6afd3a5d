"""What the sessions asked and were told, written down apart from the broker, and held against it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierd.requests import AcquireRequest, Granted, Outcome, Phase, PhaseCounts, Reason, Refused

__all__ = ["Asked", "Ledger", "SessionAccount"]

_COUNTED_AS = {Outcome.HIT: "hits", Outcome.MISS: "misses", Outcome.JOINED: "joined"}


@dataclass(slots=True, eq=False)
class Asked:
    """One acquire: what it wants, and what became of it so far."""

    number: int
    request: AcquireRequest
    flats: dict[int, int]
    due: float
    counts: PhaseCounts
    unanswered: set[int] = field(default_factory=set)
    granted: dict[int, int] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class SessionAccount:
    """One open session: its acquire, the one before while it is being ended, and the sum of its wishes."""

    current: Asked | None = None
    ending: Asked | None = None
    requests: int = 0
    step: int = 0
    used: dict[int, set[int]] = field(default_factory=dict)

    def recent(self) -> set[int]:
        """Experts that it was granted in this step or the last."""
        return self.used.get(self.step, set()) | self.used.get(self.step - 1, set())


class Ledger:
    """Every expert asked for, until it is answered; every grant, until it ends."""

    def __init__(self) -> None:
        self.sessions: dict[int, SessionAccount] = {}
        self.phases = {phase: PhaseCounts() for phase in Phase}
        self.repeated = 0
        self.unasked = 0
        self.asked = 0

    def opened(self, session_id: int) -> None:
        """A session begins."""
        self.sessions[session_id] = SessionAccount()

    def asking(self, session_id: int, request: AcquireRequest, flats: dict[int, int], now: float) -> Asked:
        """A sound request is about to be made."""
        account = self.sessions[session_id]
        self.asked += 1
        counts = PhaseCounts() if request.repeated else self.phases[request.phase]
        asked = Asked(self.asked, request, flats, now + request.deadline, counts, set(request.experts))
        counts.requests += len(request.experts)
        self.repeated += len(request.experts) if request.repeated else 0
        account.requests += len(request.experts)
        account.step = max(account.step, request.step)
        account.ending, account.current = account.current, asked
        return asked

    def used_unasked(self, session_id: int, phase: Phase, step: int) -> None:
        """A session counted, in that step, the use of a resident that it did not ask for."""
        self.phases[phase].requests += 1
        self.phases[phase].hits += 1
        self.unasked += 1
        account = self.sessions[session_id]
        account.requests += 1
        # Such a use tells the broker, too, that the session has gone on to this step.
        account.step = max(account.step, step)

    def asked_for(self, session_id: int) -> None:
        """The request was taken, so the one before has ended, every expert of it decided."""
        account = self.sessions[session_id]
        assert account.ending is None or not account.ending.unanswered, (
            f"session {session_id}: experts {account.ending.unanswered} of its acquire before were never decided"
        )
        account.ending = None

    def answered(self, session_id: int, acquire_id: int, granted: list[Granted], refused: list[Refused]) -> Asked:
        """The broker's answer; AssertionError if it answers what was not asked, or twice."""
        account = self.sessions[session_id]
        asked = next(
            (a for a in (account.current, account.ending) if a is not None and a.request.id == acquire_id), None
        )
        assert asked is not None, f"session {session_id} is told about acquire {acquire_id}, which has ended"
        for expert in [grant.expert for grant in granted] + [refusal.expert for refusal in refused]:
            assert expert in asked.unanswered, (
                f"session {session_id}, acquire {acquire_id}: expert {expert} was answered twice or not wanted"
            )
            asked.unanswered.remove(expert)
        for grant in granted:
            asked.granted[asked.flats[grant.expert]] = grant.word
            account.used.setdefault(asked.request.step, set()).add(asked.flats[grant.expert])
            counted = _COUNTED_AS[grant.outcome]
            setattr(asked.counts, counted, getattr(asked.counts, counted) + 1)
        for refusal in refused:
            if refusal.reason is Reason.CANCELLED:
                asked.counts.cancelled += 1
            else:
                asked.counts.failed += 1
                asked.failed.append(refusal.expert)
        return asked

    def released(self, session_id: int, acquire_id: int) -> None:
        """The session gave the acquire up; the broker was told."""
        account = self.sessions[session_id]
        if account.current is not None and account.current.request.id == acquire_id:
            assert not account.current.unanswered, (
                f"session {session_id}: a released acquire left {account.current.unanswered} undecided"
            )
            account.current = None

    def closed(self, session_id: int) -> None:
        """The session has ended; what it still waited for counts as cancelled, and nobody is told."""
        asked = self.sessions.pop(session_id).current
        if asked is not None:
            asked.counts.cancelled += len(asked.unanswered)

    def open_acquires(self) -> list[tuple[int, Asked]]:
        """Acquires that have not ended, with their sessions."""
        return [(n, account.current) for n, account in self.sessions.items() if account.current is not None]
