"""Reads that nobody waits for: hinted and guessed experts first, then those that were likely used before.

Nothing here delays a request. Such a read is handed to a drive only while no request waits for room or for its turn;
the drive begins it when it has nothing else to do. It leaves room for a whole request beside it. As long as no drive
has begun it, it is promoted when somebody asks for it, and taken back when nobody wants it any more or its room is
wanted. A hinted expert takes a free slot, or that of an expert which is worth less than it and was not used in this
step or the last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Final

from tierd.broker.background import BackgroundReads
from tierd.broker.interfaces import Catalogue, ResidentMemory
from tierd.broker.records import Reading
from tierd.broker.residents import Residents
from tierd.clock import Clock
from tierd.devices.device import Device
from tierd.errors import LimitExceeded
from tierd.policy.policy import EvictionPolicy
from tierd.prefetch.counts import DropReason
from tierd.prefetch.hint import Hint, likeliest
from tierd.prefetch.hint_book import HintBook, Hinted
from tierd.prefetch.hint_trust import HintTrust
from tierd.prefetch.history_guess import HistoryGuess
from tierd.prefetch.step_uses import StepUses
from tierd.prefetch.throttle import LEAST_PROBABILITY, Throttle
from tierd.prefetch.token_costs import TokenCosts

__all__ = ["PrefetchOptions", "ReadingAhead"]

_UNUSED_SHARE: Final = 10
"""One slot in so many may hold a prefetched expert that nobody has used yet."""
_UNKNOWN_WORTH: Final = 0.5
"""Of a resident where the policy has no measure: a guess must be likelier right than wrong to take its slot."""
_SMOOTHING: Final = 0.125
_HANDOVER_SECONDS: Final = 0.0005
"""From the end of a read to the next one that the broker hands over: work for as long waits at the drives, and one read
more, since reads end when it is least convenient. It costs nothing: what waits can be taken back."""


@dataclass(frozen=True, slots=True)
class PrefetchOptions:
    """Limits of prefetch.

    Attributes:
        depth: tells how many reads in flight keep all drives busy now.
        most_per_hint: experts of a hint that are taken up, the likeliest ones.
        throttle: learns how likely a hinted expert must be; None takes every one.
        guesses: foresees for sessions that send no hints; None: nobody does.
        guess_throttle: learns how likely its guesses must be; None takes every one.
    """

    depth: Callable[[], int] = lambda: 4
    most_per_hint: int = 16
    throttle: Throttle | None = None
    guesses: HistoryGuess | None = None
    guess_throttle: Throttle | None = None


class ReadingAhead:
    """Turns hints and warm-up into reads at the right moments.

    Args:
        book: for the hinted experts.
        catalogue: sizes of records.
        memory: the arena.
        policy: what residents are worth.
        device: takes reads back.
        clock: tells the time.
        residents: who is in RAM.
        reading: all reads in flight, the broker's own table.
        sessions: the open ones.
        fair: reads that sessions wait for and no drive has been given yet.
        start: begins the read of an expert into a slot.
        options: limits of prefetch.

    Attributes:
        background: what is read while not even a hint wants anything.
        book: as given.
        uses: who was used in this step or the last.
    """

    def __init__(
        self,
        book: HintBook,
        *,
        catalogue: Catalogue,
        memory: ResidentMemory,
        policy: EvictionPolicy,
        device: Device,
        clock: Clock,
        residents: Residents,
        reading: dict[int, Reading],
        sessions: Sized,
        fair: Sized,
        start: Callable[[int, Reading], None],
        options: PrefetchOptions,
    ) -> None:
        self.background = BackgroundReads()
        self.book = book
        self.uses = StepUses()
        self._catalogue = catalogue
        self._memory = memory
        self._policy = policy
        self._device = device
        self._clock = clock
        self._residents = residents
        self._reading = reading
        self._sessions = sessions
        self._fair = fair
        self._start = start
        self._options = options
        self._read_seconds = 0.0  # that the drives take for a record while they are busy
        self._landed_at = 0.0
        self._hinting: dict[int, int] = {}  # session -> the last step that it hinted for
        self._trust: dict[int, HintTrust] = {}  # by session
        self._costs = {True: TokenCosts(options.throttle), False: TokenCosts(options.guess_throttle)}

    @property
    def level(self) -> int:
        """The level of the throttle of hints, 0 for off; the highest one without a throttle."""
        return _level(self._options.throttle)

    @property
    def guess_level(self) -> int:
        """The same for the daemon's own guesses; 0 where it makes none."""
        return _level(self._options.guess_throttle) if self._options.guesses is not None else 0

    # What sessions bring about.

    def hint(self, session: int, hint: Hint) -> None:
        """Take a session's hint up, as far as it makes sense. From now on nothing is guessed for it."""
        if session not in self._hinting:
            self._costs[False].ended(session)
        self._hinting[session] = hint.step
        self._take_up(session, hint, self._options.throttle, self._trust.setdefault(session, HintTrust()))

    def said(self, session: int, step: int, tokens: Sequence[int]) -> None:
        """The session says which tokens a step computes on: its first layers can be guessed."""
        guesses = self._options.guesses
        if guesses is None or session in self._hinting:
            return
        self._costs[False].reached(session, step)
        for hint in guesses.said(session, step, tokens, self._known):
            self._guessed(session, hint)

    def _guessed(self, session: int, hint: Hint) -> None:
        self.book.counts.guessed += len(hint.experts)
        self._take_up(session, hint, self._options.guess_throttle)

    def _take_up(self, session: int, hint: Hint, throttle: Throttle | None, trust: HintTrust | None = None) -> None:
        counts = self.book.counts
        counts.hinted += len(hint.experts)
        offers = []
        for expert, probability in likeliest(hint.experts, hint.probabilities, self._options.most_per_hint):
            try:
                flat = self._catalogue.flat(hint.layer, expert)
            except LimitExceeded:
                continue
            offers.append((flat, self._catalogue.record(flat).nbytes, probability))
        counts.cut += len(hint.experts) - len(offers)
        if trust is not None and offers:
            flats, sizes, claimed = zip(*offers, strict=True)
            offers = list(zip(flats, sizes, trust.hint(hint.step, hint.layer, flats, claimed), strict=True))
        now = self._clock.time()
        least = throttle.least if throttle is not None else 0.0
        unwanted = self.book.hint(
            session, hint.step, hint.layer, offers, due=hint.due(now), known=self._known, least=least
        )
        self._take_back(unwanted)

    def asked(self, session: int, step: int, layer: int, wanted: Collection[int]) -> None:
        """The session asks for experts of that layer, by flat number; called before anything else is done about it.

        Drives go on with what of it is on its way ahead as with everything that is waited for. What its router has
        decided against is taken back; other reads ahead stay where they are, behind what is wanted.
        """
        for flat in wanted:
            if (reading := self._reading.get(flat)) is not None and not reading.waiters:
                self._device.promote(reading.slot)
        self._take_back(self.book.passed(session, step, layer, wanted))

    def make_room(self, wanted: Collection[int]) -> bool:
        """Take back all reads ahead but those of `wanted`, which finds no room; returns whether there were any."""
        return self._take_back([flat for flat in self.book.reading if flat not in wanted])

    def reached(self, session: int, step: int, layer: int, wanted: Collection[int], used: Collection[int] = ()) -> None:
        """The session has asked for experts of that layer: guesses are settled, and new ones are made.

        Args:
            session: who asks.
            step: in which step.
            layer: of these experts.
            wanted: flat numbers of those that it asks for.
            used: flat numbers of those that it found in RAM besides.
        """
        # A node that leaves off hinting, for a while or for good, shows no difference between levels.
        compared = self._hinting.get(session, step) >= step - 1
        if (trust := self._trust.get(session)) is not None:
            trust.reached(step, layer, {*wanted, *used})
        self._costs[session in self._hinting].reached(session, step, compared=compared)
        self._take_back(self.book.reached(session, step, layer, wanted))
        for flat, slot in self.background.make_way(self._reading, wanted, self._device.withdraw):
            self.undo(flat, slot)
        guesses = self._options.guesses
        if guesses is not None and session not in self._hinting:
            wants = self.guess_level > 0
            hint = guesses.reached(session, step, layer, wanted, used, self._known, guess=wants)
            if hint is not None:
                self._guessed(session, hint)

    def used(self, session: int, step: int, flats: Collection[int]) -> None:
        """The session uses the experts, or waits for them."""
        self.uses.used(session, step, flats)
        if self.book.unused:
            for flat in flats:
                self.book.used(flat)
        if self._options.guesses is not None and session not in self._hinting:
            for flat in flats:
                self._options.guesses.used(session, step, flat)

    def ended(self, session: int) -> None:
        """The session is over."""
        self.uses.ended(session)
        self._take_back(self.book.ended(session))
        self._costs[session in self._hinting].ended(session)
        self._hinting.pop(session, None)
        self._trust.pop(session, None)
        if self._options.guesses is not None:
            self._options.guesses.ended(session)

    def waited(self, session: int, seconds: float) -> None:
        """A request of the session has been answered; it waited so long for a drive."""
        self._costs[session in self._hinting].waited(seconds)

    # What drives bring about.

    def landed(self, flat: int, reading: Reading, *, good: bool) -> None:
        """A read of the expert has ended."""
        if good:
            now = self._clock.time()
            seconds = now - max(reading.begun, self._landed_at)
            self._landed_at = now
            smoothing = _SMOOTHING if self._read_seconds else 1.0
            self._read_seconds += smoothing * (seconds - self._read_seconds)
            self.book.arrived(flat)
        else:
            self.book.failed(flat)
        if reading.background:
            self.background.ended(good=good)

    def undo(self, flat: int, slot: int) -> None:
        """A read into that slot, asked for or not, was taken back before a drive began it."""
        del self._reading[flat]
        self._memory.give_back(slot)
        self._policy.removed(flat)

    # Beginning reads.

    def go_on(self) -> None:
        """Begin what may begin now. Called while no request waits for room."""
        self._read_hinted()
        if self.background and not self.book.waiting:
            self.background.go_on(self._reading, self._known, self._memory.take, self._read_in_background)

    def _read_hinted(self) -> None:
        while self.book.waiting and self._quiet():
            entry = self.book.best(self._clock.time(), self._read_seconds)
            if entry is None:
                return
            if self._known(entry.flat):
                # It came another way meanwhile.
                self.book.drop(entry.flat, DropReason.OVERTAKEN)
                continue
            slot = self._slot_for(entry)
            if slot is None:
                self.book.drop(entry.flat, DropReason.NO_ROOM)
                continue
            self.book.begun(entry.flat)
            self._policy.inserted(entry.flat)
            self._start(entry.flat, Reading(slot, begun=self._clock.time()))

    def _quiet(self) -> bool:
        """Whether another read would disturb nobody: none waits for its turn, and the next request finds room."""
        reading, memory = self._reading, self._memory
        # A session gives back what it holds when it asks again; what it holds is in the way of others only.
        held = memory.granted if len(self._sessions) > 1 else 0
        depth = self._options.depth()
        ahead = 2 + int(_HANDOVER_SECONDS / self._read_seconds) if self._read_seconds else depth
        most = min(ahead, max(1, memory.slots // _UNUSED_SHARE))
        return (
            len(reading) < depth
            and len(self.book.reading) < most
            and held + len(reading) + 1 + self._residents.most_at_once <= memory.slots
            and not len(self._fair)
        )

    def _slot_for(self, entry: Hinted) -> int | None:
        """A free slot, or that of the policy's victim where it is worth less than the guess."""
        full = self.book.unused >= max(1, self._memory.slots // _UNUSED_SHARE)
        if not full and (slot := self._memory.take()) is not None:
            return slot
        victim = self._useless() if full else self._policy.victim(self._spare)
        if victim is None:
            return None
        own = self._policy.worth(entry.flat)
        gain = max(own or 0.0, entry.gain(self._clock.time(), self._read_seconds))
        worth = self._policy.worth(victim)
        if gain <= (_UNKNOWN_WORTH if worth is None else worth):
            return None
        return self._residents.vacate(victim)

    def _spare(self, flat: int) -> bool:
        return not self.uses.recent(flat) and self._residents.idle(flat)

    def _useless(self) -> int | None:
        """The prefetched expert of the least worth among those whose layer has passed without a use.

        It is looked for among the prefetched ones, not in all of RAM: there may be none, and there may be many hints.
        """
        useless = filter(self._spare, self.book.landed)
        return min(useless, key=lambda flat: self._policy.worth(flat) or 0.0, default=None)

    def _read_in_background(self, flat: int, slot: int) -> None:
        self._policy.inserted(flat)
        self._start(flat, Reading(slot, background=True, begun=self._clock.time()))

    def _take_back(self, flats: Iterable[int]) -> bool:
        """Those that no drive has begun; returns whether there were any."""
        any_taken = False
        for flat in flats:
            slot = self._reading[flat].slot
            if self._device.withdraw(slot):
                self.undo(flat, slot)
                self.book.back(flat)
                any_taken = True
        return any_taken

    def _known(self, flat: int) -> bool:
        return flat in self._residents or flat in self._reading


def _level(throttle: Throttle | None) -> int:
    return throttle.level if throttle is not None else len(LEAST_PROBABILITY) - 1
