"""The hinted experts, from hint to end: who wants them, which one is next, and what became of them.

    waiting → reading → landed → used | wasted
       │         └→ late, failed, or back to waiting
       └→ cancelled | dropped

Pure: the caller says what time it is and what happened; nothing is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Final

from tierd.prefetch.counts import DropReason, PrefetchCounts, Tally

__all__ = ["HintBook", "Hinted", "Wish"]

_MOST_WAITING: Final = 1024


@dataclass(frozen=True, slots=True)
class Wish:
    """One session's guess: in which step, how likely, and when its layer is expected to start, if that is known."""

    step: int
    probability: float
    due: float | None


@dataclass(slots=True, eq=False)
class Hinted:
    """One expert that was hinted, by one session or several."""

    flat: int
    layer: int
    nbytes: int
    wishes: dict[int, Wish] = field(default_factory=dict)

    @property
    def probability(self) -> float:
        """That somebody will want it, taking the guesses as independent; 0 when all guessed layers have passed."""
        return 1 - prod(1 - wish.probability for wish in self.wishes.values())

    def gain(self, now: float, read_seconds: float) -> float:
        """Probability times the share of a read's time that a read begun now would save."""
        if len(self.wishes) == 1:
            (wish,) = self.wishes.values()
            if wish.due is None or read_seconds <= 0:
                return self.probability
            return self.probability * min(1.0, max(0.0, wish.due - now) / read_seconds)
        dues = [wish.due for wish in self.wishes.values() if wish.due is not None]
        if not dues or len(dues) < len(self.wishes) or read_seconds <= 0:
            return self.probability
        return self.probability * min(1.0, max(0.0, max(dues) - now) / read_seconds)


