"""What the broker promises when the arena is too small for all: order, deadlines, and room that comes back."""

from __future__ import annotations

import pytest
from simulation.by_hand import BrokerByHand

from tierd.errors import DriveError
from tierd.requests import Outcome, Reason

HIT, MISS, JOINED = Outcome.HIT, Outcome.MISS, Outcome.JOINED
LATE, CANCELLED = Reason.DEADLINE_EXCEEDED, Reason.CANCELLED


@pytest.fixture
def hand():
    return BrokerByHand(slots=2)


def full(hand):
    """Return a session that holds both slots."""
    holder = hand.session()
    holder.ask(0, 1)
    hand.drive.land(0, 1)
    return holder


def test_who_finds_no_room_waits_and_is_served_when_there_is_some(hand):
    holder, waiter = full(hand), hand.session()
    waiter.ask(2)
    assert (waiter.told, hand.broker.queued, hand.drive.asked) == ([], 1, [0, 1])
    holder.release()
    assert hand.broker.queued == 0
    hand.drive.land(2)
    assert waiter.told == [(2, MISS)]


def test_asking_for_the_next_layer_gives_up_the_last_one(hand):
    holder, waiter = full(hand), hand.session()
    waiter.ask(2, 3)
    holder.ask(0, layer=1)
    assert holder.told[2:] == []
    assert hand.drive.asked[2:] == [2, 3], "the one who waited comes first"
    hand.drive.land(2, 3)
    waiter.release()
    hand.drive.land(16)
    assert holder.told[2:] == [(0, MISS)]


def test_a_session_that_waits_holds_nothing(hand):
    first, second = hand.session(), hand.session()
    first.ask(0)
    second.ask(1)
    hand.drive.land(0, 1)
    first.ask(2, 3)
    assert (hand.broker.queued, hand.broker.grants(first.id), hand.arena.granted) == (1, 0, 1)
    second.ask(4, 5)
    assert (hand.broker.queued, hand.broker.grants(second.id), hand.arena.granted) == (1, 0, 0)
    hand.drive.land(2, 3)
    first.release()
    hand.drive.land(4, 5)
    assert (first.told[1:], second.told[1:]) == ([(2, MISS), (3, MISS)], [(4, MISS), (5, MISS)])


def test_the_queue_is_served_in_order_even_where_a_later_one_would_fit(hand):
    holder = hand.session()
    holder.ask(0)
    hand.drive.land(0)
    large, small = hand.session(), hand.session()
    large.ask(1, 2)
    small.ask(3)
    assert hand.broker.queued == 2
    holder.release()
    assert hand.drive.asked[1:] == [1, 2]
    assert hand.broker.queued == 1
    hand.drive.land(1, 2)
    large.release()
    assert hand.drive.asked[3:] == [3]


def test_what_is_being_read_or_granted_already_needs_no_room(hand):
    reader, joiner, late = hand.session(), hand.session(), hand.session()
    reader.ask(0, 1)
    joiner.ask(1, 0)
    hand.drive.land(0, 1)
    late.ask(0)
    assert reader.told == [(0, MISS), (1, MISS)]
    assert joiner.told == [(0, JOINED), (1, JOINED)]
    assert late.told == [(0, HIT)]


def test_a_deadline_ends_the_wait_in_the_queue(hand):
    holder, waiter, next_one = full(hand), hand.session(), hand.session()
    waiter.ask(2, 3, deadline=5.0)
    next_one.ask(1, deadline=50.0)
    hand.clock.advance(4.9)
    assert waiter.told == []
    hand.clock.advance(0.2)
    assert waiter.told == [(2, LATE), (3, LATE)]
    assert "2 experts did not come within 5 s" in waiter.details[2]
    assert "waiting for room in the arena" in waiter.details[2]
    assert next_one.told == [(1, HIT)], "who waited behind it moves up"
    assert hand.broker.stats.total().failed == 2
    assert hand.broker.grants(holder.id) == 2


def test_a_deadline_ends_the_wait_for_a_drive_that_hangs_and_the_late_read_is_kept(hand):
    session = hand.session()
    session.ask(2, 3, deadline=5.0)
    hand.drive.land(3)
    hand.clock.advance(5.1)
    assert session.told == [(3, MISS), (2, LATE)]
    assert "waiting for the drive" in session.details[2]
    assert hand.broker.grants(session.id) == 1, "what came stays granted"
    assert hand.arena.counts().filling == 1, "the drive may still write into the slot"
    hand.drive.land(2)
    session.ask(2)
    assert session.told[2:] == [(2, HIT)]


