"""Several drives as one, on a virtual clock: late reads, hanging ones, slow drives, and where the slots are."""

from __future__ import annotations

import pytest
from scripted_drives import NBYTES, SECONDS, Hang, World

from tierd.devices.speed import DriveSpeed


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
            world.drives["b"].speed = DriveSpeed(NBYTES / SECONDS / (10 if slow_from == 0 else 1))
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
    world.drives["b"].speed = DriveSpeed(world.drives["b"].speed.bandwidth / 20)
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
    world.drives["b"].speed = DriveSpeed(world.drives["b"].speed.bandwidth / 10)
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
        world.drives[name].speed = DriveSpeed(NBYTES / slow)
    assert world.fetch(*range(8), within=2.0) == [None] * 8
    assert world.stats("a").stalls == 1
    world.devices["a"].release()
    world.at_rest()
