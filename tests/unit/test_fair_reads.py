from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.by_hand import BrokerByHand

from tierd.broker.fair_reads import FairReads
from tierd.requests import Outcome, Phase

MISS, JOINED = Outcome.MISS, Outcome.JOINED


def test_a_session_that_is_alone_gets_all_its_reads_at_once():
    begun = []
    FairReads(begun.append, lambda: 1, lambda: 2).begin(1, range(50))
    assert begun == list(range(50))


def test_sessions_take_turns_behind_a_bound():
    begun = []
    reads = FairReads(begun.append, lambda: 3, lambda: 1)
    reads.begin(1, range(100, 110))
    reads.begin(2, [200, 201])
    reads.begin(3, [300])
    assert begun == [100, 101]
    for _ in range(20):
        if flat := next(iter(reads._running), None):
            reads.ended(flat)
    assert begun == [100, 101, 102, 200, 300, 103, 201, 104, 105, 106, 107, 108, 109]
    assert len(reads) == 0


def test_an_expert_that_another_wants_too_is_read_in_the_earlier_turn():
    begun = []
    reads = FairReads(begun.append, lambda: 2, lambda: 1)
    reads.begin(1, range(10))
    reads.joined(2, 9)
    reads.joined(2, 0)  # that one is being read already
    reads.ended(0)
    reads.ended(1)
    assert begun[:4] == [0, 1, 2, 9]
    assert Counter(begun + list(reads._owner))[9] == 1


def test_a_read_that_all_gave_up_never_begins_unless_it_has_begun():
    begun = []
    reads = FairReads(begun.append, lambda: 2, lambda: 1)
    reads.begin(1, range(4))
    assert [reads.given_up(flat, []) for flat in (0, 2, 2)] == [False, True, False]
    reads.ended(0)
    reads.ended(1)
    assert begun == [0, 1, 3]
    assert len(reads) == 0


def test_a_read_that_one_of_two_gave_up_comes_in_the_others_turn():
    begun = []
    reads = FairReads(begun.append, lambda: 3, lambda: 1)
    reads.begin(1, range(5))
    reads.joined(2, 4)
    reads.begin(3, [30, 31])
    assert not reads.given_up(4, [1])
    for flat in range(2):
        reads.ended(flat)
    assert begun == [0, 1, 2, 30]
    while reads._running:
        reads.ended(min(reads._running))
    assert begun == [0, 1, 2, 30, 3, 31, 4]


def test_a_session_with_its_bytes_at_the_drives_lets_others_pass():
    begun = []
    reads = FairReads(begun.append, lambda: 2, lambda: 4, lambda flat: 10 if flat < 100 else 25, most_bytes=40)
    reads.begin(1, [1, 2, 100, 3])
    reads.begin(2, [200, 101])
    # 45 bytes would be too many for the first session, and 50 for the second.
    assert begun == [1, 2, 200]
    assert reads.held == 2
    reads.ended(200)
    assert begun == [1, 2, 200, 101]
    reads.ended(1)
    assert begun[4:] == [100]
    assert reads.given_up(3, [2]) is False  # it is the other's now, who has room for it
    reads.ended(2)
    assert begun[5:] == [3]
    assert reads.held == 3
    for flat in (101, 100, 3):
        reads.ended(flat)
    assert not reads._flying
    assert not reads._held


def test_a_read_larger_than_the_quota_goes_alone():
    begun = []
    reads = FairReads(begun.append, lambda: 1, lambda: 4, lambda _flat: 50, most_bytes=40)
    reads.begin(1, [1, 2])
    assert begun == [1]
    reads.ended(1)
    assert begun == [1, 2]


def test_reads_that_end_at_once_do_not_pile_up_on_the_stack():
    begun = []

    def submit(flat):
        begun.append(flat)
        reads.ended(flat)

    reads = FairReads(submit, lambda: 2, lambda: 1)
    reads.begin(1, range(5000))
    assert begun == list(range(5000))


@given(st.lists(st.one_of(st.tuples(st.integers(1, 4), st.integers(1, 6)), st.none()), max_size=30), st.integers(1, 4))
def test_every_read_begins_exactly_once_and_never_too_many_at_a_time(events, depth):
    begun, wanted, number = [], [], 0
    reads = FairReads(begun.append, lambda: 2, lambda: depth)
    for event in events:
        if event is not None:
            session, count = event
            flats = list(range(number, number + count))
            number += count
            wanted += flats
            reads.begin(session, flats)
        elif reads._running:
            reads.ended(min(reads._running))
        assert len(reads._running) <= 2 * depth
    while reads._running:
        reads.ended(min(reads._running))
    assert sorted(begun) == wanted


def test_a_prefill_keeps_another_nodes_token_waiting_for_a_few_reads_only():
    hand = BrokerByHand(slots=64)
    prefilling, decoding = hand.session(), hand.session()
    prefilling.ask(*range(16), phase=Phase.PREFILL)
    prefilling_asked = len(hand.drive.asked)
    decoding.ask(0, 1, 2, layer=1)
    landed = 0
    while len(decoding.told) < 3:
        hand.drive.land(next(iter(hand.drive.held)))
        landed += 1
    assert prefilling_asked < 16
    assert landed <= prefilling_asked + 2 * 3
    assert len(prefilling.told) < 16
    while hand.drive.held:
        hand.drive.land(next(iter(hand.drive.held)))
    assert len(prefilling.told) == 16


def test_a_token_need_not_wait_for_its_expert_at_the_end_of_anothers_prefill():
    hand = BrokerByHand(slots=64)
    prefilling, decoding = hand.session(), hand.session()
    prefilling.ask(*range(16), phase=Phase.PREFILL)
    decoding.ask(15)
    landed = 0
    while not decoding.told:
        hand.drive.land(next(iter(hand.drive.held)))
        landed += 1
    assert decoding.told == [(15, JOINED)]
    assert landed < 15
    assert hand.drive.asked.count(15) == 1


@pytest.mark.parametrize("leave", ["cancel", "release", "close", "deadline"])
def test_who_gives_up_leaves_no_read_in_the_way_of_those_who_wait(leave):
    hand = BrokerByHand(slots=64)
    giving_up, other, waiting = hand.session(), hand.session(), hand.session()
    giving_up.ask(*range(16), phase=Phase.PREFILL, deadline=1.0)
    begun = list(hand.drive.asked)
    other.ask(14)
    waiting.ask(0, 1, layer=1)
    if leave == "deadline":
        hand.clock.advance(2.0)
    else:
        getattr(giving_up, leave)()
    assert hand.broker.reading == len(begun) + 3
    while hand.drive.held:
        hand.drive.land(next(iter(hand.drive.held)))
    assert hand.drive.asked == [*begun, 14, 16, 17]
    assert (other.told, waiting.told) == ([(14, JOINED)], [(0, MISS), (1, MISS)])
    assert (hand.arena.granted, hand.arena.counts().free) == (3, 64 - len(hand.drive.asked))
    assert hand.policy.known == set(hand.drive.asked)


def test_the_first_who_asked_is_served_when_one_who_joined_gives_up():
    hand = BrokerByHand(slots=64)
    first, joining = hand.session(), hand.session()
    first.ask(*range(16))
    joining.ask(15)
    joining.close()
    while hand.drive.held:
        hand.drive.land(next(iter(hand.drive.held)))
    assert first.told[-1] == (15, MISS)
    assert hand.drive.asked == list(range(16))
