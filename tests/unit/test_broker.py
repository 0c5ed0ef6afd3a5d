"""What the broker promises to a session that asks, and to one that asks at the same time."""

from __future__ import annotations

import pytest
from simulation.by_hand import BrokerByHand

from tierd.arena.table import unpack
from tierd.errors import ChecksumMismatch, DataLoss, DriveError, LimitExceeded
from tierd.requests import Outcome, Phase, PhaseCounts, Reason

HIT, MISS, JOINED = Outcome.HIT, Outcome.MISS, Outcome.JOINED


@pytest.fixture
def hand():
    return BrokerByHand(slots=4)


def test_a_miss_is_read_published_and_granted(hand):
    session = hand.session()
    session.ask(3, layer=1)
    assert (hand.drive.asked, session.told, hand.resident()) == ([19], [], set())
    hand.drive.land(19)
    assert session.told == [(3, MISS)]
    assert hand.bytes_behind(session.granted[3]) == hand.store.content[19]
    assert session.granted[3] == hand.table.load(19)
    assert hand.broker.grants(session.id) == 1


def test_hits_are_answered_before_anything_is_read(hand):
    hand.make_resident(1, 2)
    session = hand.session()
    session.ask(5, 1, 2)
    assert session.told == [(1, HIT), (2, HIT)]
    assert hand.drive.asked == [5]
    hand.drive.land(5)
    assert session.told == [(1, HIT), (2, HIT), (5, MISS)]


def test_what_lands_is_answered_as_it_lands_in_whatever_order(hand):
    session = hand.session()
    session.ask(1, 2, 3)
    hand.drive.land(3)
    assert session.told == [(3, MISS)]
    hand.drive.land(1, 2)
    assert session.told == [(3, MISS), (1, MISS), (2, MISS)]


def test_fifty_sessions_that_want_one_expert_cause_one_read(hand):
    sessions = [hand.session() for _ in range(50)]
    for session in sessions:
        session.ask(7)
    assert hand.drive.asked == [7]
    hand.drive.land(7)
    assert [session.told for session in sessions] == [[(7, MISS)], *[[(7, JOINED)]] * 49]
    assert len({session.granted[7] for session in sessions}) == 1
    assert hand.arena.grants(unpack(sessions[0].granted[7])[1]) == 50
    total = hand.broker.stats.total()
    assert (total.requests, total.misses, total.joined, total.hits) == (50, 1, 49, 0)


def test_different_experts_are_read_side_by_side(hand):
    first, second = hand.session(), hand.session()
    first.ask(1)
    second.ask(2)
    assert sorted(hand.drive.held) == [1, 2]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DriveError("nvme: input/output error at 4096"), Reason.UNAVAILABLE),
        (ChecksumMismatch("nvme: wrong bytes at 4096"), Reason.DATA_LOSS),
        (DataLoss("no good copy at 4096"), Reason.DATA_LOSS),
    ],
)
def test_a_failing_read_tells_every_waiter_at_once_and_the_next_asks_the_drive_again(hand, error, reason):
    sessions = [hand.session() for _ in range(50)]
    for session in sessions:
        session.ask(7)
    hand.drive.fail(7, error)
    assert all(session.told == [(7, reason)] for session in sessions)
    assert sessions[0].details[7] == str(error)
    assert hand.broker.stats.total().failed == 50
    assert (hand.resident(), hand.arena.counts().free, len(hand.policy)) == (set(), 4, 0)

    sessions[0].ask(7)
    assert hand.drive.asked == [7, 7]
    hand.drive.land(7)
    assert sessions[0].told[-1] == (7, MISS)


def test_a_failed_expert_leaves_the_others_of_its_request_alone(hand):
    session = hand.session()
    session.ask(1, 2)
    hand.drive.fail(1, DriveError("nvme: input/output error"))
    hand.drive.land(2)
    assert session.told == [(1, Reason.UNAVAILABLE), (2, MISS)]
    assert list(session.granted) == [2]


def test_a_drive_that_fails_at_once_is_told_after_the_hits(hand):
    hand.make_resident(1)
    session = hand.session()
    hand.drive.gone = DriveError("nvme: no such device")
    session.ask(2, 1, 3)
    assert session.told == [(1, HIT), (2, Reason.UNAVAILABLE), (3, Reason.UNAVAILABLE)]
    assert (hand.broker.reading, hand.arena.counts().free, hand.clock.waiting) == (0, 3, 0)


@pytest.mark.parametrize("leave", ["cancel", "release", "close"])
def test_when_the_first_who_asked_gives_up_the_others_are_still_served(hand, leave):
    first, *others = [hand.session() for _ in range(50)]
    for session in (first, *others):
        session.ask(7)
    getattr(first, leave)()
    hand.drive.land(7)
    assert first.told == ([] if leave == "close" else [(7, Reason.CANCELLED)])
    assert all(session.told == [(7, JOINED)] for session in others)
    assert hand.drive.asked == [7]


