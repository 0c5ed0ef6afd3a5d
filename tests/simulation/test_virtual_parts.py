"""The simulation's own parts do what the histories rely on."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from simulation.clock import TICK, VirtualClock
from simulation.drive import DriveHabits, VirtualDrive
from simulation.memory import PlainTable, plain_arena
from simulation.records import RECORD_BYTES, VirtualStore

from tierd.arena.table import pack
from tierd.devices.device import Device
from tierd.errors import ChecksumMismatch, DriveError, LimitExceeded


def test_calls_come_at_their_moment_earliest_first() -> None:
    clock = VirtualClock()
    seen: list[tuple[str, float]] = []
    for name, delay in (("late", 2.0), ("early", 1.0), ("past", -1.0)):
        clock.call_later(delay, lambda name=name: seen.append((name, clock.time())))  # type: ignore[misc]
    while clock.step():
        pass
    assert seen == [("past", 0.0), ("early", 1.0), ("late", 2.0)]
    assert clock.waiting == 0


def test_a_call_that_was_called_off_never_comes() -> None:
    clock = VirtualClock()
    timer = clock.call_later(1.0, lambda: pytest.fail("it was called off"))
    timer.cancel()
    timer.cancel()
    assert clock.waiting == 0
    assert not clock.step()
    assert clock.time() == 0.0


def test_time_advances_to_the_end_of_the_wait_with_all_calls_on_the_way() -> None:
    clock = VirtualClock()
    seen: list[float] = []

    def again() -> None:
        seen.append(clock.time())
        clock.call_later(1.0, again)

    clock.call_later(1.0, again)
    clock.advance(3.5)
    assert (seen, clock.time(), clock.waiting) == ([1.0, 2.0, 3.0], 3.5, 1)


def test_calls_of_one_moment_come_in_the_order_of_the_seed_and_in_every_order() -> None:
    def order(seed: int) -> tuple[int, ...]:
        clock = VirtualClock(Random(seed))
        seen: list[int] = []
        for n in range(3):
            clock.call_later(TICK, lambda n=n: seen.append(n))  # type: ignore[misc]
        clock.advance(1.0)
        return tuple(seen)

    assert [order(seed) for seed in range(50)] == [order(seed) for seed in range(50)]
    assert len({order(seed) for seed in range(50)}) == 6


def read_all(habits: DriveHabits, seed: int = 0) -> Counter[str]:
    """Return how reads of every expert ended, with their bytes checked."""
    store, clock = VirtualStore(4, 16), VirtualClock(Random(seed))
    arena, payload, _ = plain_arena(slots=len(store), slot_bytes=RECORD_BYTES, experts=len(store))
    drive = VirtualDrive("nvme", store=store, clock=clock, rng=Random(seed), habits=habits, log=lambda *_facts: None)
    assert isinstance(drive, Device)
    ends: Counter[str] = Counter()

    def done(error: DriveError | None, slot: int) -> None:
        ends[type(error).__name__] += 1
        flat = arena._states.expert(slot)
        right = payload.view(slot * RECORD_BYTES, RECORD_BYTES) == store.content[flat or 0]
        assert right == (error is None)

    for flat in range(len(store)):
        slot = arena.take()
        assert slot is not None
        arena.fill(slot, flat)
        drive.submit(store.record(flat), slot, arena, done)
    while clock.step():
        assert drive.stats.in_flight == len(drive.outstanding)
    assert ends.total() == len(store)
    assert drive.stats.reads == ends["NoneType"]
    assert drive.stats.checksum_failures == ends[ChecksumMismatch.__name__]
    return ends


def test_a_sound_drive_delivers_every_record() -> None:
    assert read_all(DriveHabits()) == {"NoneType": 64}


@pytest.mark.parametrize(
    ("habits", "kind"),
    [
        (DriveHabits(io_error=1.0), DriveError),
        (DriveHabits(short=1.0), DriveError),
        (DriveHabits(flipped=1.0), ChecksumMismatch),
        (DriveHabits(damaged=1.0), ChecksumMismatch),
        (DriveHabits(damaged=1.0, at_once=1.0), ChecksumMismatch),
    ],
)
def test_a_sick_drive_never_passes_wrong_bytes_off_as_right(habits: DriveHabits, kind: type[DriveError]) -> None:
    assert read_all(habits) == {kind.__name__: 64}


def test_faults_come_as_often_as_the_habits_say() -> None:
    ends: Counter[str] = Counter()
    for seed in range(20):
        ends += read_all(DriveHabits(io_error=0.1, short=0.1, flipped=0.1), seed)
    assert 0.15 < ends["DriveError"] / ends.total() < 0.25
    assert 0.05 < ends["ChecksumMismatch"] / ends.total() < 0.15


def test_only_a_read_that_has_not_begun_can_be_withdrawn() -> None:
    store, clock = VirtualStore(1, 4), VirtualClock()
    arena, _, _ = plain_arena(slots=2, slot_bytes=RECORD_BYTES, experts=4)
    drive = VirtualDrive(
        "nvme", store=store, clock=clock, rng=Random(0), habits=DriveHabits(workers=1), log=lambda *_facts: None
    )
    ended: list[int] = []
    slots = []
    for flat in range(2):
        slot = arena.take()
        assert slot is not None
        arena.fill(slot, flat)
        drive.submit(store.record(flat), slot, arena, lambda _error, slot: ended.append(slot))
        slots.append(slot)
    assert [drive.withdraw(slot) for slot in slots] == [False, True]
    clock.advance(1.0)
    assert ended == slots[:1]
    assert drive.outstanding == []
    assert not drive.withdraw(slots[1])


def test_two_reads_into_one_slot_are_an_error_of_the_caller() -> None:
    store = VirtualStore(1, 4)
    arena, _, _ = plain_arena(slots=1, slot_bytes=RECORD_BYTES, experts=4)
    drive = VirtualDrive(
        "nvme", store=store, clock=VirtualClock(), rng=Random(0), habits=DriveHabits(), log=lambda *_facts: None
    )
    drive.submit(store.record(0), 0, arena, lambda _error, _slot: None)
    with pytest.raises(AssertionError, match="goes into the slot of"):
        drive.submit(store.record(1), 0, arena, lambda _error, _slot: None)


def test_no_word_is_published_twice() -> None:
    table = PlainTable(2)
    table.store(0, pack(1, 0))
    table.store(0, 0)
    assert table.unpublished == 1
    with pytest.raises(AssertionError, match="used before"):
        table.store(1, pack(1, 0))


def test_the_store_has_distinct_records_and_knows_its_limits() -> None:
    store = VirtualStore(3, 5)
    assert len(set(store.content)) == len(store) == 15
    assert [store.flat(layer, expert) for layer in range(3) for expert in range(5)] == list(range(15))
    for layer, expert in ((3, 0), (0, 5), (-1, 0), (0, -1)):
        with pytest.raises(LimitExceeded, match=f"expert {expert} in layer {layer}"):
            store.flat(layer, expert)
