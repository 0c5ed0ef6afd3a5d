"""Requested bytes follow the drives' weights, however the hot experts' numbers are chosen; slow drives do no harm."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.devices.drive import Drive
from tierd.devices.replica_choice import Replica, choose, spread

LAYERS, EXPERTS, PER_LAYER = 78, 256, 8
NBYTES = 19 << 20


class Named:
    def __init__(self, name):
        self.name = name


def make_drives(*bandwidths):
    return [Drive(Named(f"drive{n}"), range(1), bandwidth=b * 1e9) for n, b in enumerate(bandwidths)]


def pick(expert, drives):
    replicas = [Replica(d.key, d.speed.bandwidth, d.speed.predict(NBYTES)) for d in drives]
    return choose(expert, replicas)


def shares(hot, drives, *, together):
    """The drives' shares of the reads of a hot set, one layer's experts asked for at a time."""
    counts = [0] * len(drives)
    for layer in hot:
        expected = []
        for flat in layer:
            place = pick(flat, drives)
            counts[place] += 1
            if together:
                expected.append((drives[place], drives[place].speed.submitted(NBYTES, 0.0)))
        for drive, reads in expected:
            drive.speed.dropped(reads)
    return [count / sum(counts) for count in counts]


def zipf(rng, candidates):
    """Eight of the candidates, those at the front far likelier."""
    order = rng.sample(candidates, len(candidates))
    chosen = []
    while len(chosen) < PER_LAYER:
        pick = order[min(int(rng.paretovariate(1.0)) - 1, len(order) - 1)]
        if pick not in chosen:
            chosen.append(pick)
    return chosen


def hot_sets(step):
    rng = random.Random(f"hot {step}")
    for _ in range(20):
        yield [[layer * EXPERTS + e for e in zipf(rng, range(0, EXPERTS, step))] for layer in range(LAYERS)]


@pytest.mark.parametrize(
    ("step", "weights"),
    [(1, (1, 1)), (2, (1, 1)), (8, (1, 1)), (1, (3, 2)), (2, (3, 2)), (8, (3, 2)), (2, (1, 1, 1)), (1, (3, 2, 2))],
)
def test_a_skewed_hot_set_spreads_by_bandwidth_when_a_layer_is_asked_for_at_once(step, weights):
    for hot in hot_sets(step):
        drives = make_drives(*weights)
        for share, weight in zip(shares(hot, drives, together=True), weights, strict=True):
            assert abs(share - weight / sum(weights)) < 0.1


@pytest.mark.parametrize(("step", "weights"), [(1, (1, 1)), (2, (1, 1)), (8, (1, 1)), (8, (1, 1, 1))])
def test_a_skewed_hot_set_spreads_over_equal_drives_when_reads_come_one_by_one(step, weights):
    for hot in hot_sets(step):
        for share in shares(hot, make_drives(*weights), together=False):
            assert abs(share - 1 / len(weights)) < 0.1


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.integers(0, 1 << 40), st.sampled_from([1, 2, 8, 256]))
def test_the_claim_to_experts_is_in_proportion_to_weight(weights, first, step):
    keys = [drive.key for drive in make_drives(*weights)]
    counts = [0] * len(weights)
    for expert in range(first, first + 600 * step, step):
        claims = [spread(expert, key, weight) for key, weight in zip(keys, weights, strict=True)]
        counts[claims.index(max(claims))] += 1
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count / 600 - weight / sum(weights)) < 0.1


@given(
    st.lists(st.tuples(st.floats(1e6, 1e10), st.floats(1e-6, 10)), min_size=1, max_size=6),
    st.integers(0, 1 << 20),
    st.randoms(use_true_random=False),
)
def test_the_choice_is_among_the_soonest_and_does_not_depend_on_order(facts, expert, rng):
    replicas = [Replica(n * 7919, bandwidth, seconds) for n, (bandwidth, seconds) in enumerate(facts)]
    chosen = replicas[choose(expert, replicas)]
    assert chosen.seconds <= 1.1 * min(replica.seconds for replica in replicas)
    rng.shuffle(replicas)
    assert replicas[choose(expert, replicas)] == chosen


def test_a_slow_drive_is_used_only_when_it_would_be_no_later():
    fast, slow = drives = make_drives(1.0, 0.1)
    for expert in range(8):
        assert pick(expert, drives) == 0
        fast.speed.submitted(NBYTES, 0.0)
    for _ in range(8, 40):
        fast.speed.submitted(NBYTES, 0.0)
    assert pick(40, drives) == 1
    slow.speed.submitted(NBYTES * 5, 0.0)
    assert pick(41, drives) == 0


def test_a_drive_that_becomes_slow_is_left_alone_after_its_first_slow_reads():
    drives = make_drives(1.0, 1.0)
    now, seconds = 0.0, NBYTES / 1e9
    for expert in range(64):
        place = pick(expert, drives)
        expected = drives[place].speed.submitted(NBYTES, now)
        now += seconds
        drives[place].speed.completed(expected, now, good=True)
    slow_reads = 0
    for expert in range(64, 264):
        place = pick(expert, drives)
        expected = drives[place].speed.submitted(NBYTES, now)
        now += seconds * (10 if place else 1)
        slow_reads += place
        drives[place].speed.completed(expected, now, good=True)
    assert slow_reads == 1


def test_the_operators_weight_scales_what_was_measured():
    full, half = Drive(Named("a"), [0], bandwidth=2e9), Drive(Named("b"), [0], bandwidth=2e9, weight=0.5)
    assert half.speed.predict(NBYTES) == 2 * full.speed.predict(NBYTES)
