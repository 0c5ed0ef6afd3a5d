"""Alarms come when they are due, in their order, and those that are called off cost nobody a timer."""

from __future__ import annotations

import pytest
from simulation.clock import VirtualClock

from tierd.devices.alarms import Alarms


class CountingClock(VirtualClock):
    """Knows how many timers it was asked for."""

    timers = 0

    def call_later(self, delay, callback, /):
        self.timers += 1
        return super().call_later(delay, callback)


@pytest.fixture
def clock():
    return CountingClock()


def test_each_comes_once_at_its_moment_and_never_early(clock):
    alarms, came = Alarms(clock), []
    for moment in (0.5, 0.1, 0.3, 0.1):
        alarms.at(moment, lambda moment=moment: came.append((moment, clock.time())))
    clock.advance(1.0)
    assert [moment for moment, _ in came] == [0.1, 0.1, 0.3, 0.5]
    assert all(moment <= now <= moment + 0.002 for moment, now in came)
    assert alarms.waiting == len(alarms) == 0


def test_what_has_passed_comes_soon_and_not_within_the_call(clock):
    alarms, came = Alarms(clock), []
    clock.advance(5.0)
    alarms.at(1.0, lambda: came.append(clock.time()))
    assert came == []
    clock.advance(0.01)
    assert came == [pytest.approx(5.0, abs=0.002)]


def test_reads_that_end_in_time_share_few_timers(clock):
    alarms = Alarms(clock)
    for _ in range(10_000):
        alarm = alarms.at(clock.time() + 0.5, lambda: pytest.fail("it was called off"))
        clock.advance(0.001)
        alarm.cancel()
        alarm.cancel()
        assert len(alarms) <= 66
    assert alarms.waiting == 0
    assert clock.timers < 60
    clock.advance(2.0)
    assert len(alarms) == clock.waiting == 0


def test_an_alarm_may_call_off_another_and_set_new_ones(clock):
    alarms, came = Alarms(clock), []

    def first():
        came.append("first")
        second.cancel()
        alarms.at(clock.time(), lambda: came.append("at once"))
        alarms.at(1.0, lambda: came.append("later"))

    alarms.at(0.2, first)
    second = alarms.at(0.2, lambda: came.append("second"))
    clock.advance(0.5)
    assert came == ["first", "at once"]
    clock.advance(1.0)
    assert came == ["first", "at once", "later"]


def test_when_nothing_is_to_come_the_timer_can_be_given_back(clock):
    alarms, came = Alarms(clock), []
    alarm = alarms.at(0.1, lambda: came.append("one"))
    alarms.rest()
    assert clock.waiting == 1
    alarm.cancel()
    alarms.rest()
    assert clock.waiting == len(alarms) == 0
    alarms.at(0.2, lambda: came.append("two"))
    clock.advance(0.5)
    assert came == ["two"]


def test_a_failing_alarm_keeps_none_of_the_later_ones_from_coming(clock):
    alarms, came = Alarms(clock), []

    def fails():
        raise RuntimeError("this one")

    alarms.at(0.1, fails)
    alarms.at(0.2, lambda: came.append("next"))
    with pytest.raises(RuntimeError, match="this one"):
        clock.advance(0.15)
    clock.advance(0.5)
    assert came == ["next"]
