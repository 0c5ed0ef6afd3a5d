"""A broker moved by hand: reads land when the test says so, and time passes when it says so."""

from __future__ import annotations

from dataclasses import dataclass

from simulation.clock import VirtualClock
from simulation.memory import ObservedPolicy, PlainSessions, plain_arena
from simulation.records import RECORD_BYTES, VirtualStore

from tierd.arena.table import ABSENT, unpack
from tierd.broker.broker import Broker
from tierd.broker.reading_ahead import PrefetchOptions
from tierd.devices.device import AttemptMemory, DeviceStats, ReadDone, RecordRead
from tierd.errors import DriveError
from tierd.policy.lru import Lru
from tierd.policy.policy import EvictionPolicy
from tierd.prefetch.hint import Hint
from tierd.requests import AcquireRequest, Granted, Outcome, Phase, Reason, Refused

__all__ = ["BrokerByHand", "HeldDrive", "SessionByHand"]


@dataclass(slots=True, eq=False)
class _Held:
    read: RecordRead
    slot: int
    memory: AttemptMemory
    done: ReadDone
    ahead: bool


class HeldDrive:
    """A device whose reads end by `land` and `fail` only.

    Attributes:
        asked: flat numbers of all reads that were begun so far, in order.
        behind: reads ahead that begin when no others are held.
        held: reads that have not ended, by flat number.
        gone: when set, every read ends in this error before `submit` returns.
        begins: whether reads begin at once; those that have not begun can be taken back.
    """

    def __init__(self, store: VirtualStore) -> None:
        self.name = "held"
        self.stats = DeviceStats()
        self.asked: list[int] = []
        self.held: dict[int, _Held] = {}
        self.behind: list[_Held] = []
        self.gone: DriveError | None = None
        self.begins = True
        self._store = store

    def submit(
        self, read: RecordRead, slot: int, memory: AttemptMemory, done: ReadDone, *, ahead: bool = False
    ) -> None:
        """See `Device.submit`."""
        assert read.expert not in self.held, f"expert {read.expert} is read twice at a time"
        if ahead and any(not held.ahead for held in self.held.values()):
            self.behind.append(_Held(read, slot, memory, done, ahead=True))
        else:
            self._begin(_Held(read, slot, memory, done, ahead=ahead))

    def _begin(self, held: _Held) -> None:
        flat = held.read.expert
        self.asked.append(flat)
        self.held[flat] = held
        if self.gone is not None:
            self.fail(flat, self.gone)

    def promote(self, slot: int) -> None:
        """See `Device.promote`."""
        for held in self.behind:
            if held.slot == slot:
                self.behind.remove(held)
                held.ahead = False
                self._begin(held)
                return
        for held in self.held.values():
            held.ahead = held.ahead and held.slot != slot

    def withdraw(self, slot: int) -> bool:
        """See `Device.withdraw`."""
        for held in self.behind:
            if held.slot == slot:
                self.behind.remove(held)
                return True
        flat = next((flat for flat, held in self.held.items() if held.slot == slot), None)
        if self.begins or flat is None:
            return False
        del self.held[flat]
        return True

    def close(self) -> None:
        """Nothing to give back."""

    def land(self, *flats: int) -> None:
        """The reads end well."""
        for flat in flats:
            held = self.held.pop(flat)
            held.memory.view(held.slot, RECORD_BYTES)[:] = self._store.content[flat]
            held.done(None, held.slot)
            self._go_on()

    def fail(self, flat: int, error: DriveError) -> None:
        """The read ends in an error."""
        held = self.held.pop(flat)
        held.done(error, held.slot)
        self._go_on()

    def _go_on(self) -> None:
        while self.behind and not any(not held.ahead for held in self.held.values()):
            self._begin(self.behind.pop(0))


