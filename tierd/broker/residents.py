"""Who is in RAM: one expert's place in the arena and in the policy's order, making room, and moving out of the way."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

from tierd.broker.interfaces import Catalogue, ResidentMemory
from tierd.broker.records import Resident
from tierd.clock import Clock, Timer
from tierd.policy.policy import EvictionPolicy
from tierd.prefetch.hint_book import HintBook
from tierd.requests import BrokerStats, EvictionReason

__all__ = ["ClearingOut", "Residents"]

# Moving experts out of the way holds everything else up: some milliseconds of copying at a time.
_MOVED_BYTES = 16 << 20
_MOVE_SECONDS = 0.01


class Residents:
    """Residents of the arena, in step with its slots and with the policy.

    A read that runs counts for the policy, too: it was told of the expert when the read began.

    Args:
        memory: the arena.
        policy: who leaves.
        catalogue: sizes of records.
        stats: where evictions are counted.
        in_use: whether a session uses an expert just now without having asked; another one leaves if there is one,
            since that session would have to throw its work away.
        book: told of who leaves. Prefetched experts whose layer is still to come leave after all others.

    Attributes:
        most_at_once: how many experts one request may name.
    """

    def __init__(
        self,
        memory: ResidentMemory,
        policy: EvictionPolicy,
        catalogue: Catalogue,
        stats: BrokerStats,
        in_use: Callable[[int], bool],
        book: HintBook,
    ) -> None:
        self.most_at_once = 1
        self._book = book
        self._memory = memory
        self._policy = policy
        self._catalogue = catalogue
        self._stats = stats
        self._in_use = in_use
        self._resident: dict[int, Resident] = {}

    def __len__(self) -> int:
        return len(self._resident)

    def __iter__(self) -> Iterator[int]:
        return iter(self._resident)

    def __contains__(self, flat: object) -> bool:
        return flat in self._resident

    def get(self, flat: int) -> Resident | None:
        """Where the expert is; None if it is not in RAM."""
        return self._resident.get(flat)

    def granted(self, flat: int) -> bool:
        """Whether the expert is in RAM and some session relies on it."""
        resident = self._resident.get(flat)
        return resident is not None and self._memory.grants(resident.slot) > 0

    def evictable(self, flat: int) -> bool:
        """Whether the expert is in RAM and nobody relies on it."""
        resident = self._resident.get(flat)
        return resident is not None and not self._memory.grants(resident.slot)

    def idle(self, flat: int) -> bool:
        """Whether the expert is in RAM, and nobody relies on it, is seen to use it just now, or is about to use it."""
        return self._in_usable_slot(flat) and not self._in_use(flat) and not self._book.live(flat)

    def lacking(self, wanted: Iterable[int], used: Iterable[int], reading: Container[int]) -> int:
        """Slots that a request needs beside those that are granted and those that are being read into.

        Args:
            wanted: flat numbers of what it asks for.
            used: of what its session uses without asking, as long as it is in RAM.
            reading: of what is being read.
        """
        new = sum(1 for flat in wanted if flat not in reading and not self.granted(flat))
        return new + sum(map(self.evictable, used))

    def landed(self, flat: int, slot: int) -> Resident:
        """A read of the expert ended well: publish it."""
        resident = self._resident[flat] = Resident(slot, self._memory.publish(slot))
        return resident

    def make_room(self, count: int) -> list[int]:
        """`count` free slots: unused ones first, then those of the policy's victims, behind one fence."""
        slots: list[int] = []
        victims: list[int] = []
        while len(slots) + len(victims) < count:
            slot = self._memory.take()
            if slot is not None:
                slots.append(slot)
                continue
            victim = self._policy.victim(self.idle)
            if victim is None:
                victim = self._policy.victim(self._in_usable_slot)
            if victim is None:
                raise AssertionError(f"admission promised room that is not there: {self._memory!r}")
            victims.append(self._evicted(victim, EvictionReason.DEMAND).slot)
        if victims:
            self._memory.unpublish(victims)
        return slots + victims

    def vacate(self, flat: int) -> int:
        """The idle expert leaves for one that is read ahead; returns its slot, free for a read."""
        slot = self._evicted(flat, EvictionReason.PREFETCH).slot
        self._memory.unpublish([slot])
        return slot

    def clear_out(self, reading: int, most_bytes: int) -> bool:
        """After the arena became smaller: evict what is too much, and move the others down, hot ones too.

        Args:
            reading: reads in flight, which will become residents.
            most_bytes: roughly how much to copy in this call.

        Returns:
            False if something is left that can be done at once; call again.
        """
        while len(self._resident) + reading > self._memory.slots:
            victim = self._policy.victim(self.evictable)
            if victim is None:
                return True
            self._memory.drop(self._evicted(victim, EvictionReason.SHRINK).slot)
        for flat, resident in list(self._resident.items()):
            if self._memory.usable(resident.slot) or self._memory.grants(resident.slot):
                continue
            if most_bytes <= 0:
                return False
            to = self._memory.take()
            if to is None:
                return True
            nbytes = self._catalogue.record(flat).nbytes
            self._resident[flat] = Resident(to, self._memory.move(resident.slot, to, nbytes))
            most_bytes -= nbytes
        return True

    def _in_usable_slot(self, flat: int) -> bool:
        return self.evictable(flat) and self._memory.usable(self._resident[flat].slot)

    def _evicted(self, flat: int, reason: EvictionReason) -> Resident:
        self._policy.removed(flat)
        self._stats.evicted[reason] += 1
        self._book.evicted(flat)
        return self._resident.pop(flat)


class ClearingOut:
    """Empties the slots that an arena lost, piece by piece, until nothing is left in them.

    Args:
        residents: who is in RAM.
        memory: the arena.
        clock: for going on a little later.
        reading: tells how many reads are in flight.
        then: called after each piece; there may be room now.
    """

    def __init__(
        self,
        residents: Residents,
        memory: ResidentMemory,
        clock: Clock,
        reading: Callable[[], int],
        then: Callable[[], None],
    ) -> None:
        self._residents = residents
        self._memory = memory
        self._clock = clock
        self._reading = reading
        self._then = then
        self._timer: Timer | None = None

    @property
    def finished(self) -> bool:
        """Whether all that is in RAM or on its way has its place in the present size."""
        return self._memory.settled and len(self._residents) + self._reading() <= self._memory.slots

    def begin(self) -> None:
        """Do what can be done now, and the rest as grants end and reads land."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        done = self._residents.clear_out(self._reading(), _MOVED_BYTES)
        if not self.finished:
            self._timer = self._clock.call_later(_MOVE_SECONDS if done else 0.0, self.begin)
        self._then()
