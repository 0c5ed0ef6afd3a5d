"""Worlds to simulate: who takes part, on how much memory, over what kind of drive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from simulation.drive import DriveHabits
from simulation.node import NodeHabits
from simulation.records import RECORD_BYTES
from simulation.unasked_node import UnaskedHabits

from tierd.broker.quota import NO_QUOTA, SessionQuota
from tierd.policy.policies import POLICIES

__all__ = ["SCENARIOS", "Scenario"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One composition of actors.

    Attributes:
        layers: of the store.
        experts_per_layer: of the store.
        slots: of the arena.
        most: experts that an acquire may name.
        nodes: one entry per node.
        unasked_nodes: one entry per node that uses residents without a message.
        unlocked_reads: reads without a grant that a reader tries beside the nodes.
        drives: how each drive behaves.
        replicated: the drives hold copies, and a `tierd.devices.replicas.ReplicaSet` stands before them.
        shards: of the store.
        must_serve: nothing may fail, since one drive is well and deadlines are long enough to find out which.
        spares: slots of the arena that are kept back for attempts beside a running one.
        drive_changes: how often an operator takes a drive away, and brings it back, meanwhile.
        size_changes: how often an operator makes the arena smaller or larger, down to `most` slots.
        most_slots: how large it may become; 0 is as large as it is.
        policy: name of the eviction policy.
        depth: reads in flight up to which more are begun ahead.
        most_per_hint: experts of a hint that are taken up.
        throttled: prefetch is throttled by what it gains.
        guesses: the daemon guesses for nodes that send no hints.
        patience: most ticks after which a node cancels, moves on or dies.
        life_line: seconds after which the death of a silent node is noticed.
        quota: of each session.
    """

    layers: int
    experts_per_layer: int
    slots: int
    most: int
    nodes: tuple[NodeHabits, ...]
    drives: tuple[DriveHabits, ...] = (DriveHabits(),)
    replicated: bool = False
    shards: int = 1
    must_serve: bool = False
    spares: int = 0
    unasked_nodes: tuple[UnaskedHabits, ...] = ()
    unlocked_reads: int = 0
    drive_changes: int = 0
    size_changes: int = 0
    most_slots: int = 0
    policy: str = "lru"
    depth: int = 4
    most_per_hint: int = 3
    throttled: bool = False
    guesses: bool = False
    patience: int = 12
    life_line: float = 2.0
    quota: SessionQuota = NO_QUOTA


def _steady(rng: Random) -> Scenario:
    """Well-behaved nodes over a sound drive."""
    slots = rng.randint(2, 8)
    most = rng.randint(1, slots)
    habits = [
        NodeHabits(steps=rng.randint(2, 6), top_k=rng.randint(1, 4), favourites=rng.choice((0, 0, 2)))
        for _ in range(rng.randint(1, 4))
    ]
    layers, experts = rng.randint(1, 3), rng.randint(4, 8)
    return Scenario(
        layers,
        experts,
        slots,
        most,
        tuple(habits),
        policy=rng.choice(sorted(POLICIES)),
        unlocked_reads=rng.choice((0, 4)),
    )


def _waves(rng: Random) -> Scenario:
    """Several nodes want whole layers on an arena that holds one wave, or not even one for each."""
    slots = rng.randint(1, 3)
    node = NodeHabits(steps=2, whole_layers=True, compute=rng.randint(0, 3))
    nodes = (node,) * rng.randint(2, 4)
    return Scenario(
        2, rng.randint(3, 6), slots, rng.randint(1, slots), nodes, (DriveHabits(workers=rng.randint(1, 4)),)
    )