class SessionByHand:
    """A session and what it was told.

    Attributes:
        told: every answer in order: the expert, and how it was come by or why it was refused.
        granted: words of the latest acquire, by expert.
        details: texts of refusals, by expert.
    """

    def __init__(self, broker: Broker, session_id: int) -> None:
        self.id = session_id
        self.told: list[tuple[int, Outcome | Reason]] = []
        self.granted: dict[int, int] = {}
        self.details: dict[int, str] = {}
        self.acquires = 0
        self._broker = broker
        broker.open_session(session_id, self)

    def answered(self, acquire_id: int, granted: list[Granted], refused: list[Refused]) -> None:
        """See `Listener.answered`."""
        self.told += [(grant.expert, grant.outcome) for grant in granted]
        self.told += [(refusal.expert, refusal.reason) for refusal in refused]
        self.details.update({refusal.expert: refusal.detail for refusal in refused})
        if acquire_id == self.acquires:
            self.granted.update({grant.expert: grant.word for grant in granted})

    def ask(
        self,
        *experts: int,
        layer: int = 0,
        deadline: float = 60.0,
        repeated: bool = False,
        phase: Phase = Phase.DECODE,
        resident: tuple[int, ...] = (),
        step: int = 0,
    ) -> int:
        """Make a request; returns its number."""
        request = AcquireRequest(self.acquires + 1, layer, experts, phase, deadline, repeated, resident, step)
        before, self.granted = self.granted, {}
        self.acquires += 1
        try:
            self._broker.acquire(self.id, request)
        except BaseException:
            self.acquires -= 1
            self.granted = before
            raise
        return self.acquires

    def hint(
        self, *experts: int, layer: int = 1, step: int = 0, probabilities: tuple[float, ...] = (), lead: float = 0.0
    ) -> None:
        """Say what will probably be wanted."""
        self._broker.hint(self.id, Hint(step, layer, experts, probabilities, lead))

    def release(self) -> None:
        """Read no more of what was granted."""
        self._broker.release(self.id, self.acquires)

    def cancel(self) -> None:
        """Wait no more for what is lacking."""
        self._broker.cancel(self.id, self.acquires)

    def close(self) -> None:
        """Leave."""
        self._broker.close_session(self.id)


class BrokerByHand:
    """A broker over a store of `layers` x `experts`, with the daemon's arena of `slots`."""

    def __init__(
        self,
        *,
        slots: int,
        most: int | None = None,
        layers: int = 2,
        experts: int = 16,
        policy: EvictionPolicy | None = None,
        prefetch: PrefetchOptions | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.store = VirtualStore(layers, experts)
        self.arena, self.payload, self.table = plain_arena(
            slots=slots, slot_bytes=RECORD_BYTES, experts=len(self.store)
        )
        self.policy = ObservedPolicy(policy or Lru())
        self.drive = HeldDrive(self.store)
        self.sessions = PlainSessions(len(self.store))
        self.waited: list[tuple[Outcome, float]] = []
        self.broker = Broker(
            catalogue=self.store,
            memory=self.arena,
            policy=self.policy,
            device=self.drive,
            clock=self.clock,
            max_experts_per_acquire=slots if most is None else most,
            sessions=self.sessions,
            prefetch=prefetch,
            on_wait=lambda outcome, seconds: self.waited.append((outcome, seconds)),
        )
        self._sessions = 0

    def session(self) -> SessionByHand:
        """A new session."""
        self._sessions += 1
        return SessionByHand(self.broker, self._sessions)

    def resident(self) -> set[int]:
        """Flat numbers of what is published."""
        return {flat for flat, word in enumerate(self.table.words) if word != ABSENT}

    def make_resident(self, *flats: int) -> None:
        """Bring experts into RAM, least recently used first, held by nobody, and count afresh."""
        session = self.session()
        for flat in flats:
            layer, expert = divmod(flat, self.store.experts_per_layer)
            session.ask(expert, layer=layer)
            if flat in self.drive.held:
                self.drive.land(flat)
        session.close()
        self.drive.asked.clear()

    def bytes_behind(self, word: int) -> bytes:
        """What a node reads at a granted word."""
        begin = unpack(word)[1] * RECORD_BYTES
        return bytes(self.payload.data[begin : begin + RECORD_BYTES])
