"""Several drives as one, on a virtual clock: failover, quarantine, probes, members, and where the slots are."""

from __future__ import annotations

import errno

import pytest
import structlog
from scripted_drives import NBYTES, SECONDS, Hang, ScriptedDrive, World, fails_first, io_error

from tierd.devices.drive import Drive
from tierd.devices.speed import DriveSpeed
from tierd.errors import ChecksumMismatch, DataLoss, DriveError, UsageError


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


def test_an_expert_that_no_drive_can_give_is_logged_once_until_it_was_read_again():
    sick = {5: ChecksumMismatch("wrong", path="/x/shard", hint="Copy it again.")}
    world = World("a", "b", **dict.fromkeys("ab", lambda read, _number: sick.get(read.expert, SECONDS)))

    def logged(expert):
        with structlog.testing.capture_logs() as logs:
            world.fetch(expert, within=5.0)
        return [log for log in logs if log["event"] == "expert cannot be read"]

    (log,) = logged(5)
    assert (log["expert"], log["path"], log["offset"], log["length"]) == (5, "/x/shard", 4096 * 5, NBYTES)
    assert log["log_level"] == "error"
    assert "tried " in log["reason"]
    assert log["advice"]
    assert logged(5) == logged(6) == []
    assert isinstance(world.fetch(5, within=5.0)[0], DataLoss)
    good = sick.pop(5)
    assert logged(5) == []
    sick[5] = good
    assert len(logged(5)) == 1
    world.at_rest()


def test_records_of_a_partial_fast_mirror_come_from_it_when_the_primary_is_slow():
    world = World("primary", "mirror", primary=lambda _read, _number: 10 * SECONDS)
    world.drives["mirror"].shards = frozenset({1})
    world.drives["primary"].speed = DriveSpeed(world.drives["primary"].speed.bandwidth / 10)
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


def test_a_read_ahead_is_not_late_however_many_pass_it_and_once_promoted_it_is_like_any_other():
    world = World("a", "b")
    world.train()
    drives = [world.devices[name] for name in "ab"]
    for drive in drives:
        drive.free_workers = 0
    world.submit(1, ahead=True)
    (slot,) = world.set._by_slot
    (there,) = (drive for drive in drives if drive.waiting)
    other = drives[1 - drives.index(there)]
    for _ in range(20):
        world.clock.advance(0.1)
        world.drives[there.name].speed.completed(
            world.drives[there.name].speed.submitted(NBYTES, world.clock.time()), world.clock.time(), good=True
        )
    assert not other.waiting
    assert not world.stats(there.name).stalls
    world.set.promote(slot)
    assert there.promoted == [slot]
    world.clock.advance(0.3)
    assert len(other.waiting) == 1, "it is late by now, and another drive is asked"
    for drive in drives:
        drive.free_workers = 4
        drive.start()
    world.clock.advance(1.0)
    assert world.results == {1: None}
    world.set.promote(slot)
    world.at_rest()


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
