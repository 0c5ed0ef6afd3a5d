"""Residents used without a message: how the broker counts them, tells its policy of them, and keeps them in place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.by_hand import BrokerByHand

from tierd.arena.table import ABSENT, unpack
from tierd.errors import LimitExceeded
from tierd.policy.lru import Lru
from tierd.requests import Outcome, Phase

HIT, MISS = Outcome.HIT, Outcome.MISS


class Listening(Lru):
    """LRU that writes down what it is told."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def visit(self, session, step, layer, *, prefill):
        self.heard.append(("visit", session, step, layer, prefill))

    def expected(self, session, expectation):
        self.heard.append(("expected", session, expectation.tolist()))

    def ended(self, session):
        self.heard.append(("ended", session))

    def used(self, expert):
        super().used(expert)
        self.heard.append(expert)

    def since(self):
        heard, self.heard = self.heard, []
        return heard


@pytest.fixture
def hand():
    return BrokerByHand(slots=4)


@pytest.fixture
def policy(hand):
    hand.policy.observed = Listening()
    return hand.policy.observed


def test_uses_that_nobody_asked_for_are_requests_and_hits_of_their_phase(hand):
    hand.make_resident(1, 2)
    session = hand.session()
    hand.sessions.note_use(session.id, 1, 0, prefill=True)
    hand.sessions.note_use(session.id, 1, 1)
    hand.sessions.note_use(session.id, 2, 1)
    counted = hand.broker.stats
    assert (counted.phases[Phase.PREFILL].requests, counted.phases[Phase.PREFILL].hits) == (1, 1)
    assert (counted.phases[Phase.DECODE].hits, counted.unasked) == (2, 3)
    assert hand.broker.stats.unasked == 3, "each use once"
    assert hand.broker.requests(session.id) == 3


def test_a_session_that_ended_is_counted_to_its_last_use(hand):
    session = hand.session()
    hand.sessions.note_use(session.id, 5, 0)
    session.close()
    assert hand.broker.stats.total().hits == 1
    assert hand.broker.requests(session.id) == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.tuples(st.integers(1, 3), st.integers(0, 7), st.booleans()), st.none()), max_size=40))
def test_requests_add_up_whenever_somebody_looks(uses):
    hand = BrokerByHand(slots=4)
    sessions = [hand.session() for _ in range(3)]
    expected = 0
    for step, use in enumerate(uses):
        if use is None:
            total = hand.broker.stats.total()
            assert total.requests == total.answered == expected
        else:
            number, flat, prefill = use
            hand.sessions.note_use(sessions[number - 1].id, flat, step, prefill=prefill)
            expected += 1
    assert hand.broker.stats.unasked == expected


def test_the_policy_hears_of_uses_at_a_request_in_the_order_of_steps_and_layers(hand, policy):
    hand.make_resident(17, 2, 3)
    session = hand.session()
    for flat, step in ((3, 4), (17, 4), (2, 5)):
        hand.sessions.note_use(session.id, flat, step)
    policy.since()
    assert hand.broker.stats.unasked == 3
    assert policy.since() == [], "looking at the counts tells it nothing"
    session.ask(9, layer=1, step=6)
    assert policy.since() == [
        *(("visit", session.id, 4, 0, False), 3),
        *(("visit", session.id, 4, 1, False), 17),
        *(("visit", session.id, 5, 0, False), 2),
        *(("visit", session.id, 6, 1, False), 25),
    ]


def test_a_request_of_one_session_tells_of_the_uses_of_all(hand, policy):
    hand.make_resident(1, 2, 3, 4)
    quiet, asking = hand.session(), hand.session()
    hand.sessions.note_use(quiet.id, 1, 7)
    asking.ask(9)
    assert ("visit", quiet.id, 7, 0, False) in policy.since()
    assert 1 in hand.resident(), "the least recently asked for, but used a moment ago"
    assert 2 not in hand.resident()


def test_residents_in_use_are_told_with_the_request_and_not_again_when_they_are_counted(hand, policy):
    hand.make_resident(1, 2)
    session = hand.session()
    policy.since()
    session.ask(9, resident=(2, 1), step=3)
    assert policy.since() == [("visit", session.id, 3, 0, False), 2, 1, 9]
    for flat in (1, 2, 2):
        hand.sessions.note_use(session.id, flat, 3)
    session.ask(10, step=4)
    assert policy.since() == [("visit", session.id, 3, 0, False), 2, ("visit", session.id, 4, 0, False), 10]
    assert hand.broker.stats.unasked == 3, "each is counted by the session alone"


