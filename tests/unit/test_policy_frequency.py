"""Decayed frequency, what nodes expect on top of it, and the heap under both: order, and how much work it costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.errors import UsageError
from tierd.policy.decayed_frequency import DecayedFrequency
from tierd.policy.expected_frequency import ExpectedFrequency
from tierd.policy.keep_heap import KeepHeap
from tierd.policy.policies import DEFAULT_POLICY, make_policy
from tierd.settings import ServeSettings


def anyone(_expert):
    return True


def use(policy, expert):
    policy.inserted(expert)
    policy.used(expert)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "drop", "ask"]), st.integers(0, 12), st.integers(0, 5))),
    st.sets(st.integers(0, 12)),
)
def test_the_heap_is_a_sorted_list(changes, refused):
    heap, model = KeepHeap(), {}
    for number, (change, expert, value) in enumerate(changes):
        if change == "put":
            heap.put(expert, value)
            model[expert] = (value, number)
        elif change == "drop" and expert in model:
            heap.drop(expert)
            del model[expert]
        allowed = {e: key for e, key in model.items() if e not in refused}
        assert heap.lowest(lambda e: e not in refused) == min(allowed, key=allowed.__getitem__, default=None)
        assert len(heap) == len(model)
        assert (expert in heap) == (expert in model)


def test_the_heap_forgets_stale_entries():
    heap = KeepHeap()
    for number in range(10_000):
        heap.put(number % 10, number)
    assert len(heap._heap) < 200
    assert heap.lowest(anyone) == 0


def test_a_use_loses_half_its_weight_in_a_half_life():
    policy = DecayedFrequency(half_life=8)
    policy.visit(1, 0, 0, prefill=False)
    use(policy, 1)
    use(policy, 2)
    policy.used(2)  # two uses, nearly two half-lives ago when 3 and 1 are used once
    for step in range(1, 16):
        policy.visit(1, step, 0, prefill=False)
    policy.used(1)
    use(policy, 3)
    # 3: 1; 1: 1 + 2^(-15/8); 2: 2 x 2^(-15/8) = 0.55.
    assert [leave(policy) for _ in range(3)] == [2, 3, 1]


def test_rates_are_recalled_as_they_were_and_one_use_in_each_step_is_a_rate_of_one():
    policy = DecayedFrequency(half_life=8)
    rates = np.array([0.0, 0.25, 2.0])
    policy.recall(rates)
    assert [policy.worth(expert) for expert in range(3)] == pytest.approx(rates)
    policy.inserted(0)
    for step in range(300):
        policy.visit(1, step, 0, prefill=False)
        policy.used(0)
    assert policy.worth(0) == pytest.approx(1)


def leave(policy):
    victim = policy.victim(anyone)
    policy.removed(victim)
    return victim


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8)), max_size=80))
def test_the_order_is_that_of_the_sums_worked_out_at_length(history):
    policy, step, uses = DecayedFrequency(half_life=3), 0, []
    resident = set()
    for ahead, expert in history:
        step += ahead
        policy.visit(0, step, 0, prefill=False)
        if expert not in resident:
            policy.inserted(expert)
            resident.add(expert)
        policy.used(expert)
        uses.append((step, expert))
    begun = {value: number for number, value in enumerate(sorted({step for step, _ in uses}))}
    worth = {e: sum(2 ** ((begun[at] - len(begun)) / 3) for at, who in uses if who == e) for e in resident}
    for victim in [leave(policy) for _ in range(len(resident))]:
        assert worth.pop(victim) <= min(worth.values(), default=np.inf) * (1 + 1e-9)


def test_uses_are_remembered_beyond_eviction():
    policy = DecayedFrequency()
    use(policy, 1)
    policy.used(1)
    policy.removed(1)
    use(policy, 2)
    policy.used(2)
    policy.inserted(1)
    policy.used(1)
    assert policy.victim(anyone) == 2


def test_a_prompt_raises_all_alike_and_the_working_set_stays():
    policy = make_policy(DEFAULT_POLICY)
    resident = set()

    def visit(step, experts, *, prefill):
        policy.visit(0, step, 0, prefill=prefill)
        for expert in experts:
            if expert not in resident:
                if len(resident) >= 30:
                    victim = policy.victim(lambda e: e not in experts)
                    policy.removed(victim)
                    resident.remove(victim)
                policy.inserted(expert)
                resident.add(expert)
            policy.used(expert)

    for step in range(20):
        visit(step, range(8), prefill=False)
    for step in range(20, 25):
        for begin in range(0, 200, 10):
            visit(step, range(begin, begin + 10), prefill=True)
    assert set(range(8)) <= resident


@pytest.mark.parametrize("half_life", [0, -1, 1e10, float("nan")])
def test_an_impossible_half_life_is_refused(half_life):
    with pytest.raises(UsageError, match="half-life"):
        DecayedFrequency(half_life)


def test_a_named_half_life_is_that_half_life():
    assert make_policy("decayed-frequency-12").half_life == 12
    for name in ("decayed-frequency-0", "decayed-frequency--1", "decayed-frequency-1e3", "decayed-frequency-"):
        with pytest.raises(UsageError, match="no eviction policy"):
            make_policy(name)


def expectation(**bytes_of):
    out = np.zeros(16, np.uint8)
    for name, value in bytes_of.items():
        out[int(name[1:])] = value
    return out


def test_what_is_expected_stays_and_what_is_no_longer_expected_leaves():
    policy = ExpectedFrequency()
    for expert in (1, 2, 3):
        use(policy, expert)
    policy.expected(7, expectation(e1=200, e2=40))
    assert [policy.victim(lambda e, gone=gone: e not in gone) for gone in ((), (3,), (3, 2))] == [3, 2, 1]
    policy.expected(7, expectation(e3=9))
    assert [policy.victim(lambda e, gone=gone: e not in gone) for gone in ((), (1,))] == [1, 2]


def test_expectations_of_sessions_add_up_and_end_with_them():
    policy = ExpectedFrequency()
    for expert in (1, 2):
        use(policy, expert)
    policy.expected(7, expectation(e1=100))
    policy.expected(8, expectation(e1=100, e2=150))
    assert policy.victim(anyone) == 2
    policy.ended(7)
    assert policy.victim(anyone) == 1
    policy.ended(8)
    assert policy.victim(anyone) == 1


def test_an_expert_that_comes_in_later_is_valued_by_what_is_expected_already():
    policy = ExpectedFrequency()
    policy.expected(7, expectation(e2=90))
    policy.inserted(2)  # read ahead of its use
    use(policy, 1)
    policy.removed(2)
    policy.inserted(2)
    assert policy.victim(anyone) == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 15)), max_size=60))
def test_where_nobody_expects_anything_the_order_is_decayed_frequency(history):
    plain, expecting = DecayedFrequency(), ExpectedFrequency()
    resident, step = set(), 0
    for ahead, expert in history:
        step += ahead
        for policy in (plain, expecting):
            policy.visit(0, step, 0, prefill=False)
            if expert not in resident:
                policy.inserted(expert)
            policy.used(expert)
        resident.add(expert)
        assert plain.victim(anyone) == expecting.victim(anyone)
        if len(resident) > 8:
            resident.remove(leave(plain))
            leave(expecting)


def moves_per_miss(policy, slots):
    """Work of misses at steady state, each in a step of its own with fresh expectations, in an arena of `slots`."""
    wanted = np.random.default_rng(5).integers(0, 4 * slots, 2 * slots + 2000).tolist()
    resident, misses, before = set(), 0, 0
    out = np.zeros(4 * slots, np.uint8)
    for number, expert in enumerate(wanted):
        if number == 2 * slots:
            misses, before = 0, policy.moves
        policy.visit(0, number, 0, prefill=False)
        out[:] = 0
        out[wanted[number : number + 12]] = 200
        policy.expected(0, out)
        if expert not in resident:
            if len(resident) == slots:
                resident.remove(leave(policy))
            policy.inserted(expert)
            resident.add(expert)
            misses += 1
        policy.used(expert)
    return (policy.moves - before) / misses


@pytest.mark.parametrize("make", [DecayedFrequency, ExpectedFrequency])
def test_the_work_of_a_miss_does_not_grow_with_the_arena(make):
    small, large = moves_per_miss(make(), 64), moves_per_miss(make(), 1024)
    assert large < 1.5 * small + 2
    assert small < 40


def test_the_daemon_runs_the_default_unless_told_otherwise():
    assert ServeSettings().policy == DEFAULT_POLICY
