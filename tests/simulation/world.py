"""One history of the daemon: the real broker, policy and arena on virtual time, among virtual nodes and drives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from random import Random

from simulation.clock import VirtualClock
from simulation.drive import DriveHabits, ObservedDevice, VirtualDrive
from simulation.drive_changes import DriveChanges
from simulation.invariants import check_at_rest, check_invariants
from simulation.ledger import Ledger
from simulation.memory import ObservedPolicy, PlainSessions, plain_arena
from simulation.node import Actor, Node, NodeHabits
from simulation.prefetch_promise import check_read
from simulation.reader import UnlockedReader
from simulation.records import RECORD_BYTES, VirtualStore
from simulation.scenarios import SCENARIOS, Scenario
from simulation.size_changes import SizeChanges
from simulation.unasked_node import UnaskedHabits, UnaskedNode
from structlog.testing import capture_logs

from tierd.broker.broker import Broker
from tierd.broker.reading_ahead import PrefetchOptions
from tierd.devices.drive import Drive
from tierd.devices.replicas import ReplicaSet
from tierd.policy.policies import make_policy
from tierd.prefetch.history_guess import HistoryGuess
from tierd.prefetch.throttle import Throttle

__all__ = ["SimulationFailure", "World", "simulate"]

_MOST_EVENTS = 20_000
_SHOWN_EVENTS = 25


class SimulationFailure(AssertionError):
    """A history in which something went wrong, and how to see it again."""


class World:
    """A composition of actors around one broker. Add actors, then `run`."""

    def __init__(self, scenario: Scenario, seed: str) -> None:
        self.seed = seed
        self.events: list[tuple[object, ...]] = []
        self.patience = scenario.patience
        self.life_line = scenario.life_line
        self.clock = VirtualClock(self.rng("clock"))
        self.store = VirtualStore(scenario.layers, scenario.experts_per_layer, scenario.shards)
        self.arena, self.payload, self.table = plain_arena(
            slots=scenario.slots,
            slot_bytes=RECORD_BYTES,
            experts=len(self.store),
            spares=scenario.spares,
            most_slots=scenario.most_slots,
        )
        self.policy = ObservedPolicy(make_policy(scenario.policy))
        self.ledger = Ledger()
        self.sessions = PlainSessions(len(self.store))
        self.replicated = scenario.replicated
        self.must_serve = scenario.must_serve
        self.resizes = scenario.size_changes > 0
        self.vacated = 0
        self.drives = [self._drive(f"drive{n}", habits) for n, habits in enumerate(scenario.drives)]
        replicas = self._replicas(scenario.drives) if scenario.replicated else None
        self.device = ObservedDevice(replicas or self.drives[0], self.arena, partial(check_read, self))
        self.broker = Broker(
            catalogue=self.store,
            memory=self.arena,
            policy=self.policy,
            device=self.device,
            clock=self.clock,
            max_experts_per_acquire=min(scenario.most, scenario.slots),
            sessions=self.sessions,
            prefetch=PrefetchOptions(
                depth=lambda: scenario.depth,
                most_per_hint=scenario.most_per_hint,
                throttle=Throttle() if scenario.throttled else None,
                guesses=self._guesses(scenario),
                guess_throttle=Throttle() if scenario.throttled else None,
            ),
            quota=scenario.quota,
        )
        self.actors: list[Actor] = []
        self._sessions = 0
        self._running = False
        for habits in scenario.nodes:
            self.add_node(habits)
        for unasked in scenario.unasked_nodes:
            self.add_unasked_node(unasked)
        if scenario.unlocked_reads:
            self.add(UnlockedReader(self, scenario.unlocked_reads, self.rng("reader")))
        if scenario.drive_changes and replicas is not None:
            self.add(DriveChanges(self, replicas, scenario.drive_changes, self.rng("operator")))
        if scenario.size_changes:
            least = self.broker.max_experts_per_acquire
            self.add(SizeChanges(self, scenario.size_changes, least, self.rng("sizes")))

    @property
    def clearing_out(self) -> bool:
        """Whether the arena shrank and not everything has left yet; the broker must go on with that by itself."""
        return self.broker._clearing._timer is not None

    def _guesses(self, scenario: Scenario) -> HistoryGuess | None:
        layers, top_k = scenario.layers, max((habits.top_k for habits in scenario.nodes), default=1)
        if not scenario.guesses:
            return None
        return HistoryGuess(range(layers), [scenario.experts_per_layer] * layers, top_k)

    def _drive(self, name: str, habits: DriveHabits) -> VirtualDrive:
        return VirtualDrive(name, store=self.store, clock=self.clock, rng=self.rng(name), habits=habits, log=self.log)

    def _replicas(self, habits: Sequence[DriveHabits]) -> ReplicaSet:
        everything = range(self.store.shards)
        shards = [everything if h.shards is None else h.shards for h in habits]
        return ReplicaSet(self.clock, [Drive(drive, held) for drive, held in zip(self.drives, shards, strict=True)])

    def rng(self, name: str) -> Random:
        """A source of chance for one actor, so that another actor's draws do not move its own."""
        return Random(f"{self.seed}/{name}")

    def log(self, *facts: object) -> None:
        """Write down what happens now."""
        self.events.append((self.clock.time(), *facts))

    def add(self, actor: Actor) -> None:
        """Let an actor take part, from now on if the history runs already."""
        self.actors.append(actor)
        if self._running:
            actor.start()

    def add_node(self, habits: NodeHabits) -> None:
        """Let another node take part."""
        self._sessions += 1
        self.add(Node(self, self._sessions, habits, self.rng(f"node {self._sessions}")))

    def add_unasked_node(self, habits: UnaskedHabits) -> None:
        """Let another node take part that uses residents without a message."""
        self._sessions += 1
        self.add(UnaskedNode(self, self._sessions, habits, self.rng(f"node {self._sessions}")))

    def run(self) -> None:
        """Let everything happen, with all invariants checked after each event, until nothing is left to happen.

        Raises:
            AssertionError: an invariant does not hold.
        """
        self._running = True
        for actor in tuple(self.actors):
            actor.start()
        steps, stopped = 0, False
        check_invariants(self)
        while self.clock.step():
            steps += 1
            assert steps < _MOST_EVENTS, f"the history does not end: {self.broker!r}"
            check_invariants(self)
            if not stopped and all(actor.finished for actor in self.actors):
                stopped = True
                self.log("stop")
                self.device.close()
                check_invariants(self)
        check_at_rest(self)

    def digest(self) -> str:
        """A hash of all that happened: equal for equal histories."""
        return blake2b("\n".join(map(repr, self.events)).encode(), digest_size=16).hexdigest()


def simulate(scenario: str, seed: int) -> World:
    """Run one history from its seed.

    Args:
        scenario: a name in `SCENARIOS`.
        seed: any number; the same one gives the same history, event by event.

    Raises:
        SimulationFailure: an invariant did not hold, or the code under test raised; the message says how to replay.
    """
    name = f"{scenario}/{seed}"
    world = World(SCENARIOS[scenario](Random(name)), name)
    try:
        with capture_logs():
            world.run()
    except Exception as error:
        last = "\n".join(f"  {event}" for event in world.events[-_SHOWN_EVENTS:])
        raise SimulationFailure(
            f"{type(error).__name__}: {error}\n"
            f"The last of {len(world.events)} events:\n{last}\n"
            f"Replay: python tests/simulation/run.py --scenario {scenario} --seed {seed} --events"
        ) from error
    return world