def _sick_drive(rng: Random) -> Scenario:
    """Every way in which a drive fails, under nodes that ask again."""
    drive = DriveHabits(
        workers=rng.randint(1, 6),
        slowest=rng.choice((2, 16, 64)),
        io_error=rng.choice((0, 0.1, 0.3)),
        short=rng.choice((0, 0.1)),
        flipped=rng.choice((0, 0.1)),
        hang=rng.choice((0, 0.05, 0.2)),
        hang_seconds=rng.choice((0.5, 5.0)),
        at_once=rng.choice((0, 0, 0.3)),
        damaged=rng.choice((0, 0.2)),
    )
    node = NodeHabits(steps=3, top_k=rng.randint(1, 3), deadline=(16, 512), repeats=0.7, cancels=0.1, dies=0.05)
    slots = rng.randint(2, 6)
    nodes = (node,) * rng.randint(1, 4)
    most, experts, spares = rng.randint(1, slots), rng.randint(3, 6), rng.choice((0, 2))
    return Scenario(2, experts, slots, most, nodes, (drive,), spares=spares)


def _rude_nodes(rng: Random) -> Scenario:
    """Nodes that change their mind, vanish, fall silent, and ask for what they may not have."""
    slots = rng.randint(1, 5)

    def node() -> NodeHabits:
        return NodeHabits(
            steps=rng.randint(2, 4),
            whole_layers=rng.random() < 0.2,
            top_k=rng.randint(1, 4),
            compute=rng.randint(0, 8),
            deadline=rng.choice(((1, 24), (256, 512))),
            releases=rng.random(),
            hasty=rng.choice((0, 0.4)),
            cancels=rng.choice((0, 0.4)),
            greedy=rng.choice((0, 0.2)),
            stale=0.2,
            dies=rng.choice((0, 0.2)),
            silent=rng.choice((0, 0, 0.15)),
        )

    nodes = tuple(node() for _ in range(rng.randint(2, 5)))
    drive = DriveHabits(workers=rng.randint(1, 4), slowest=rng.choice((4, 24)), hang=rng.choice((0, 0.05)))
    layers, experts, most = rng.randint(1, 3), rng.randint(3, 6), rng.randint(1, slots)
    # At a small depth, reads that are given up have not begun yet.
    depth = rng.choice((1, 4))
    quota = SessionQuota(rng.choice((None, 1, most)), rng.choice((None, 1, 2 * RECORD_BYTES)))
    return Scenario(layers, experts, slots, most, nodes, (drive,), depth=depth, quota=quota)


def _mirrors(rng: Random) -> Scenario:
    """Copies on several drives, whole and in part, each sick in its own way; sometimes one is well."""
    shards = rng.randint(1, 3)

    def drive(*, whole: bool) -> DriveHabits:
        return DriveHabits(
            workers=rng.randint(1, 4),
            slowest=rng.choice((2, 8, 64)),
            io_error=rng.choice((0, 0.1, 0.5)),
            short=rng.choice((0, 0, 0.2)),
            flipped=rng.choice((0, 0, 0.2)),
            hang=rng.choice((0, 0.05, 0.3)),
            hang_seconds=rng.choice((0.5, 5.0, 20.0)),
            at_once=rng.choice((0, 0, 0.3)),
            damaged=rng.choice((0, 0.3)),
            shards=None if whole else tuple(rng.sample(range(shards), rng.randint(1, shards))),
        )

    drives = [drive(whole=True)] + [drive(whole=rng.random() < 0.5) for _ in range(rng.randint(0, 2))]
    if rng.random() < 0.3:
        drives.append(DriveHabits(workers=2))
    node = NodeHabits(
        steps=rng.choice((3, 6, 20)),
        top_k=rng.randint(1, 3),
        deadline=rng.choice(((64, 2048), (8192, 16384))),
        dies=0.05,
    )
    slots = rng.randint(2, 6)
    return Scenario(
        layers=2,
        experts_per_layer=rng.randint(4, 8),
        slots=slots,
        most=rng.randint(1, slots),
        nodes=(node,) * rng.randint(1, 3),
        drives=tuple(drives),
        replicated=True,
        shards=shards,
        spares=rng.randint(0, len(drives) + 1),
        drive_changes=rng.choice((0, 0, 3)),
    )