class HintBook:
    """All hinted experts that are not decided yet, and the counts of those that are.

    Args:
        most_of_a_session: hinted experts of one session that may wait.

    Attributes:
        counts: see `PrefetchCounts`.
        waiting: not read yet, by flat number.
        reading: being read, with nobody waiting.
        landed: in RAM and not used yet.
    """

    def __init__(self, most_of_a_session: int = 256) -> None:
        self._most_of_a_session = most_of_a_session
        self.counts = PrefetchCounts()
        self.waiting: dict[int, Hinted] = {}
        self.reading: dict[int, Hinted] = {}
        self.landed: dict[int, Hinted] = {}
        self._reached: dict[int, tuple[int, int]] = {}

    @property
    def unused(self) -> int:
        """Slots with a prefetched expert that nobody has used yet, or with one on its way."""
        return len(self.reading) + len(self.landed)

    def pending(self) -> Tally:
        """Issued and not decided: counted from the live entries, not from the sums."""
        entries = [*self.waiting.values(), *self.reading.values(), *self.landed.values()]
        return Tally(len(entries), sum(entry.nbytes for entry in entries))

    def live(self, flat: int) -> bool:
        """Whether the expert was prefetched, is not used yet, and its layer is still to come for somebody."""
        entry = self.landed.get(flat)
        return entry is not None and bool(entry.wishes)

    # Hints.

    def hint(
        self,
        session: int,
        step: int,
        layer: int,
        offers: Iterable[tuple[int, int, float]],
        *,
        due: float | None,
        known: Callable[[int], bool],
        least: float,
    ) -> list[int]:
        """Take a session's hint for a layer in place of its last one.

        Args:
            session: who hints.
            step: which step will want the experts.
            layer: which layer they are of.
            offers: flat number, bytes and probability of each, distinct, the likeliest first.
            due: when the layer is expected to start.
            known: whether an expert is in RAM or on its way.
            least: probability below which an expert is dropped.

        Returns:
            Reads that nobody wants any more; take them back if that can still be done, see `cancelled`.
        """
        counts = self.counts
        expired = (step, layer) <= self._reached.get(session, (-1, -1))
        named: set[int] = set()
        mine = sum(session in entry.wishes for entry in self.waiting.values())
        for flat, nbytes, probability in offers:
            named.add(flat)
            entry = self._entry(flat)
            if entry is not None or known(flat):
                counts.known += 1
                if entry is not None and not expired:
                    entry.wishes[session] = Wish(step, probability, due)
                continue
            counts.issued.add(nbytes)
            reason = None
            if expired:
                reason = DropReason.EXPIRED
            elif probability < least:
                reason = DropReason.THROTTLED
            elif mine >= self._most_of_a_session or len(self.waiting) >= _MOST_WAITING:
                reason = DropReason.OVERFLOW
            if reason is not None:
                counts.dropped[reason].add(nbytes)
                continue
            mine += 1
            self.waiting[flat] = Hinted(flat, layer, nbytes, {session: Wish(step, probability, due)})
        return self._forget(session, lambda entry: entry.layer == layer and entry.flat not in named)

    def passed(self, session: int, step: int, layer: int, wanted: Collection[int]) -> list[int]:
        """What `reached` will say of experts that are being read, which is urgent.

        Returns:
            See `hint`.
        """
        for entry in self.reading.values():
            wish = entry.wishes.get(session)
            if wish is not None and (wish.step, entry.layer) <= (step, layer):
                del entry.wishes[session]
        return [flat for flat, entry in self.reading.items() if not entry.wishes and flat not in wanted]

    def reached(self, session: int, step: int, layer: int, wanted: Collection[int]) -> list[int]:
        """The session's router has chosen `wanted`, flat numbers, in that layer: earlier guesses are settled.

        Returns:
            See `hint`.
        """
        before = self._reached.get(session)
        place = (step, layer) if before is None else max(before, (step, layer))
        self._reached[session] = place
        for flat in wanted:
            entry = self.waiting.pop(flat, None)
            if entry is not None:
                self.counts.dropped[DropReason.OVERTAKEN].add(entry.nbytes)

        given_up = []
        for entries in (self.waiting, self.reading, self.landed):
            for entry in entries.values():
                wish = entry.wishes.get(session)
                if wish is not None and (then := (wish.step, entry.layer)) <= place:
                    del entry.wishes[session]
                    if not entry.wishes and entries is self.waiting:
                        given_up.append((entry, then < place))
        for entry, too_late in given_up:
            del self.waiting[entry.flat]
            (self.counts.dropped[DropReason.EXPIRED] if too_late else self.counts.cancelled).add(entry.nbytes)
        return [flat for flat, entry in self.reading.items() if not entry.wishes and flat not in wanted]

    def ended(self, session: int) -> list[int]:
        """The session is over. Returns: see `hint`."""
        self._reached.pop(session, None)
        return self._forget(session, lambda _entry: True)

    # What becomes a read.

    def best(self, now: float, read_seconds: float) -> Hinted | None:
        """The waiting expert to read next: the nearest layer of each session first, then by what is gained.

        Those that could only begin when their layer is expected to have started are dropped.
        """
        nearest: dict[int, tuple[int, int]] = {}
        for entry in list(self.waiting.values()):
            for session, wish in list(entry.wishes.items()):
                if wish.due is not None and wish.due <= now:
                    del entry.wishes[session]
                    continue
                place = (wish.step, entry.layer)
                if session not in nearest or place < nearest[session]:
                    nearest[session] = place
            if not entry.wishes:
                self.drop(entry.flat, DropReason.DEADLINE)
        best, found = (False, -1.0), None
        for entry in self.waiting.values():
            near = False
            for session, wish in entry.wishes.items():
                near = near or nearest[session] == (wish.step, entry.layer)
            if near >= best[0] and (key := (near, entry.gain(now, read_seconds))) > best:
                best, found = key, entry
        return found

    def begun(self, flat: int) -> None:
        """The read of a waiting expert begins."""
        self.reading[flat] = self.waiting.pop(flat)

    def back(self, flat: int) -> None:
        """The read was taken back before a drive began; its turn comes later."""
        entry = self.reading.pop(flat)
        if entry.wishes:
            self.waiting[flat] = entry
        else:
            self.counts.cancelled.add(entry.nbytes)

    def drop(self, flat: int, reason: DropReason) -> None:
        """A waiting expert is given up."""
        self.counts.dropped[reason].add(self.waiting.pop(flat).nbytes)

    def arrived(self, flat: int) -> None:
        """The read ended well and nobody waited. Harmless for one that was not hinted."""
        if flat in self.reading:
            self.landed[flat] = self.reading.pop(flat)

    def failed(self, flat: int) -> None:
        """The read ended in an error. Harmless for one that was not hinted."""
        entry = self.reading.pop(flat, None)
        if entry is not None:
            self.counts.dropped[DropReason.FAILED].add(entry.nbytes)

    def used(self, flat: int) -> None:
        """Somebody uses the expert, or waits for its read. Harmless for one that was not hinted."""
        if (entry := self.reading.pop(flat, None)) is not None:
            self.counts.late.add(entry.nbytes)
        if (entry := self.landed.pop(flat, None)) is not None:
            self.counts.used.add(entry.nbytes)

    def evicted(self, flat: int) -> None:
        """The expert left RAM. Harmless for one that was used, or not hinted."""
        entry = self.landed.pop(flat, None)
        if entry is not None:
            self.counts.wasted.add(entry.nbytes)

    def _entry(self, flat: int) -> Hinted | None:
        return self.waiting.get(flat) or self.reading.get(flat) or self.landed.get(flat)

    def _forget(self, session: int, which: Callable[[Hinted], bool]) -> list[int]:
        """End the session's wishes for some entries; what nobody wants then is cancelled. Returns: see `hint`."""
        for entries in (self.waiting, self.reading, self.landed):
            for entry in entries.values():
                if session in entry.wishes and which(entry):
                    del entry.wishes[session]
        for flat in [flat for flat, entry in self.waiting.items() if not entry.wishes]:
            self.counts.cancelled.add(self.waiting.pop(flat).nbytes)
        return [flat for flat, entry in self.reading.items() if not entry.wishes]
