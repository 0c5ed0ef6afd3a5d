"""The heart: one request for a layer's experts becomes ready experts, hits first, one read per expert.

The broker is an event-driven state machine on one thread. It waits for nothing and knows no sockets: sessions call
it, drives call it back, a clock calls it at deadlines. So the daemon, the tests and a simulation on a virtual clock
run the very same code.

How a request goes:

1. `acquire` hurries what is on its way ahead, ends what the session still held, and queues the request. A session that
   waits therefore holds nothing, so sessions cannot wait for each other in a circle, however small the arena is.
2. The head of the queue is admitted when all its experts can be in RAM at once: those that are granted or being read
   already cost nothing, the others need a free slot or one that nobody is granted.
3. Residents are granted at once (hits). For the rest the broker joins a running read, or evicts and starts one.
4. As reads land, their experts are published, granted to every session that waits for them, and answered.

Residents that a session reads without asking are counted by the session, in memory that it shares; see `UnaskedUses`.
While nobody waits, experts that were hinted or likely used before are read; see `ReadingAhead`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tierd.broker.fair_reads import FairReads
from tierd.broker.interfaces import Catalogue, ResidentMemory, SessionMemory
from tierd.broker.quota import NO_QUOTA, SessionQuota
from tierd.broker.reading_ahead import PrefetchOptions, ReadingAhead
from tierd.broker.records import Acquire, Reading, Resident, Session, check_request
from tierd.broker.residents import ClearingOut, Residents
from tierd.broker.unasked import NoSessionMemory, UnaskedUses
from tierd.clock import Clock
from tierd.devices.device import Device
from tierd.errors import ChecksumMismatch, DataLoss, DriveError, LimitExceeded
from tierd.policy.policy import EvictionPolicy
from tierd.prefetch.hint import Hint
from tierd.prefetch.hint_book import HintBook
from tierd.requests import AcquireRequest, BrokerStats, Granted, Listener, Outcome, Phase, Reason, Refused

__all__ = ["Broker"]


class Broker:
    """Answers sessions' requests from the arena and the drive."""

    def __init__(
        self,
        *,
        catalogue: Catalogue,
        memory: ResidentMemory,
        policy: EvictionPolicy,
        device: Device,
        clock: Clock,
        max_experts_per_acquire: int,
        sessions: SessionMemory | None = None,
        on_wait: Callable[[Outcome, float], None] = lambda _outcome, _seconds: None,
        prefetch: PrefetchOptions | None = None,
        quota: SessionQuota = NO_QUOTA,
    ) -> None:
        if not 1 <= max_experts_per_acquire <= memory.slots:
            raise LimitExceeded(
                f"an acquire may name 1 to {memory.slots} experts (the arena's slots), not {max_experts_per_acquire}"
            )
        book, options = HintBook(quota.hints), prefetch or PrefetchOptions()
        self._stats = BrokerStats(prefetch=book.counts)
        self._catalogue, self._memory, self._policy = catalogue, memory, policy
        self._device, self._clock, self._on_wait, self._quota = device, clock, on_wait, quota
        self._sessions: dict[int, Session] = {}
        self._reading: dict[int, Reading] = {}
        self._unasked = UnaskedUses(sessions or NoSessionMemory(), self._stats, policy, catalogue)
        self._resident = Residents(memory, policy, catalogue, self._stats, self._unasked.in_use, book)
        terms = (self._submit, lambda: len(self._sessions), options.depth, lambda flat: catalogue.record(flat).nbytes)
        self.fair = FairReads(*terms, most_bytes=quota.read_bytes)
        self.ahead = ReadingAhead(
            book,
            catalogue=catalogue,
            memory=memory,
            policy=policy,
            device=device,
            clock=clock,
            residents=self._resident,
            reading=self._reading,
            sessions=self._sessions,
            fair=self.fair,
            start=self._read,
            options=options,
        )
        self.background, self._unasked.used = self.ahead.background, self.ahead.used
        self.max_experts_per_acquire = self._resident.most_at_once = quota.most(max_experts_per_acquire)
        self._queue: deque[Acquire] = deque()
        self._starting = 0  # requests that are half begun: a drive may answer at once
        self._clearing = ClearingOut(self._resident, memory, clock, lambda: len(self._reading), self._admit)

    def __repr__(self) -> str:
        return (
            f"<Broker {len(self._resident)}/{self._memory.slots} resident, {self._memory.granted} granted, "
            f"{len(self._reading)} reading, {len(self._queue)} queued, {len(self._sessions)} sessions>"
        )

    # What sessions call.

    def open_session(self, session_id: int, listener: Listener) -> None:
        """A session begins; its answers go to `listener`."""
        if session_id in self._sessions:
            raise LimitExceeded(f"session {session_id} is open already")
        self._sessions[session_id] = Session(session_id, listener, self.max_experts_per_acquire)
        self._unasked.begin(session_id)

    def close_session(self, session_id: int) -> None:
        """A session ends: its grants and its place in the queue end with it. Harmless when it has ended."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._end_acquire(session, "the session ended", tell=False)
            self._unasked.end(session_id)
            self.ahead.ended(session_id)
            self._policy.ended(session_id)
            self._admit()

    def acquire(self, session_id: int, request: AcquireRequest) -> None:
        """Queue a request; every expert of it is answered exactly once through the session's listener.

        Raises:
            LimitExceeded: no experts, too many, one twice, or one that the store does not have. Nothing was counted.
        """
        session = self._sessions[session_id]
        wanted, used = check_request(request, session.most, self._catalogue)
        self.ahead.asked(session_id, request.step, request.layer, wanted)
        self._end_acquire(session, "the session asked for something else", tell=True)
        self._unasked.tell(self._known, session_id)
        self._unasked.told(session_id, used)
        counts = self._stats.asked(request.phase, len(wanted), repeated=request.repeated)
        acquire = Acquire(session, request, wanted, self._clock.time(), counts, used)
        session.asks(acquire)
        acquire.timer = self._clock.call_later(request.deadline, lambda: self._expire(acquire))
        self._queue.append(acquire)
        self._admit(ahead=False)
        self.ahead.reached(session_id, request.step, request.layer, wanted, used)
        self._admit()

    def release(self, session_id: int, acquire_id: int) -> None:
        """The session no longer reads what the acquire granted; unanswered experts of it are cancelled."""
        session = self._sessions[session_id]
        if session.acquire is not None and session.acquire.request.id == acquire_id:
            self._end_acquire(session, "the session released it", tell=True)
            self._admit()

    def cancel(self, session_id: int, acquire_id: int) -> None:
        """Stop waiting for what the acquire still lacks; what it was granted stays granted."""
        acquire = self._sessions[session_id].acquire
        if acquire is not None and acquire.request.id == acquire_id:
            self._refuse_rest(acquire, Reason.CANCELLED, "cancelled by the node", tell=True)
            self._admit()

    def hint(self, session_id: int, hint: Hint) -> None:
        """A session will probably want these experts soon: never answered, and harmless if wrong."""
        session = self._sessions[session_id]
        if hint.step != session.looked:  # A step without requests so far: the policy does not know what is used.
            session.looked = hint.step
            self._unasked.tell(self._known, session_id)
        self.ahead.hint(session_id, hint)
        self._admit()

    def said(self, session_id: int, step: int, tokens: Sequence[int]) -> None:
        """A session says which tokens a step of it computes on: never answered, and harmless if wrong."""
        self._unasked.tell(self._known, session_id)
        self.ahead.said(self._sessions[session_id].id, step, tokens)
        self._admit()

    # What operators ask.

    @property
    def stats(self) -> BrokerStats:
        """The counts as they are now, with what sessions counted themselves."""
        self._unasked.count()
        return self._stats

    def tell_uses(self) -> None:
        """Let the policy know of uses without a message now, and not only with the next request."""
        self._unasked.tell(self._known)

    def pending(self) -> int:
        """Wanted experts not yet answered, repeated ones left out: counted from the live state, not from the sums."""
        acquires = [s.acquire for s in self._sessions.values() if s.acquire is not None]
        return sum(len(a.unanswered) for a in acquires if not a.request.repeated)

    def grants(self, session_id: int) -> int:
        """Experts that the session holds now."""
        session = self._sessions.get(session_id)
        return len(session.acquire.granted) if session is not None and session.acquire is not None else 0

    def requests(self, session_id: int) -> int:
        """Experts that the session has asked for since it began, repeated ones included."""
        session = self._sessions.get(session_id)
        return session.requests + self._unasked.of(session_id) if session is not None else 0

    def session_ids(self) -> list[int]:
        """Open sessions."""
        return list(self._sessions)

    @property
    def queued(self) -> int:
        """Requests that wait for room."""
        return len(self._queue)

    @property
    def reading(self) -> int:
        """Reads in flight."""
        return len(self._reading)

    @property
    def settled(self) -> bool:
        """Whether everything has its place after the arena's size changed last."""
        return self._clearing.finished

    def being_read(self) -> list[int]:
        """Flat numbers of the experts whose reads are in flight."""
        return list(self._reading)

    def resident(self) -> list[int]:
        """Flat numbers of the experts in RAM."""
        return list(self._resident)

    # What operators change.

    def warm(self, flats: Iterable[int], depth: int) -> None:
        """Read these experts, the first ones first, into free slots while nobody waits for a drive.

        Args:
            flats: flat numbers; those in RAM are passed over.
            depth: reads in flight at a time.
        """
        self.background.begin(flats, depth)
        self._admit()

    def resized(self, max_experts_per_acquire: int) -> list[int]:
        """The arena has another number of slots: sessions that begin now may ask for so many experts at once.

        What does not fit any more is evicted or moved a little later, see `ClearingOut`.

        Returns:
            Sessions that were told more than fits now. They must be ended; their nodes come back.
        """
        self.max_experts_per_acquire = self._resident.most_at_once = self._quota.most(max_experts_per_acquire)
        self._clearing.begin()
        return [session.id for session in self._sessions.values() if session.most > self._memory.slots]

    # Admission.

    def _admit(self, *, ahead: bool = True) -> None:
        """Start the requests that find room; where all do, and unless told otherwise, what nobody waits for as well."""
        while self._queue and (
            self._fits(head := self._queue[0]) or (self.ahead.make_room(head.wanted) and self._fits(head))
        ):
            self._start(self._queue.popleft())
        if ahead and not self._queue and not self._starting:
            self.ahead.go_on()

    def _fits(self, acquire: Acquire) -> bool:
        """Whether all wanted experts can be in RAM at once beside what others hold."""
        room = self._memory.slots - self._memory.granted - len(self._reading)
        wanted, used = acquire.wanted, acquire.used
        return len(wanted) + len(used) <= room or self._resident.lacking(wanted, used, self._reading) <= room

    def _start(self, acquire: Acquire) -> None:
        acquire.queued = False
        session, used = acquire.session, [*self._begin(acquire), *acquire.wanted]
        hits = []
        for flat, expert in acquire.wanted.items():
            if (resident := self._resident.get(flat)) is not None:
                self._policy.used(flat)
                hits.append(self._grant(acquire, resident, expert, Outcome.HIT))
        starting: list[int] = []
        for flat in (flat for flat in acquire.wanted if flat not in self._resident):
            acquire.pending[flat] = Outcome.JOINED if flat in self._reading else Outcome.MISS
            if (reading := self._reading.get(flat)) is not None:
                self._policy.used(flat)
                reading.waiters.append(acquire)
                self.fair.joined(session.id, flat)
            else:
                starting.append(flat)
        for flat, slot in zip(starting, self._resident.make_room(len(starting)), strict=True):
            self._policy.inserted(flat)
            self._policy.used(flat)
            self._begin_read(flat, Reading(slot, [acquire], begun=self._clock.time()))
        if hits:
            session.listener.answered(acquire.request.id, hits, [])
        self._starting += 1
        self.fair.begin(session.id, starting)
        # The drives have what is wanted; all else can wait.
        self.ahead.used(session.id, acquire.request.step, used)
        self._starting -= 1
        self._settle(acquire)

    def _read(self, flat: int, reading: Reading) -> None:
        self._begin_read(flat, reading)
        self._submit(flat, ahead=not reading.background)

    def _begin_read(self, flat: int, reading: Reading) -> None:
        self._memory.fill(reading.slot, flat)
        self._reading[flat] = reading

    def _submit(self, flat: int, *, ahead: bool = False) -> None:
        slot, landed = self._reading[flat].slot, partial(self._landed, flat)
        self._device.submit(self._catalogue.record(flat), slot, self._memory, landed, ahead=ahead)

    def _begin(self, acquire: Acquire) -> list[int]:
        """Tell the policy who asks, and keep what the session uses without asking where it is; returns that."""
        session, request = acquire.session, acquire.request
        self._policy.visit(session.id, session.step, request.layer, prefill=request.phase is Phase.PREFILL)
        if (expectation := self._unasked.expectation(session.id)) is not None:
            self._policy.expected(session.id, expectation)
        used = []
        for flat in acquire.used:
            if (resident := self._resident.get(flat)) is not None:
                used.append(flat)
                self._memory.grant(resident.slot)
                acquire.granted.append(resident)
        self._policy.used_many(used)
        return used

    def _known(self, flat: int) -> bool:
        return flat in self._resident or flat in self._reading

    # What the drive calls back.

    def _landed(self, flat: int, error: DriveError | None, slot: int) -> None:
        """The read of an expert ended, in the slot that it was given or in a spare one."""
        reading = self._reading.pop(flat)
        self.ahead.landed(flat, reading, good=error is None)
        if error is not None:
            self._memory.give_back(slot)
            self._policy.removed(flat)
            reason = Reason.DATA_LOSS if isinstance(error, DataLoss | ChecksumMismatch) else Reason.UNAVAILABLE
            for acquire in reading.waiters:
                self._refuse(acquire, [flat], reason, str(error), tell=True)
        else:
            resident = self._resident.landed(flat, slot)
            for acquire in reading.waiters:
                granted = self._grant(acquire, resident, acquire.wanted[flat], acquire.pending.pop(flat))
                acquire.session.listener.answered(acquire.request.id, [granted], [])
                self._settle(acquire)
        self.fair.ended(flat)
        self._admit()

    # Grants and answers.

    def _grant(self, acquire: Acquire, resident: Resident, expert: int, outcome: Outcome) -> Granted:
        self._memory.grant(resident.slot)
        acquire.granted.append(resident)
        waited = self._clock.time() - acquire.asked_at
        self._stats.wait_seconds[outcome] += waited
        self._on_wait(outcome, waited)
        acquire.counts.granted(outcome)
        return Granted(expert, resident.word, outcome)

    def _settle(self, acquire: Acquire) -> None:
        """With the last answer the deadline has no more to say."""
        if not acquire.pending and not acquire.queued and acquire.timer is not None:
            acquire.timer.cancel()
            acquire.timer = None
            self.ahead.waited(acquire.session.id, self._clock.time() - acquire.asked_at)

    def _refuse(self, acquire: Acquire, flats: Sequence[int], reason: Reason, detail: str, *, tell: bool) -> None:
        for flat in flats:
            acquire.pending.pop(flat, None)
        acquire.counts.refused(reason, len(flats))
        self._settle(acquire)
        if tell and flats:
            refused = [Refused(acquire.wanted[flat], reason, detail) for flat in flats]
            acquire.session.listener.answered(acquire.request.id, [], refused)

    def _refuse_rest(self, acquire: Acquire, reason: Reason, detail: str, *, tell: bool) -> None:
        """Everything unanswered is refused; a read that began goes on, for others; one that waits for its turn ends."""
        rest = list(acquire.unanswered)
        if acquire.queued:
            self._queue.remove(acquire)
            acquire.queued = False
        else:
            for flat in rest:
                reading = self._reading[flat]
                reading.waiters.remove(acquire)
                if self.fair.given_up(flat, [waiter.session.id for waiter in reading.waiters]):
                    self.ahead.undo(flat, reading.slot)
        self._refuse(acquire, rest, reason, detail, tell=tell)

    def _end_acquire(self, session: Session, why: str, *, tell: bool) -> None:
        acquire, session.acquire = session.acquire, None
        if acquire is None:
            return
        if acquire.unanswered:
            self._refuse_rest(acquire, Reason.CANCELLED, why, tell=tell)
        for resident in acquire.granted:
            self._memory.ungrant(resident.slot)
        acquire.granted.clear()

    def _expire(self, acquire: Acquire) -> None:
        acquire.timer = None
        self._refuse_rest(acquire, Reason.DEADLINE_EXCEEDED, acquire.too_late(), tell=True)
        self._admit()
