"""A compute node that uses residents without a message, as `tierd.client` does: load, use, compare, count.

It asks for the others while it uses the residents, and for those whose bytes changed under it. What it keeps must be
right, and what it counts must be what the broker counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from simulation.clock import TICK
from simulation.records import RECORD_BYTES

from tierd.arena.table import ABSENT, unpack
from tierd.requests import AcquireRequest, Granted, Phase, Refused

if TYPE_CHECKING:
    from simulation.ledger import Asked
    from simulation.world import World

__all__ = ["UnaskedHabits", "UnaskedNode"]


@dataclass(frozen=True, slots=True)
class UnaskedHabits:
    """How such a node behaves.

    Attributes:
        steps: layers that it visits.
        top_k: experts of a layer.
        favourites: how many experts of a layer its router prefers.
        use: most ticks that using a resident takes.
        marks: it says what it uses.
        releases: chance that it releases before it goes on.
        dies: chance, per visit, that the process is gone in the middle of it.
    """

    steps: int = 8
    top_k: int = 3
    favourites: int = 4
    use: int = 8
    marks: bool = True
    releases: float = 0.3
    dies: float = 0.0


class UnaskedNode:
    """One session and its listener.

    Attributes:
        kept: residents whose use was certain.
        discarded: residents whose use was not.
    """

    def __init__(self, world: World, session_id: int, habits: UnaskedHabits, rng: Random) -> None:
        self.id = session_id
        self.kept = 0
        self.discarded = 0
        self._world = world
        self._habits = habits
        self._rng = rng
        self._acquires = 0
        self._step = 0
        self._layer = 0
        self._phase = Phase.DECODE
        self._gone = False
        self._asked: Asked | None = None
        self._using = 0
        self._torn: list[int] = []

    def __repr__(self) -> str:
        return f"<UnaskedNode {self.id}: step {self._step}, {self.kept} kept, {self.discarded} discarded>"

    @property
    def finished(self) -> bool:
        """Whether the session is closed."""
        return self._gone

    def start(self) -> None:
        """Open the session and visit the first layer soon."""
        self._world.log("open", self.id)
        self._world.ledger.opened(self.id)
        self._world.broker.open_session(self.id, self)
        self._later(self._visit)

    def _close(self, why: str) -> None:
        self._gone = True
        self._world.log("close", self.id, why)
        self._world.sessions.end(self.id)
        self._world.broker.close_session(self.id)
        self._world.ledger.closed(self.id)

    def _visit(self) -> None:
        world, habits, rng = self._world, self._habits, self._rng
        if self._step == habits.steps:
            self._close("left")
            return
        self._step += 1
        self._layer = rng.randrange(world.store.layers)
        self._phase = rng.choice(tuple(Phase))
        most = world.broker.max_experts_per_acquire
        pool = range(habits.favourites if rng.random() < 0.8 else world.store.experts_per_layer)
        wanted = rng.sample(pool, min(habits.top_k, most, len(pool)))
        found = {}
        for expert in wanted:
            flat = world.store.flat(self._layer, expert)
            if habits.marks:
                world.sessions.begin_use(self.id, flat)
            if (word := world.table.load(flat)) != ABSENT:
                found[expert] = word
            else:
                world.sessions.end_use(self.id, flat)
        absent = [expert for expert in wanted if expert not in found]
        if absent:
            self._ask(absent, tuple(found))
        self._using = len(found)
        for expert, word in found.items():
            flat = world.store.flat(self._layer, expert)
            half = self._read(word, 0)
            self._later(lambda e=expert, f=flat, w=word, h=half: self._used(e, f, w, h), habits.use)  # type: ignore[misc]
        if habits.dies and rng.random() < habits.dies:
            self._later(lambda: self._close("died"), habits.use)

    def _ask(self, experts: list[int], resident: tuple[int, ...]) -> None:
        world = self._world
        self._acquires += 1
        request = AcquireRequest(
            self._acquires, self._layer, tuple(experts), self._phase, 8192 * TICK, resident=resident, step=self._step
        )
        flats = {expert: world.store.flat(self._layer, expert) for expert in experts}
        world.log("acquire", self.id, request.id, self._layer, experts, resident)
        self._asked = world.ledger.asking(self.id, request, flats, world.clock.time())
        world.broker.acquire(self.id, request)
        world.ledger.asked_for(self.id)

    def _read(self, word: int, half: int) -> bytes:
        begin = unpack(word)[1] * RECORD_BYTES + half * RECORD_BYTES // 2
        return bytes(self._world.payload.data[begin : begin + RECORD_BYTES // 2])

    def _used(self, expert: int, flat: int, word: int, half: bytes) -> None:
        """The use of a resident is over: the verdict."""
        world = self._world
        if self._gone:
            return
        read = half + self._read(word, 1)
        if world.table.load(flat) == word:
            assert read == world.store.content[flat], f"session {self.id} kept wrong bytes of expert {flat}"
            self.kept += 1
            world.sessions.note_use(self.id, flat, self._step, prefill=self._phase is Phase.PREFILL)
            world.ledger.used_unasked(self.id, self._phase, self._step)
        else:
            self.discarded += 1
            self._torn.append(expert)
        world.sessions.end_use(self.id, flat)
        world.log("used", self.id, flat, word, self.kept, self.discarded)
        self._using -= 1
        self._go_on()

    def answered(self, acquire_id: int, granted: list[Granted], refused: list[Refused]) -> None:
        """See `Listener.answered`."""
        self._world.log("answer", self.id, acquire_id, granted, [(r.expert, r.reason) for r in refused])
        self._world.ledger.answered(self.id, acquire_id, granted, refused)
        # Not from within the broker's call.
        self._world.clock.call_later(TICK, self._go_on)

    def _go_on(self) -> None:
        """When all of the layer is there: what was torn, then the next layer."""
        asked = self._asked
        if self._gone or self._using or (asked is not None and asked.unanswered):
            return
        if self._torn:
            torn, self._torn = self._torn, []
            self._ask(torn, ())
            return
        if asked is not None:
            self._asked = None
            if self._rng.random() < self._habits.releases:
                self._world.log("release", self.id, asked.request.id)
                self._world.broker.release(self.id, asked.request.id)
                self._world.ledger.released(self.id, asked.request.id)
        self._using = 1  # nothing else goes on before the next layer
        self._later(self._next)

    def _next(self) -> None:
        if not self._gone:
            self._using = 0
            self._visit()

    def _later(self, call: Callable[[], object], most: int = 4) -> None:
        self._world.clock.call_later(self._rng.randint(0, most) * TICK, lambda: self._gone or call())