def _one_sound_drive(rng: Random) -> Scenario:
    """One drive is well; the others do everything that drives do, up to hanging for longer than anyone waits.

    Every worker of a hanging drive holds a slot, and each of these reads needs another slot to be saved.
    """
    workers = rng.randint(1, 4)
    sick = tuple(
        DriveHabits(
            workers=workers,
            slowest=rng.choice((4, 64)),
            io_error=rng.choice((0, 0.3)),
            short=rng.choice((0, 0.1)),
            flipped=rng.choice((0, 0.2)),
            hang=rng.choice((0, 0.1, 0.5, 1.0)),
            hang_seconds=60.0,
            at_once=rng.choice((0, 0.2)),
            damaged=rng.choice((0, 0.3)),
        )
        for _ in range(rng.randint(1, 2))
    )
    slots = rng.randint(4, 8)
    node = NodeHabits(steps=rng.randint(2, 5), top_k=rng.randint(1, 4), deadline=(6144, 6144), hasty=0.05, dies=0.02)
    return Scenario(
        layers=2,
        experts_per_layer=8,
        slots=slots,
        most=slots,
        nodes=(node,) * rng.randint(1, 4),
        drives=(*sick, DriveHabits(workers=2)),
        replicated=True,
        must_serve=True,
        spares=workers * len(sick) + 1,
    )


def _sizes(rng: Random) -> Scenario:
    """The arena shrinks and grows under nodes of all kinds, sick drives, and reads that nobody waits for."""
    slots = rng.randint(2, 8)
    node = NodeHabits(
        steps=rng.randint(2, 6),
        top_k=rng.randint(1, 4),
        favourites=rng.choice((0, 2)),
        compute=rng.randint(0, 8),
        deadline=(512, 4096),
        hasty=rng.choice((0, 0.2)),
        cancels=rng.choice((0, 0.1)),
        dies=rng.choice((0, 0.05)),
    )
    drive = DriveHabits(
        workers=rng.randint(1, 4),
        slowest=rng.choice((2, 16)),
        io_error=rng.choice((0, 0.2)),
        flipped=rng.choice((0, 0.1)),
        at_once=rng.choice((0, 0.3)),
    )
    copies = rng.random() < 0.5
    return Scenario(
        layers=rng.randint(1, 3),
        experts_per_layer=rng.randint(4, 8),
        slots=slots,
        most=rng.randint(1, slots),
        nodes=(node,) * rng.randint(1, 4),
        drives=(drive, DriveHabits(workers=2)) if copies else (drive,),
        replicated=copies,
        spares=rng.randint(0, 3),
        unlocked_reads=rng.choice((0, 4)),
        policy=rng.choice(sorted(POLICIES)),
        size_changes=rng.randint(1, 6),
        most_slots=slots + rng.randint(0, 6),
    )


