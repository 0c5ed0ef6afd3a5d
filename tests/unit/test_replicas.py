"""Several drives as one, on a virtual clock: failover, hedges, hangs, quarantine, probes, and where the slots are."""

from __future__ import annotations

import errno
from collections import deque

import pytest
import structlog
from simulation.clock import VirtualClock
from simulation.memory import plain_arena

from tierd.devices.device import DeviceStats, RecordRead
from tierd.devices.drive import Drive
from tierd.devices.replicas import ReplicaSet
from tierd.errors import ChecksumMismatch, DataLoss, DriveError, UsageError

MIB = 1 << 20
NBYTES = 64
SLOTS, EXPERTS, SPARES = 8, 400, 5
SECONDS = 0.01
"""What a read takes on a sound drive."""


def read_of(expert):
    return RecordRead(expert, 0, expert, expert % 4, 4096 * expert, NBYTES, 0)


def io_error(number=errno.EIO):
    return DriveError("drive: input/output error", path="/x/shard", errno=number)


class Hang:
    """A read that returns only when the test says so."""


class ScriptedDrive:
    """A drive that does with each read what its script says: seconds, or an error after them, or a hang."""

    def __init__(self, name, clock, *, workers=4, script=None):
        self.name = name
        self.stats = DeviceStats()
        self.clock = clock
        self.script = script or (lambda _read, _number: SECONDS)
        self.begun = []
        self.hung = []
        self.waiting = deque()
        self.free_workers = workers
        self.closed = False

    def submit(self, read, slot, memory, done):
        self.stats.in_flight += 1
        self.waiting.append((read, slot, memory.view(slot, NBYTES), done))
        self.start()

    def withdraw(self, slot):
        for job in self.waiting:
            if job[1] == slot:
                self.waiting.remove(job)
                self.stats.in_flight -= 1
                return True
        return False

    def start(self):
        while self.waiting and self.free_workers:
            self.free_workers -= 1
            job = self.waiting.popleft()
            fate = self.script(job[0], len(self.begun))
            self.begun.append(job[0].expert)
            if isinstance(fate, Hang):
                self.hung.append(job)
            else:
                error = fate if isinstance(fate, DriveError) else None
                self.clock.call_later(SECONDS if error else fate, lambda job=job, error=error: self.end(job, error))

    def end(self, job, error=None):
        read, slot, into, done = job
        into[:] = bytes([read.expert % 251]) * NBYTES
        self.free_workers += 1
        self.stats.in_flight -= 1
        self.stats.reads += error is None
        self.stats.errors += error is not None
        done(error, slot)
        self.start()

    def release(self):
        while self.hung:
            self.end(self.hung.pop())

    def close(self):
        self.closed = True