def test_residents_in_use_stay_where_they_are_until_the_request_ends(hand):
    hand.make_resident(1, 2, 3, 4)
    session, other = hand.session(), hand.session()
    session.ask(9, resident=(1, 2))
    assert hand.resident() == {1, 2, 4}
    words = [hand.table.load(flat) for flat in (1, 2)]
    assert hand.broker.grants(session.id) == 2
    hand.drive.land(9)
    assert session.told == [(9, MISS)], "they are not answered"
    other.ask(10, 11)
    assert other.told == [], "there is room for one beside three that are in use"
    assert [hand.table.load(flat) for flat in (1, 2)] == words
    session.release()
    assert sorted(hand.drive.held) == [10, 11]
    assert all(hand.arena.grants(unpack(word)[1]) == 0 for word in words)


def test_another_expert_leaves_than_one_that_is_used_just_now_if_there_is_one(hand):
    hand.make_resident(1, 2, 3, 4)
    session = hand.session()
    hand.sessions.used_now = {(session.id, 1), (session.id, 2)}
    session.ask(5)
    assert hand.resident() == {1, 2, 4}
    hand.drive.land(5)
    session.ask(6, 7)
    assert hand.resident() == {1, 2}, "4 and 5"
    hand.drive.land(6, 7)
    session.ask(8, 9, 10)
    assert hand.resident() == {2}, "a mark is a wish: in the end one of them must go"


def test_a_resident_that_left_before_the_request_was_admitted_is_not_held(hand):
    hand.make_resident(1, 2, 3, 4)
    first, second = hand.session(), hand.session()
    first.ask(5, 6, 7)
    assert hand.table.load(1) == ABSENT
    second.ask(4, resident=(1,))
    assert second.told == [(4, HIT)]
    assert hand.broker.grants(second.id) == 1


def test_a_request_waits_for_room_for_what_it_uses_too(hand):
    hand.make_resident(1, 2)
    holder, waiter = hand.session(), hand.session()
    holder.ask(5, 6)
    waiter.ask(7, resident=(1, 2))
    assert (waiter.told, hand.broker.queued) == ([], 1)
    hand.drive.land(5, 6)
    holder.release()
    assert sorted(hand.drive.held) == [7]
    assert hand.broker.grants(waiter.id) == 2


@pytest.mark.parametrize(
    ("wanted", "resident"), [((1,), (1,)), ((1,), (2, 2)), ((), (1,)), ((1, 2), (3, 4, 5)), ((1,), (99,))]
)
def test_impossible_residents_are_refused_and_counted_nowhere(hand, wanted, resident):
    session = hand.session()
    with pytest.raises(LimitExceeded):
        session.ask(*wanted, resident=resident)
    assert hand.broker.stats.total().requests == 0
    assert hand.broker.pending() == 0


def test_uses_of_what_has_left_are_counted_and_not_told(hand, policy):
    hand.make_resident(1, 2, 3, 4)
    session, other = hand.session(), hand.session()
    other.ask(5)
    assert 1 not in hand.resident()
    hand.sessions.note_use(session.id, 1, 2)
    policy.since()
    other.ask(6)
    assert 1 not in policy.since()
    assert hand.broker.stats.unasked == 1


def test_a_flood_of_uses_is_counted_and_told_in_bounded_time(hand, policy):
    hand.make_resident(1, 2)
    session = hand.session()
    for flat in (1, 2):
        hand.sessions.note_use(session.id, flat, 1)
        hand.sessions._blocks[session.id][1, flat] = 1 << 30
    policy.since()
    session.ask(9, step=2)
    assert hand.broker.stats.unasked == 2 << 30
    assert len(policy.since()) <= 20_003


def test_what_a_session_expects_is_told_before_its_uses_and_ends_with_it(hand, policy):
    session = hand.session()
    hand.sessions.expectations[session.id] = np.array([0, 7], np.uint8)
    session.ask(3, step=1)
    assert policy.since() == [("visit", session.id, 1, 0, False), ("expected", session.id, [0, 7]), 3]
    session.close()
    assert policy.since() == [("ended", session.id)]
    hand.sessions.note_use(session.id, 3, 1)
    hand.session().ask(4)
    heard = policy.since()
    assert heard[:3] == [("visit", session.id, 1, 0, False), 3, ("ended", session.id)], "its last uses, and its end"


def test_steps_told_to_the_policy_never_go_back(hand, policy):
    session = hand.session()
    session.ask(1, step=5)
    session.ask(2, step=3)
    assert [heard[2] for heard in policy.since() if isinstance(heard, tuple) and heard[0] == "visit"] == [5, 5]