def _hints(rng: Random) -> Scenario:
    """Nodes that hint, rightly and wrongly, over drives that may be sick, in an arena that may change its size."""
    slots = rng.randint(3, 24)

    def node() -> NodeHabits:
        return NodeHabits(
            steps=rng.randint(6, 24),
            top_k=rng.randint(1, 3),
            favourites=rng.choice((0, 2, 4)),
            compute=rng.choice((2, 8, 32)),
            deadline=rng.choice(((512, 4096), (8192, 8192))),
            hasty=rng.choice((0, 0, 0.1)),
            cancels=rng.choice((0, 0, 0.1)),
            dies=rng.choice((0, 0, 0.03)),
            hints=rng.choice((0.5, 1.0)),
        )

    drive = DriveHabits(
        workers=rng.randint(1, 4),
        slowest=rng.choice((2, 8, 24)),
        io_error=rng.choice((0, 0, 0.2)),
        flipped=rng.choice((0, 0, 0.1)),
        at_once=rng.choice((0, 0, 0.3)),
    )
    copies = rng.random() < 0.3
    return Scenario(
        layers=rng.randint(1, 4),
        experts_per_layer=rng.randint(4, 12),
        slots=slots,
        most=rng.randint(1, max(1, slots // 2)),
        nodes=tuple(node() for _ in range(rng.randint(1, 3))),
        drives=(drive, DriveHabits(workers=2)) if copies else (drive,),
        replicated=copies,
        spares=rng.randint(0, 3),
        unlocked_reads=rng.choice((0, 4)),
        policy=rng.choice(sorted(POLICIES)),
        depth=rng.randint(1, 8),
        most_per_hint=rng.randint(1, 4),
        throttled=rng.random() < 0.5,
        size_changes=rng.choice((0, 0, 3)),
    )


def _guesses(rng: Random) -> Scenario:
    """The daemon guesses by itself, from tokens that are said and from layer to layer; some nodes hint beside it."""
    slots = rng.randint(3, 24)

    def node() -> NodeHabits:
        return NodeHabits(
            steps=rng.randint(12, 32),
            top_k=rng.randint(1, 3),
            favourites=rng.choice((2, 3, 4)),
            compute=rng.choice((2, 8, 32)),
            hasty=rng.choice((0, 0, 0.1)),
            dies=rng.choice((0, 0, 0.03)),
            hints=rng.choice((0, 0, 0, 0.2)),
            says=rng.choice((0, 0.5, 1.0)),
        )

    drive = DriveHabits(workers=rng.randint(1, 4), slowest=rng.choice((2, 8)), io_error=rng.choice((0, 0, 0.2)))
    return Scenario(
        layers=rng.randint(1, 4),
        experts_per_layer=rng.randint(4, 12),
        slots=slots,
        most=rng.randint(1, max(1, slots // 2)),
        nodes=tuple(node() for _ in range(rng.randint(1, 3))),
        unasked_nodes=(UnaskedHabits(steps=12, top_k=2, favourites=4),) * rng.choice((0, 0, 1)),
        drives=(drive,),
        spares=rng.randint(0, 2),
        policy=rng.choice(sorted(POLICIES)),
        depth=rng.randint(1, 8),
        most_per_hint=rng.randint(1, 4),
        throttled=rng.random() < 0.3,
        guesses=True,
        size_changes=rng.choice((0, 0, 3)),
    )


def _unasked(rng: Random) -> Scenario:
    """Nodes that use residents without a message, beside some that ask for all, in an arena that is too small."""
    slots = rng.randint(3, 10)

    def node() -> UnaskedHabits:
        return UnaskedHabits(
            steps=rng.randint(6, 20),
            top_k=rng.randint(1, 4),
            favourites=rng.randint(2, 6),
            use=rng.choice((1, 8, 32)),
            marks=rng.random() < 0.7,
            releases=rng.choice((0, 0.5)),
            dies=rng.choice((0, 0, 0.1)),
        )

    asking = NodeHabits(steps=rng.randint(2, 6), top_k=rng.randint(1, 3), favourites=rng.choice((0, 3)))
    return Scenario(
        layers=rng.randint(1, 3),
        experts_per_layer=rng.randint(6, 10),
        slots=slots,
        most=rng.randint(max(1, slots // 2), slots),
        nodes=(asking,) * rng.randint(0, 2),
        drives=(DriveHabits(workers=rng.randint(1, 4), slowest=rng.choice((2, 16))),),
        unasked_nodes=tuple(node() for _ in range(rng.randint(1, 3))),
        spares=rng.randint(0, 2),
        size_changes=rng.choice((0, 0, 3)),
        policy=rng.choice(sorted(POLICIES)),
    )


SCENARIOS: dict[str, Callable[[Random], Scenario]] = {
    "steady": _steady,
    "waves": _waves,
    "sick-drive": _sick_drive,
    "rude-nodes": _rude_nodes,
    "mirrors": _mirrors,
    "one-sound-drive": _one_sound_drive,
    "sizes": _sizes,
    "unasked": _unasked,
    "hints": _hints,
    "guesses": _guesses,
}
"""By name; each draws its sizes and habits from the seed."""