class World:
    """Drives, an arena, and what came of each read."""

    def __init__(self, *names, spares=SPARES, remeasure=False, **scripts):
        self.clock = VirtualClock()
        self.devices = {name: ScriptedDrive(name, self.clock, script=scripts.get(name)) for name in names}
        self.drives = {
            name: Drive(device, range(4), bandwidth=NBYTES / SECONDS, remeasure=remeasure)
            for name, device in self.devices.items()
        }
        self.set = ReplicaSet(self.clock, list(self.drives.values()))
        self.arena, self.payload, _ = plain_arena(slots=SLOTS, slot_bytes=NBYTES, experts=EXPERTS, spares=spares)
        self.results = {}

    def submit(self, expert):
        slot = self.arena.take()
        assert slot is not None, "the set kept a slot"
        self.arena.fill(slot, expert)
        self.set.submit(read_of(expert), slot, self.arena, lambda error, slot: self.landed(expert, error, slot))

    def landed(self, expert, error, slot):
        assert expert not in self.results
        self.results[expert] = error
        if error is None:
            self.arena.publish(slot)
            assert self.payload.view(slot * NBYTES, NBYTES) == bytes([expert % 251]) * NBYTES
            self.arena.unpublish([slot])
            # Back on the free list, as after an eviction.
            self.arena.fill(slot, expert)
        self.arena.give_back(slot)

    def fetch(self, *experts, within=1.0):
        """Read these at once; the errors or None in their order, which must come in time."""
        for expert in experts:
            self.submit(expert)
        self.clock.advance(within)
        return [self.results.pop(expert) for expert in experts]

    def train(self, count=80):
        """Let the set learn how fast its drives are."""
        for expert in range(300, 300 + count // 2):
            assert self.fetch(expert, expert - 100) == [None, None]

    def stats(self, name):
        return self.devices[name].stats

    def at_rest(self):
        counts = self.arena.counts()
        assert counts.free == SLOTS + self.arena.spares, counts
        assert self.arena._spares_in_use == 0
        assert not self.set._flights
        assert not self.set._by_slot
        assert all(drive.speed.queued_bytes == 0 and drive.hanging == 0 for drive in self.drives.values())
        assert all(device.stats.in_flight == 0 for device in self.devices.values())


def fails_first(count, error):
    return lambda _read, number: error if number < count else SECONDS


def test_reads_spread_over_the_drives_and_leave_every_slot_free():
    world = World("a", "b")
    assert world.fetch(*range(8)) == [None] * 8
    assert len(world.devices["a"].begun) == len(world.devices["b"].begun) == 4
    world.at_rest()


@pytest.mark.parametrize(
    ("error", "quarantined"),
    [
        (io_error(), False),
        (DriveError("short", path="/x"), True),
        (io_error(errno.ENODEV), True),
        (ChecksumMismatch("wrong", path="/x"), True),
    ],
)
def test_a_failed_read_is_served_by_the_other_drive_and_counted(error, quarantined):
    world = World("a", "b", a=fails_first(1, error), b=fails_first(0, error))
    results = world.fetch(*range(8), within=0.5)
    assert results == [None] * 8
    assert world.stats("a").errors == world.stats("a").failovers == 1
    assert world.stats("a").up is not quarantined
    assert world.drives["b"].health.usable
    world.at_rest()


def test_a_quarantined_drive_gets_no_reads_until_a_probe_finds_it_well():
    world = World("a", "b", a=fails_first(2, io_error(errno.ENODEV)))
    with structlog.testing.capture_logs() as logs:
        assert world.fetch(*range(4), within=0.5) == [None] * 4
        seen = len(world.devices["a"].begun)
        assert world.fetch(*range(10, 18), within=0.4) == [None] * 8
        assert len(world.devices["a"].begun) == seen
        world.clock.advance(3.0)
        assert world.stats("a").up
        assert world.fetch(*range(20, 28)) == [None] * 8
    assert len(world.devices["a"].begun) > seen + 2
    assert [log["event"] for log in logs] == ["drive quarantined", "drive is well again"]
    assert logs[0]["advice"] is not None
    world.at_rest()


def test_probes_of_a_dead_drive_back_off():
    world = World("a", "b", a=lambda _read, _number: io_error(errno.ENODEV))
    world.fetch(*range(8))
    seen = len(world.devices["a"].begun)
    world.clock.advance(130.0)
    assert 5 <= len(world.devices["a"].begun) - seen <= 9
    world.at_rest()


def test_a_record_that_is_bad_on_one_drive_is_read_from_the_other_even_when_the_drive_is_well_again():
    world = World("a", "b", a=lambda read, _: ChecksumMismatch("wrong") if read.expert == 5 else SECONDS)
    assert world.fetch(*range(8)) == [None] * 8
    world.clock.advance(3.0)
    for _ in range(10):
        assert world.fetch(5) == [None]
        world.clock.advance(3.0)
    assert world.stats("a").errors == 1
    assert world.stats("a").up
    world.at_rest()


def test_passing_errors_of_a_single_drive_are_retried_and_counted():
    world = World("a", a=lambda _read, number: io_error(errno.EAGAIN) if number % 10 == 0 else SECONDS)
    for expert in range(200):
        assert world.fetch(expert, within=0.5) == [None]
    assert world.stats("a").retries == world.stats("a").errors > 15
    assert world.stats("a").up
    world.at_rest()


def test_a_lasting_error_fails_exactly_that_read_after_a_few_retries():
    world = World("a", a=lambda read, _: io_error() if read.expert == 3 else SECONDS)
    results = world.fetch(1, 2, 3, 4)
    assert [error is None for error in results] == [True, True, False, True]
    assert results[2].errno == errno.EIO
    assert not isinstance(results[2], DataLoss)
    assert "tried a" in results[2].message
    assert world.devices["a"].begun.count(3) == 4
    assert world.fetch(5) == [None], "a drive in quarantine still serves when there is no other"
    world.at_rest()


def test_data_loss_when_no_copy_is_good_and_the_next_read_works():
    world = World("a", "b", a=fails_first(1, ChecksumMismatch("a is bad")), b=fails_first(1, DriveError("b is cut")))
    (error,) = world.fetch(1)
    assert isinstance(error, DataLoss)
    assert "a is bad" in error.message
    assert "b is cut" in error.message
    assert world.fetch(2) == [None]
    world.at_rest()


def test_a_hanging_read_is_served_elsewhere_within_a_second_and_the_drive_is_left_alone():
    world = World("a", "b", a=lambda _read, _number: Hang())
    assert world.fetch(*range(8), within=1.0) == [None] * 8
    hung = len(world.devices["a"].begun)
    assert world.stats("a").stalls >= 1
    assert not world.stats("a").up
    assert world.arena.counts().abandoned == hung
    assert world.fetch(*range(10, 16), within=0.2) == [None] * 6
    assert len(world.devices["a"].begun) == hung
    world.devices["a"].script = lambda _read, _number: SECONDS
    world.devices["a"].release()
    world.clock.advance(10.0)
    assert world.stats("a").up
    world.at_rest()


def test_what_a_hanging_drive_has_not_begun_moves_away_at_once_without_spare_slots():
    world = World("a", "b", spares=1, a=lambda _read, _number: Hang())
    world.devices["a"].free_workers = 1
    assert world.fetch(*range(8), within=1.0) == [None] * 8
    assert len(world.devices["a"].begun) == 1
    assert world.stats("a").failovers >= 3
    world.devices["a"].release()
    world.at_rest()


def test_a_single_hanging_drive_keeps_its_slot_and_answers_when_it_returns():
    world = World("a", a=lambda _read, number: Hang() if number == 0 else SECONDS)
    world.submit(1)
    world.clock.advance(30.0)
    assert world.results == {}
    assert world.arena.counts().filling == 1
    assert world.fetch(2) == [None]
    world.devices["a"].release()
    assert world.results == {1: None}
    assert world.fetch(3) == [None]
    assert world.stats("a").up
    assert world.devices["a"].begun == [1, 2, 3], "a drive without a replica is not probed"
    world.at_rest()


def test_a_late_read_is_hedged_in_its_own_slot_and_the_first_one_wins():
    world = World("a", "b")
    world.train()
    begun = [device.begun for device in world.devices.values()]
    first_slow = lambda read, _number: SECONDS if any(read.expert in experts for experts in begun) else 0.3  # noqa: E731
    world.devices["a"].script = world.devices["b"].script = first_slow
    (result,) = world.fetch(1, within=0.1)
    assert result is None
    assert world.arena.counts().abandoned == 1
    won = world.stats("a").hedges_won + world.stats("b").hedges_won
    assert won == 1
    world.clock.advance(1.0)
    assert world.stats("a").stalls == world.stats("b").stalls == 0
    world.at_rest()


def test_a_hedge_that_comes_second_is_counted_as_lost():
    world = World("a", "b")
    world.train()
    slow = iter([0.05, 0.3])
    world.devices["a"].script = world.devices["b"].script = lambda _read, _number: next(slow)
    assert world.fetch(1, within=0.1) == [None]
    assert world.stats("a").hedges_lost + world.stats("b").hedges_lost == 1
    assert world.stats("a").hedges_won + world.stats("b").hedges_won == 0
    world.clock.advance(1.0)
    world.at_rest()


def test_hedges_stay_within_their_budget_when_everything_is_slow():
    world = World("a", "b")
    world.train()
    world.devices["a"].script = world.devices["b"].script = lambda _read, number: 0.2 if number % 3 else SECONDS
    for expert in range(100):
        assert world.fetch(expert) == [None]
    hedges = sum(s.hedges_won + s.hedges_lost for s in (world.stats("a"), world.stats("b")))
    assert 1 <= hedges <= 4 + 180 * 0.05
    world.at_rest()


@pytest.mark.parametrize("slow_from", [0, 100])
def test_a_ten_times_slower_second_drive_costs_nothing(slow_from):
    def times(*names):
        world = World(*names)
        if "b" in names:
            world.devices["b"].script = lambda _read, _number: 10 * SECONDS if world.slow else SECONDS
            world.drives["b"].speed._bandwidth = NBYTES / SECONDS / (10 if slow_from == 0 else 1)
        world.slow = slow_from == 0
        taken = []
        for expert in range(300):
            world.slow = world.slow or expert >= slow_from
            began = world.clock.time()
            world.submit(expert)
            while expert not in world.results:
                assert world.clock.step()
            taken.append(world.clock.time() - began)
        return sorted(taken[100:])

    alone, both = times("a"), times("a", "b")
    for share in (0.5, 0.99):
        assert both[int(len(both) * share) - 1] <= 1.05 * alone[int(len(alone) * share) - 1]


def test_records_of_a_partial_fast_mirror_come_from_it_when_the_primary_is_slow():
    world = World("primary", "mirror", primary=lambda _read, _number: 10 * SECONDS)
    world.drives["mirror"].shards = frozenset({1})
    world.drives["primary"].speed._bandwidth /= 10
    for first in range(0, 200, 4):
        assert world.fetch(*range(first, first + 4)) == [None] * 4
    from_mirror = world.devices["mirror"].begun
    assert all(expert % 4 == 1 for expert in from_mirror)
    assert len(from_mirror) >= 0.95 * 50
    world.clock.advance(1.0)
    world.at_rest()


def test_a_record_that_no_drive_holds_is_an_error_in_done():
    world = World("a")
    world.drives["a"].shards = frozenset({0})
    (error,) = world.fetch(1)
    assert "no drive holds shard 1" in error.message
    world.at_rest()


def test_a_drive_leaves_after_what_it_has_begun_and_takes_no_more():
    world = World("a", "b")
    world.devices["a"].free_workers = 1
    for expert in range(8):
        world.submit(expert)
    world.set.leave("a")
    assert not world.devices["a"].waiting
    with pytest.raises(UsageError, match="no other drive has"):
        world.set.leave("b")
    with pytest.raises(UsageError, match="no drive called a"):
        world.set.leave("a")
    world.clock.advance(1.0)
    assert list(world.results.values()) == [None] * 8
    assert len(world.devices["a"].begun) == 1
    world.set.forget(world.drives["a"])
    assert [drive.name for drive in world.set.drives] == ["b"]
    world.at_rest()


def test_a_drive_joins_and_two_of_one_name_cannot():
    world = World("a")
    late = ScriptedDrive("b", world.clock)
    world.set.add(Drive(late, range(4), bandwidth=NBYTES / SECONDS))
    assert world.fetch(*range(8)) == [None] * 8
    assert len(late.begun) == 4
    with pytest.raises(UsageError, match="called b already"):
        world.set.add(Drive(late, range(4)))


def test_a_read_that_has_not_begun_can_be_withdrawn():
    world = World("a")
    world.devices["a"].free_workers = 0
    world.submit(1)
    (slot,) = world.set._by_slot
    assert world.set.withdraw(slot)
    assert not world.set.withdraw(slot)
    world.arena.give_back(slot)
    world.at_rest()
    world.devices["a"].free_workers = 4
    world.submit(2)
    assert not world.set.withdraw(next(iter(world.set._by_slot)))


def test_closing_ends_retries_and_refuses_what_comes_later():
    world = World("a", a=lambda _read, _number: io_error())
    world.submit(1)
    world.clock.advance(0.015)
    world.set.close()
    assert isinstance(world.results.pop(1), DriveError)
    assert world.devices["a"].closed
    (error,) = world.fetch(2)
    assert error.errno == errno.ECANCELED
    world.at_rest()


def test_counters_are_summed_over_the_drives():
    world = World("a", "b", a=fails_first(1, io_error()))
    world.fetch(*range(8))
    total = world.set.stats
    assert total.reads == 8
    assert total.errors == 1
    assert total.up


def test_a_hanging_read_that_returns_while_closing_is_not_tried_again():
    world = World("a", a=lambda _read, _number: Hang())
    world.submit(1)
    world.clock.advance(0.1)
    world.set.close()
    world.devices["a"].end(world.devices["a"].hung.pop(), io_error(errno.ETIMEDOUT))
    assert isinstance(world.results[1], DriveError)
    assert not world.clock.waiting
    world.at_rest()


def test_a_drive_that_was_slow_for_a_while_is_found_to_be_fast_again():
    world = World("a", "b", remeasure=True)
    world.devices["b"].script = lambda _read, _number: 20 * SECONDS if world.clock.time() < 10.0 else SECONDS
    for expert in range(20):
        world.fetch(expert, within=0.5)
    assert world.clock.time() == 10.0
    neglected = len(world.devices["b"].begun)
    assert neglected <= 12
    for expert in range(20, 80):
        assert world.fetch(expert, within=0.5) == [None]
    served = len(world.devices["b"].begun) - neglected
    assert served >= 15
    world.clock.advance(1.0)
    world.at_rest()


def test_measuring_a_slow_drive_again_costs_few_reads_and_no_waiting():
    world = World("a", "b", remeasure=True, b=lambda _read, _number: 20 * SECONDS)
    world.drives["b"].speed._bandwidth /= 20
    waited = []
    for expert in range(300):
        began = world.clock.time()
        world.submit(expert)
        while expert not in world.results:
            assert world.clock.step()
        waited.append(world.clock.time() - began)
        world.clock.advance(0.1)
    assert max(waited) < 2 * SECONDS
    assert len(world.devices["b"].begun) <= 10
    world.clock.advance(1.0)
    world.at_rest()


def test_a_drive_found_to_hang_while_it_is_measured_is_quarantined():
    world = World("a", "b", remeasure=True, b=lambda _read, _number: Hang())
    world.drives["b"].speed._bandwidth /= 10
    for expert in range(10):
        assert world.fetch(expert, within=0.5) == [None]
    assert world.stats("b").stalls == 1
    assert not world.stats("b").up
    assert len(world.devices["b"].begun) == 1
    world.devices["b"].script = lambda _read, _number: SECONDS
    world.devices["b"].release()
    world.clock.advance(10.0)
    assert world.stats("b").up
    world.at_rest()


def test_a_drive_that_falls_silent_under_a_long_queue_is_found_out_at_once():
    world = World("a", "b")
    slow = 0.1
    for name, device in world.devices.items():
        device.free_workers = 1
        device.script = lambda _read, number, name=name: Hang() if name == "a" and number == 1 else slow
        world.drives[name].speed._bandwidth = NBYTES / slow
    assert world.fetch(*range(8), within=2.0) == [None] * 8
    assert world.stats("a").stalls == 1
    world.devices["a"].release()
    world.at_rest()
