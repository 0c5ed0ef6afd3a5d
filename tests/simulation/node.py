"""A compute node on the virtual clock: it walks through layers, and has the habits that its seed gives it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Protocol

from simulation.clock import TICK

from tierd.errors import LimitExceeded
from tierd.prefetch.hint import Hint
from tierd.requests import AcquireRequest, Granted, Phase, Reason, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.ledger import Asked
    from simulation.world import World

__all__ = ["Actor", "Node", "NodeHabits"]

_ABSENT_EXPERT = 1 << 31


class Actor(Protocol):
    """Something that acts in a simulated world by calls on its clock."""

    @property
    def finished(self) -> bool:
        """Whether it will do nothing more. When all actors have finished, the daemon is stopped."""

    def start(self) -> None:
        """Ask the clock for the first call."""


@dataclass(frozen=True, slots=True)
class NodeHabits:
    """How a node behaves; probabilities are per request.

    Attributes:
        steps: layers that it asks for.
        whole_layers: it wants every expert of a layer, in waves of as many as an acquire may name.
        top_k: experts of a layer otherwise, cut to what an acquire may name.
        favourites: how many experts per layer its router prefers; 0 for no preference.
        compute: most ticks between the last answer and the next request.
        deadline: shortest and longest deadline in ticks.
        releases: it releases and thinks before it asks again, instead of leaving that to the next request.
        hasty: it asks for something else, or releases, before all is answered.
        cancels: it cancels what is unanswered, some time after it asked.
        repeats: it asks again for what failed, as a repeated request.
        greedy: a request that breaks the limits goes before.
        stale: a release and a cancel of an old acquire go before.
        dies: the process is gone some time after it asked, whatever it waits for or holds.
        revives: a dead one comes back as a new session.
        silent: after this request it says nothing more until its life line closes.
        hints: it hints for the layers to come after it asked: right guesses, wrong ones and nonsense.
        says: it says which tokens a step computes on before it asks for the step's first layer.
    """

    steps: int = 4
    whole_layers: bool = False
    top_k: int = 2
    favourites: int = 0
    compute: int = 4
    deadline: tuple[int, int] = (4096, 8192)
    releases: float = 0.5
    hasty: float = 0.0
    cancels: float = 0.0
    repeats: float = 0.5
    greedy: float = 0.0
    stale: float = 0.0
    dies: float = 0.0
    revives: float = 0.5
    silent: float = 0.0
    hints: float = 0.0
    says: float = 0.0


class _State(Enum):
    THINKING = "thinking"
    WAITING = "waiting"
    SILENT = "silent"
    GONE = "gone"


class Node:
    """One session at the broker, and its listener."""

    def __init__(self, world: World, session_id: int, habits: NodeHabits, rng: Random) -> None:
        self.id = session_id
        self._world = world
        self._habits = habits
        self._rng = rng
        self._state = _State.THINKING
        self._acquires = 0
        self._steps = 0
        self._layer = rng.randrange(world.store.layers)
        self._step = 0
        self._foreseen: dict[int, tuple[int, ...]] = {}
        self._waves: deque[AcquireRequest] = deque()
        self._asked: Asked | None = None

    def __repr__(self) -> str:
        return f"<Node {self.id}: {self._state.value}, acquire {self._acquires}>"

    @property
    def finished(self) -> bool:
        """Whether the session is closed."""
        return self._state is _State.GONE

    # The session's life.

    def start(self) -> None:
        """Open the session, and ask soon."""
        self._world.log("open", self.id)
        self._world.ledger.opened(self.id)
        self._world.broker.open_session(self.id, self)
        self._later(self._habits.compute, self._next)

    def _close(self, why: str) -> None:
        self._world.log("close", self.id, why)
        self._state = _State.GONE
        self._world.broker.close_session(self.id)
        self._world.ledger.closed(self.id)
        self._world.broker.close_session(self.id)

    def _die(self) -> None:
        if self._state is _State.GONE:
            return
        self._close("died")
        if self._chance(self._habits.revives):
            self._world.add_node(self._habits)

    # Asking.

    def _next(self) -> None:
        """The next wave or layer, or the end."""
        if self._state is _State.GONE:
            return
        if not self._waves:
            if self._steps == self._habits.steps:
                self._close("left")
                return
            self._steps += 1
            self._waves.extend(self._plan())
        if self._chance(self._habits.greedy):
            self._ask_too_much()
        if self._chance(self._habits.stale):
            self._speak_of_old_acquires()
        request = self._waves.popleft()
        if self._asked is not None and self._chance(self._habits.releases):
            self._release()
            self._later(self._habits.compute, lambda: self._ask(request))
        else:
            self._ask(request)

    def _plan(self) -> list[AcquireRequest]:
        """The requests of one layer."""
        world, habits, rng = self._world, self._habits, self._rng
        self._layer = (self._layer + 1) % world.store.layers
        self._step += self._layer == 0
        if self._layer == 0 and self._chance(habits.says):
            tokens = [rng.randrange(3) for _ in range(rng.choice((1, 1, 1, 2, 9)))]
            world.log("say", self.id, self._step, tokens)
            world.broker.said(self.id, self._step, tokens)
        everything = range(world.store.experts_per_layer)
        most = world.broker.max_experts_per_acquire
        if habits.whole_layers:
            wanted = list(everything)
        else:
            pool = everything[: habits.favourites] if habits.favourites and rng.random() < 0.8 else everything
            wanted = rng.sample(pool, min(habits.top_k, most, len(pool)))
            foreseen = self._foreseen.pop(self._layer, ())
            wanted = [*dict.fromkeys([*foreseen[:1], *wanted])][:most]
        phase = Phase.PREFILL if habits.whole_layers else Phase.DECODE
        return [self._request(tuple(wanted[n : n + most]), phase) for n in range(0, len(wanted), most)]

    def _request(self, experts: tuple[int, ...], phase: Phase, *, repeated: bool = False) -> AcquireRequest:
        self._acquires += 1
        deadline = self._rng.randint(*self._habits.deadline) * TICK
        return AcquireRequest(self._acquires, self._layer, experts, phase, deadline, repeated, step=self._step)

    def _ask(self, request: AcquireRequest) -> None:
        world, habits = self._world, self._habits
        if self._state is _State.GONE:
            return
        flats = {expert: world.store.flat(request.layer, expert) for expert in request.experts}
        world.log("acquire", self.id, request.id, request.layer, request.experts, request.deadline)
        self._state = _State.WAITING
        self._asked = asked = world.ledger.asking(self.id, request, flats, world.clock.time())
        world.broker.acquire(self.id, request)
        world.ledger.asked_for(self.id)
        if self._chance(habits.hints):
            self._hint()
        if self._chance(habits.dies):
            self._later(world.patience, self._die)
        if self._chance(habits.cancels):
            self._later(world.patience, lambda: self._cancel(asked))
        if self._chance(habits.hasty):
            self._later(world.patience, lambda: self._move_on(asked))
        if self._chance(habits.silent):
            self._state = _State.SILENT
            world.clock.call_later(world.life_line, self._die)

    def _hint(self) -> None:
        """Guesses for the next layer or the one after, some of which the router will share; sometimes nonsense."""
        world, rng = self._world, self._rng
        ahead = rng.choice((0, 1, 1, 1, 2))
        step, layer = divmod(self._step * world.store.layers + self._layer + ahead, world.store.layers)
        experts = tuple(rng.sample(range(world.store.experts_per_layer), rng.randint(0, 4)))
        probabilities = tuple(rng.random() for _ in experts[:3])
        if rng.random() < 0.1:
            layer, experts, probabilities = rng.choice((layer, -1, 999)), (*experts, 0, _ABSENT_EXPERT, 0), (2.0,)
        elif ahead:
            self._foreseen[layer] = experts
        hint = Hint(step, layer, experts, probabilities, rng.choice((0.0, 0.0, TICK, 8 * TICK, 1e9)))
        world.log("hint", self.id, hint)
        world.broker.hint(self.id, hint)

    def _ask_too_much(self) -> None:
        """Requests outside the limits are refused, change nothing and are counted nowhere."""
        world = self._world
        most = world.broker.max_experts_per_acquire
        for experts in ((), (0, 0), (0, _ABSENT_EXPERT), (-1,), tuple(range(most + 1))):
            world.log("greedy", self.id, experts)
            try:
                world.broker.acquire(self.id, AcquireRequest(1 << 40, self._layer, experts))
            except LimitExceeded:
                continue
            raise AssertionError(f"session {self.id} was allowed to ask for {experts} of {most}")

    def _speak_of_old_acquires(self) -> None:
        old = (self._asked.request.id if self._asked is not None else 0) - 1
        self._world.log("stale", self.id, old)
        self._world.broker.release(self.id, old)
        self._world.broker.cancel(self.id, old)

    # Giving up.

    def _release(self) -> None:
        assert self._asked is not None
        acquire_id = self._asked.request.id
        self._world.log("release", self.id, acquire_id)
        self._world.broker.release(self.id, acquire_id)
        self._world.ledger.released(self.id, acquire_id)
        self._asked = None
        self._state = _State.THINKING

    def _cancel(self, asked: Asked) -> None:
        if self._state is _State.GONE or asked is not self._asked:
            return
        self._world.log("cancel", self.id, asked.request.id)
        self._world.broker.cancel(self.id, asked.request.id)
        assert not asked.unanswered, f"session {self.id}: a cancelled acquire still waits for {asked.unanswered}"

    def _move_on(self, asked: Asked) -> None:
        if self._state is _State.WAITING and asked is self._asked and asked.unanswered:
            self._next()

    # Being answered.

    def answered(self, acquire_id: int, granted: list[Granted], refused: list[Refused]) -> None:
        """See `Listener.answered`."""
        world = self._world
        world.log("answer", self.id, acquire_id, granted, [(r.expert, r.reason) for r in refused])
        asked = world.ledger.answered(self.id, acquire_id, granted, refused)
        for refusal in refused:
            assert refusal.reason is Reason.CANCELLED or not world.must_serve, f"session {self.id}: {refusal}"
            if refusal.reason in (Reason.DATA_LOSS, Reason.UNAVAILABLE):
                sound = [drive.name for drive in world.drives if drive.sound(asked.flats[refusal.expert])]
                assert not sound, (
                    f"session {self.id}: expert {refusal.expert} failed, though {sound} is well: {refusal}"
                )
        if asked is self._asked and not asked.unanswered and self._state is _State.WAITING:
            self._state = _State.THINKING
            self._later(self._habits.compute, lambda: self._computed(asked))

    def _computed(self, asked: Asked) -> None:
        if self._state is not _State.THINKING or asked is not self._asked:
            return
        if asked.failed and not asked.request.repeated and self._chance(self._habits.repeats):
            self._waves.appendleft(self._request(tuple(asked.failed), asked.request.phase, repeated=True))
        self._next()

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self._rng.random() < probability

    def _later(self, most_ticks: int, call: Callable[[], object]) -> None:
        self._world.clock.call_later(self._rng.randint(0, most_ticks) * TICK, call)
