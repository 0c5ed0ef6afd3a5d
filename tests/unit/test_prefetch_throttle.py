"""The throttle finds the level that pays, whatever the load, and comes back when the load changes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tierd.prefetch.throttle import LEAST_PROBABILITY, Throttle

TOP = len(LEAST_PROBABILITY) - 1


def run(throttle: Throttle, tokens: int, cost: Callable[[int], float], noise: float = 0.0) -> list[int]:
    """Return the level of each token."""
    rng, levels = Random(7), []
    for _ in range(tokens):
        levels.append(throttle.level)
        throttle.token(cost(throttle.level) * (1 + noise * rng.uniform(-1, 1)))
    return levels


def test_it_stays_up_where_speculation_pays():
    levels = run(Throttle(), 4000, lambda level: 2.0 - 0.2 * level, noise=0.2)
    assert levels.count(TOP) > 0.8 * len(levels)


def test_a_trial_that_is_clear_ends_early_and_one_that_is_not_goes_on():
    clear = run(Throttle(), 90, lambda level: 2.0 if level == 0 else 1.0, noise=0.2)
    unclear = run(Throttle(), 90, lambda level: 1.05 if level == 0 else 1.0, noise=0.2)
    assert (clear.count(0), unclear.count(0)) == (16, 32)


def test_it_goes_down_to_off_where_speculation_costs_and_hardly_tries_again():
    throttle = Throttle()
    levels = run(throttle, 6000, lambda level: 1.0 + 0.2 * level, noise=0.1)
    assert throttle.base == 0
    assert sum(level > 0 for level in levels[2000:]) < 0.1 * 4000


def test_it_goes_down_where_speculation_changes_nothing():
    throttle = Throttle()
    run(throttle, 4000, lambda _level: 1.0)
    assert throttle.base == 0


def test_it_finds_a_level_between():
    throttle = Throttle()
    run(throttle, 6000, lambda level: 1.0 + 0.1 * abs(level - 2), noise=0.05)
    assert throttle.base == 2


@pytest.mark.parametrize("paid", [True, False])
def test_it_recovers_when_the_load_changes(paid):
    throttle = Throttle()
    slope = -0.2 if paid else 0.2
    run(throttle, 6000, lambda level: 2.0 + slope * level, noise=0.05)
    assert (throttle.base == TOP) is paid
    run(throttle, 12_000, lambda level: 2.0 - slope * level, noise=0.05)
    assert (throttle.base == 0) is paid


def test_one_stall_of_a_drive_decides_nothing():
    throttle, rng = Throttle(), Random(3)
    for number in range(4000):
        stall = 50.0 if number % 97 == 0 else 0.0
        throttle.token(2.0 - 0.3 * throttle.level + stall + 0.01 * rng.random())
    assert throttle.base == TOP


def test_where_nothing_waits_the_level_falls_and_a_wait_brings_it_back():
    throttle = Throttle()
    run(throttle, 3000, lambda _level: 0.0)
    assert throttle.base == 0
    run(throttle, 12_000, lambda level: 1.0 if level == 0 else 0.5)
    assert throttle.base > 0


def test_sessions_that_come_and_go_compare_nothing():
    throttle = Throttle()
    for _ in range(1000):
        throttle.token(1.0)
        throttle.disturbed()
    assert throttle.base == TOP
    assert repr(throttle) == f"<Throttle level {TOP}, base {TOP}>"


def test_a_fixed_level_stays():
    throttle = Throttle(0, fixed=True)
    run(throttle, 2000, lambda level: 2.0 - level)
    assert throttle.level == 0