def test_a_slot_in_the_drives_hands_is_room_for_nobody_whoever_gave_up(hand):
    hasty, patient = hand.session(), hand.session()
    hasty.ask(2, 3, deadline=1.0)
    hand.clock.advance(2.0)
    patient.ask(4)
    assert (hand.broker.reading, hand.broker.queued) == (2, 1)
    hand.drive.fail(3, DriveError("nvme: input/output error"))
    assert hand.drive.asked == [2, 3, 4]
    hand.drive.land(4, 2)
    assert patient.told == [(4, MISS)]


def test_a_deadline_has_no_more_to_say_once_all_is_answered(hand):
    session = hand.session()
    session.ask(2, deadline=1.0)
    hand.drive.land(2)
    assert hand.clock.waiting == 0
    hand.clock.advance(2.0)
    assert session.told == [(2, MISS)]
    assert hand.broker.grants(session.id) == 1


def test_cancelling_ends_the_wait_and_keeps_what_was_granted(hand):
    session = hand.session()
    session.ask(2, 3)
    hand.drive.land(2)
    session.cancel()
    assert session.told == [(2, MISS), (3, CANCELLED)]
    assert hand.broker.grants(session.id) == 1
    hand.drive.land(3)
    assert session.told == [(2, MISS), (3, CANCELLED)]
    assert hand.clock.waiting == 0


@pytest.mark.parametrize("leave", ["cancel", "release", "close"])
def test_who_leaves_the_queue_lets_the_next_one_in(hand, leave):
    full(hand)
    large, small = hand.session(), hand.session()
    large.ask(2, 3)
    small.ask(1)
    assert small.told == []
    getattr(large, leave)()
    assert small.told == [(1, HIT)]
    assert large.told == ([] if leave == "close" else [(2, CANCELLED), (3, CANCELLED)])
    assert hand.broker.stats.total().cancelled == 2


def test_messages_about_an_old_acquire_change_nothing(hand):
    session = hand.session()
    old = session.ask(0)
    session.ask(1)
    hand.drive.land(0, 1)
    for step in (hand.broker.release, hand.broker.cancel):
        step(session.id, old)
        step(session.id, 99)
    assert session.told == [(0, CANCELLED), (1, MISS)]
    assert hand.broker.grants(session.id) == 1


def test_closing_a_session_frees_all_that_it_held_and_waited_for(hand):
    hand.make_resident(0)
    session, waiter = hand.session(), hand.session()
    session.ask(0, 2, deadline=9.0)
    waiter.ask(3, 4)
    session.close()
    assert hand.broker.session_ids() == [waiter.id]
    assert (hand.arena.granted, hand.broker.reading, hand.broker.queued) == (0, 1, 1)
    hand.drive.land(2)
    assert hand.drive.asked == [2, 3, 4]
    session.close()
    assert session.told == [(0, HIT)], "a closed session is told nothing"
    total = hand.broker.stats.total()
    assert (total.cancelled, hand.broker.pending()) == (1, 2)
    assert (hand.broker.grants(session.id), hand.broker.requests(session.id)) == (0, 0)
    hand.drive.land(3, 4)
    waiter.close()
    assert (hand.clock.waiting, hand.arena.granted) == (0, 0)


def test_four_sessions_on_two_slots_each_finish_a_whole_layer_in_waves():
    hand = BrokerByHand(slots=2, layers=1, experts=16)
    sessions = [hand.session() for _ in range(4)]
    waves = {session.id: [(n, n + 1) for n in range(0, 16, 2)] for session in sessions}
    seen = {session.id: set() for session in sessions}
    asking = {}
    for _ in range(1000):
        for session in sessions:
            wave = asking.get(session.id)
            if wave is not None and set(session.granted) == set(wave):
                for expert, word in session.granted.items():
                    assert hand.bytes_behind(word) == hand.store.content[expert]
                seen[session.id].update(wave)
                session.release()
                session.granted = {}
                wave = None
            if wave is None and waves[session.id]:
                asking[session.id] = waves[session.id].pop(0)
                session.ask(*asking[session.id])
        if hand.drive.held:
            hand.drive.land(next(iter(hand.drive.held)))
    assert all(experts == set(range(16)) for experts in seen.values())
    total = hand.broker.stats.total()
    assert total.requests == 64 == total.hits + total.misses + total.joined
    assert hand.broker.pending() == hand.arena.granted == 0
    assert len(hand.drive.asked) == total.misses


def test_pending_counts_queued_and_read_experts_alike(hand):
    first, second = hand.session(), hand.session()
    first.ask(0, 1)
    second.ask(2, 3)
    assert (hand.broker.pending(), hand.broker.reading, hand.broker.queued) == (4, 2, 1)
    hand.drive.land(0)
    assert hand.broker.pending() == 3
    total = hand.broker.stats.total()
    assert total.requests == total.answered + hand.broker.pending()
