"""What makes each policy itself: a short history after which it differs from the others."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.errors import UsageError
from tierd.policy.belady import Belady
from tierd.policy.frequency_sketch import FrequencySketch
from tierd.policy.least_stale import LeastStale
from tierd.policy.lfru import Lfru
from tierd.policy.replay import ReplayArena
from tierd.policy.s3fifo import S3Fifo
from tierd.policy.slru import Slru
from tierd.policy.w_tinylfu import WTinyLfu


def anyone(_expert):
    return True


def read(policy, *experts):
    for expert in experts:
        policy.inserted(expert)
        policy.used(expert)


def leave(policy):
    victim = policy.victim(anyone)
    policy.removed(victim)
    return victim


@pytest.mark.parametrize("make", [Slru, Lfru, S3Fifo])
def test_what_was_used_again_outlives_what_was_used_once(make):
    policy = make()
    read(policy, 0, 1, 2, 3)
    policy.used(0)
    read(policy, 4, 5)
    assert [leave(policy) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_slru_puts_the_oldest_protected_expert_on_probation_when_too_many_are():
    policy = Slru()
    read(policy, 0, 1, 2, 3, 4)
    for expert in (0, 1, 2, 3):
        policy.used(expert)
    assert policy.victim(anyone) == 4
    policy.used(4)  # five of five: more than four fifths
    assert policy.victim(anyone) == 0


def test_lfru_counts_uses_among_those_without_privilege():
    policy = Lfru()
    read(policy, 0, 1, 2, 3)
    for expert in (0, 0, 1, 2, 3):  # 0 and 1 fall back with three uses and two
        policy.used(expert)
    assert [leave(policy), leave(policy)] == [1, 0]


def test_s3fifo_lets_one_that_comes_back_soon_straight_into_the_main_queue():
    policy = S3Fifo()
    read(policy, 0, 1, 2)
    policy.used(0)
    policy.used(1)
    assert leave(policy) == 2  # 0 and 1 moved to the main queue, 2 is remembered
    read(policy, 2, 3)
    assert policy.victim(anyone) == 3  # 3 is in the small queue, 2 in the main one
    assert leave(policy) == 3
    assert leave(policy) == 0


def test_s3fifo_goes_round_once_for_each_use_up_to_three():
    policy = S3Fifo()
    read(policy, 0, 1, 2)
    for expert in (0, 1):
        policy.used(expert)
    assert leave(policy) == 2
    for _ in range(9):
        policy.used(0)
    policy.used(1)
    assert policy.victim(anyone) == 1


def test_w_tinylfu_lets_a_newcomer_in_only_when_it_was_used_more_often():
    policy = WTinyLfu()
    read(policy, 0, 1, 2, 3)
    for _ in range(3):
        policy.used(0)
        policy.used(1)
    assert leave(policy) == 2
    read(policy, 4)
    assert policy.victim(anyone) == 3  # equal use: the newcomer of the window is 3
    policy.removed(3)
    read(policy, 5)
    assert leave(policy) == 4
    for _ in range(9):
        policy.used(5)
    read(policy, 6)
    assert leave(policy) in {0, 1}  # 5 was used more often than they were


def test_the_sketch_never_says_too_little():
    sketch = FrequencySketch(width=64, period=10_000)
    for expert in range(200):
        for _ in range(expert % 7):
            sketch.add(expert)
    assert all(sketch.estimate(expert) >= expert % 7 for expert in range(200))


def test_the_sketch_halves_its_counts_after_a_period_and_stops_at_fifteen():
    sketch = FrequencySketch(width=1024, period=100)
    assert not set(sketch._places(1)) & set(sketch._places(2))
    for _ in range(10):
        sketch.add(1)
    for _ in range(89):
        sketch.add(2)
    assert (sketch.estimate(1), sketch.estimate(2)) == (10, 15)
    sketch.add(2)
    assert (sketch.estimate(1), sketch.estimate(2)) == (5, 7)


def test_least_stale_lets_passed_layers_go_first_and_the_nearest_to_come_last():
    policy = LeastStale()
    for layer in range(4):
        policy.visit(1, 0, layer, prefill=False)
        read(policy, 10 * layer, 10 * layer + 1)
    policy.visit(1, 1, 2, prefill=False)
    assert [leave(policy) for _ in range(8)] == [0, 1, 10, 11, 30, 31, 20, 21]


def test_least_stale_learns_the_layer_of_one_that_was_read_ahead():
    policy = LeastStale()
    policy.visit(1, 0, 0, prefill=False)
    read(policy, 0)
    policy.inserted(30)
    policy.visit(1, 0, 3, prefill=False)
    policy.used(30)
    policy.visit(1, 1, 1, prefill=False)
    assert [leave(policy), leave(policy)] == [0, 30]


REQUESTS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True), max_size=9)


@settings(max_examples=60, deadline=None)
@given(REQUESTS)
def test_no_choice_of_victims_has_more_hits_than_belady(requests):
    slots = 3

    @cache
    def most(number, resident):
        if number == len(requests):
            return 0
        wanted = frozenset(requests[number])
        missing = wanted - resident
        surplus = len(resident) + len(missing) - slots
        choices = combinations(sorted(resident - wanted), surplus) if surplus > 0 else [()]
        return len(wanted & resident) + max(most(number + 1, (resident - frozenset(gone)) | wanted) for gone in choices)

    arena = ReplayArena(Belady(requests), slots)
    for request in requests:
        arena.request(request, prefill=False)
    assert arena.total.hits == most(0, frozenset())


def test_belady_says_so_when_the_trace_was_another_one():
    policy = Belady([[1]])
    policy.inserted(1)
    policy.used(1)
    with pytest.raises(UsageError, match="expert 1"):
        policy.used(1)