def test_a_read_for_which_nobody_waits_any_more_still_ends_in_a_resident_expert(hand):
    session = hand.session()
    session.ask(7)
    session.cancel()
    hand.drive.land(7)
    assert hand.arena.granted == 0
    session.ask(7)
    assert session.told == [(7, Reason.CANCELLED), (7, HIT)]


def test_the_least_recently_used_expert_leaves_and_a_granted_one_never(hand):
    hand.make_resident(1, 2, 3, 4)
    holder, session = hand.session(), hand.session()
    holder.ask(1)
    session.ask(2)
    session.ask(8)
    hand.drive.land(8)
    assert hand.resident() == {1, 2, 4, 8}, "1 is granted, 2 was used again, so 3 is the oldest that may leave"
    session.ask(9)
    hand.drive.land(9)
    assert hand.resident() == {1, 2, 8, 9}
    assert holder.granted[1] == hand.table.load(1)
    assert hand.bytes_behind(holder.granted[1]) == hand.store.content[1]
    assert hand.broker.stats.evictions == 2


def test_what_a_request_finds_resident_is_not_evicted_for_its_own_misses(hand):
    hand.make_resident(1, 2, 3, 4)
    session = hand.session()
    session.ask(9, 1)
    hand.drive.land(9)
    assert session.told == [(1, HIT), (9, MISS)]
    assert hand.resident() == {1, 3, 4, 9}


def test_free_slots_are_used_before_anything_leaves(hand):
    hand.make_resident(1)
    hand.session().ask(2, 3, 4)
    assert hand.broker.stats.evictions == 0


def test_repeated_requests_are_counted_apart(hand):
    session = hand.session()
    session.ask(1, 2)
    hand.drive.land(1, 2)
    session.ask(1, 2, repeated=True)
    assert session.told[2:] == [(1, HIT), (2, HIT)]
    session.ask(3, repeated=True)
    assert hand.broker.pending() == 0
    stats = hand.broker.stats
    assert stats.total() == PhaseCounts(requests=2, misses=2)
    assert stats.repeated == 3
    assert hand.broker.requests(session.id) == 5


def test_phases_are_counted_apart(hand):
    session = hand.session()
    session.ask(1, 2, phase=Phase.PREFILL)
    hand.drive.land(1, 2)
    session.ask(2, phase=Phase.DECODE)
    assert hand.broker.stats.phases == {
        Phase.PREFILL: PhaseCounts(requests=2, misses=2),
        Phase.DECODE: PhaseCounts(requests=1, hits=1),
    }


def test_the_time_that_each_expert_was_waited_for_is_told_by_outcome(hand):
    first, second = hand.session(), hand.session()
    first.ask(1)
    hand.clock.advance(2.0)
    second.ask(1)
    hand.clock.advance(1.0)
    hand.drive.land(1)
    first.ask(1)
    assert hand.waited == [(MISS, 3.0), (JOINED, 1.0), (HIT, 0.0)]
    assert hand.broker.stats.wait_seconds == {MISS: 3.0, JOINED: 1.0, HIT: 0.0}


@pytest.mark.parametrize(
    ("experts", "layer", "says"),
    [
        ((), 0, "names 0 experts"),
        ((1, 2, 3, 4, 5), 0, "between 1 and 4 fit"),
        ((2, 3, 2), 0, "twice"),
        ((1, 16), 0, "no expert 16 in layer 0"),
        ((-1,), 0, "no expert -1"),
        ((1,), 1 << 31, "layer 2147483648"),
    ],
)
def test_a_request_outside_the_limits_is_refused_counted_nowhere_and_changes_nothing(hand, experts, layer, says):
    session = hand.session()
    session.ask(1)
    hand.drive.land(1)
    with pytest.raises(LimitExceeded, match=says):
        session.ask(*experts, layer=layer)
    assert hand.broker.stats.total() == PhaseCounts(requests=1, misses=1)
    assert hand.broker.requests(session.id) == 1
    assert hand.broker.grants(session.id) == 1, "what the session holds stays as it is"
    assert hand.drive.asked == [1]


def test_a_session_opens_once(hand):
    session = hand.session()
    with pytest.raises(LimitExceeded, match=f"session {session.id} is open already"):
        hand.broker.open_session(session.id, session)


@pytest.mark.parametrize("most", [0, 5])
def test_an_acquire_may_name_no_more_experts_than_the_arena_holds(most):
    with pytest.raises(LimitExceeded, match="1 to 4 experts"):
        BrokerByHand(slots=4, most=most)


def test_the_broker_describes_itself(hand):
    session = hand.session()
    session.ask(1, 2)
    hand.drive.land(1)
    assert repr(hand.broker) == "<Broker 1/4 resident, 1 granted, 1 reading, 0 queued, 1 sessions>"
