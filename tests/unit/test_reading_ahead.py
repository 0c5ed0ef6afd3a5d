"""What the broker does with hints: it reads early, disturbs nobody, and every guess ends in one of the counts."""

from __future__ import annotations

import pytest
from simulation.by_hand import BrokerByHand

from tierd.broker.reading_ahead import PrefetchOptions
from tierd.errors import DriveError
from tierd.policy.decayed_frequency import DecayedFrequency
from tierd.prefetch.throttle import Throttle
from tierd.requests import Outcome

HIT, MISS, JOINED = Outcome.HIT, Outcome.MISS, Outcome.JOINED
FIRST = 16
"""Flat number of expert 0 of layer 1."""


@pytest.fixture
def hand():
    return BrokerByHand(slots=30, most=4, layers=4)


def counts(hand):
    """All counts of guesses that are not zero, in experts."""
    found = hand.broker.stats.prefetch
    pending = hand.broker.ahead.book.pending().experts
    named = {name: getattr(found, name).experts for name in ("issued", "used", "late", "wasted", "cancelled")}
    named |= {reason.value: tally.experts for reason, tally in found.dropped.items()}
    assert named["issued"] == sum(named.values()) - named["issued"] + pending
    assert found.hinted == found.cut + found.known + found.issued.experts
    return {name: count for name, count in {**named, "pending": pending}.items() if count}


def test_a_hinted_expert_is_read_and_then_a_hit(hand):
    session = hand.session()
    session.hint(3)
    assert hand.drive.asked == [FIRST + 3]
    hand.drive.land(FIRST + 3)
    assert (hand.broker.stats.total().requests, counts(hand)) == (0, {"issued": 1, "pending": 1})
    session.ask(3, layer=1)
    assert session.told == [(3, HIT)]
    assert counts(hand) == {"issued": 1, "used": 1}


def test_a_request_joins_a_guess_that_is_being_read(hand):
    session = hand.session()
    session.hint(3)
    session.ask(3, layer=1)
    hand.drive.land(FIRST + 3)
    assert (session.told, hand.drive.asked) == ([(3, JOINED)], [FIRST + 3])
    assert counts(hand) == {"issued": 1, "late": 1}


def test_no_guess_is_read_while_a_request_waits(hand):
    session, other = hand.session(), hand.session()
    other.ask(1)
    session.hint(3)
    assert hand.drive.asked == [1]
    hand.drive.land(1)
    assert hand.drive.asked == [1, FIRST + 3]


def test_a_request_passes_the_guesses_for_layers_to_come_that_no_drive_has_begun(hand):
    session, other = hand.session(), hand.session()
    other.ask(1)
    session.hint(3, 4)
    session.ask(2)
    assert (hand.drive.asked, len(hand.drive.behind)) == ([1, 2], 2)
    assert counts(hand) == {"issued": 2, "pending": 2}
    hand.drive.land(1)
    assert hand.drive.asked == [1, 2]
    hand.drive.land(2)
    assert hand.drive.asked == [1, 2, FIRST + 3, FIRST + 4]


def crowded():
    """Ten slots: nine are wanted, and into the last one a guess is read behind them; the fourth session is idle."""
    hand = BrokerByHand(slots=10, most=4)
    sessions = [hand.session() for _ in range(4)]
    sessions[0].ask(0)
    sessions[0].hint(3)
    sessions[1].ask(1, 2, 3, 4)
    sessions[2].ask(5, 6, 7, 8)
    return hand, sessions


def test_a_request_takes_the_room_of_a_guess_that_no_drive_has_begun():
    hand, sessions = crowded()
    assert ([held.read.expert for held in hand.drive.behind], hand.broker.queued) == ([FIRST + 3], 0)
    sessions[3].ask(9)
    assert (hand.drive.behind, hand.broker.queued) == ([], 0)
    assert hand.broker.reading == 10
    assert counts(hand) == {"issued": 1, "pending": 1}


def test_a_request_that_waits_for_room_hurries_the_guesses_that_it_wants():
    hand, sessions = crowded()
    sessions[3].ask(3, 4, layer=1)
    assert hand.broker.queued == 1
    assert hand.drive.asked[-1] == FIRST + 3
    hand.drive.land(FIRST + 3)
    sessions[1].close()
    hand.drive.land(1)
    assert sessions[3].told == [(3, HIT)]
    assert counts(hand) == {"issued": 1, "used": 1}


def test_a_request_for_a_guess_that_no_drive_has_begun_joins_it_and_hurries_it(hand):
    session, other = hand.session(), hand.session()
    other.ask(1)
    session.hint(3, 4)
    assert (hand.drive.asked, len(hand.drive.behind)) == ([1], 2)
    session.ask(3, layer=1)
    assert hand.drive.asked == [1, FIRST + 3], "it does not wait until the drive has nothing else to do"
    assert counts(hand) == {"issued": 2, "late": 1, "cancelled": 1}
    hand.drive.land(1, FIRST + 3)
    assert session.told == [(3, JOINED)]
    assert hand.drive.behind == []


def test_guesses_are_read_by_probability_and_the_nearer_layer_first(hand):
    hand.broker.ahead._options = PrefetchOptions(depth=lambda: 1)
    session = hand.session()
    session.ask(1)
    session.hint(5, layer=2, probabilities=(0.9,))
    session.hint(3, 4, layer=1, probabilities=(0.2, 0.7))
    for flat in (1, FIRST + 4, FIRST + 3, 2 * FIRST + 5):
        assert list(hand.drive.held) == [flat]
        hand.drive.land(flat)


def test_unused_guesses_take_a_tenth_of_the_arena(hand):
    session = hand.session()
    session.hint(*range(8))
    assert len(hand.drive.held) == 3
    hand.drive.land(*list(hand.drive.held))
    assert counts(hand) == {"issued": 8, "no_room": 5, "pending": 3}


def test_a_guess_waits_where_a_request_would_find_no_room_beside_it():
    hand = BrokerByHand(slots=4, most=4)
    hand.session().hint(1)
    assert hand.drive.asked == []


def test_experts_of_this_step_and_the_last_stay():
    hand = BrokerByHand(slots=10, most=2)
    session = hand.session()
    for step in range(2):
        for first in range(0, 5, 1):
            session.ask(2 * first, 2 * first + 1, step=step)
            hand.drive.land(*list(hand.drive.held))
    session.release()
    session.hint(3, step=1)
    assert counts(hand) == {"issued": 1, "no_room": 1}
    session.ask(0, step=2)
    session.ask(0, step=3)
    session.release()
    session.hint(3, step=3)
    hand.drive.land(FIRST + 3)
    assert len(hand.resident()) == 10
    assert FIRST + 3 in hand.resident()


def test_a_guess_takes_no_slot_that_is_worth_more_than_it():
    hand = BrokerByHand(slots=10, most=2, policy=DecayedFrequency())
    session = hand.session()
    for step in range(60):
        for first in range(5):
            session.ask(2 * first, 2 * first + 1, step=step)
            hand.drive.land(*list(hand.drive.held))
    session.close()
    other = hand.session()
    other.hint(3, 4, probabilities=(0.2, 0.9))
    assert list(hand.drive.held) == [FIRST + 4]
    assert counts(hand) == {"issued": 2, "pending": 2}
    hand.drive.land(FIRST + 4)
    assert counts(hand) == {"issued": 2, "no_room": 1, "pending": 1}


def test_what_a_request_evicts_first_is_not_a_guess_whose_layer_is_still_to_come():
    hand = BrokerByHand(slots=4, most=1)
    session = hand.session()
    session.hint(3)
    hand.drive.land(FIRST + 3)
    for expert in range(6):
        session.ask(expert)
        hand.drive.land(expert)
    assert FIRST + 3 in hand.resident()
    session.ask(9, layer=1)
    hand.drive.land(FIRST + 9)
    for expert in range(6, 10):
        session.ask(expert, step=1)
        hand.drive.land(expert)
    assert counts(hand) == {"issued": 1, "wasted": 1}


def test_a_failed_guess_is_silent_and_leaves_nothing(hand):
    session = hand.session()
    session.hint(3)
    hand.drive.fail(FIRST + 3, DriveError("nvme: input/output error"))
    assert (session.told, hand.resident(), hand.arena.counts().free) == ([], set(), 30)
    assert counts(hand) == {"issued": 1, "failed": 1}
    session.ask(3, layer=1)
    hand.drive.land(FIRST + 3)
    assert session.told == [(3, MISS)]


def test_a_new_hint_for_the_layer_replaces_the_last_one_and_an_empty_one_takes_it_back(hand):
    hand.drive.begins = False
    session = hand.session()
    session.hint(3, 4)
    session.hint(4, 5)
    assert counts(hand) == {"issued": 3, "cancelled": 1, "pending": 2}
    session.hint()
    assert counts(hand) == {"issued": 3, "cancelled": 3}
    assert hand.drive.held == {}


def test_guesses_end_when_the_router_has_chosen_and_when_the_layer_has_passed(hand):
    hand.drive.begins = False
    hand.broker.ahead._options = PrefetchOptions(depth=lambda: 1)
    session, other = hand.session(), hand.session()
    other.ask(0)
    session.hint(3, 4, layer=1)
    session.hint(5, layer=2)
    session.ask(4, layer=1)
    assert counts(hand) == {"issued": 3, "cancelled": 1, "overtaken": 1, "pending": 1}
    session.ask(7, layer=3)
    assert counts(hand) == {"issued": 3, "cancelled": 1, "overtaken": 1, "expired": 1}
    session.hint(8, layer=2)
    assert counts(hand)["expired"] == 2


def test_a_guess_that_could_only_begin_after_its_layer_is_dropped(hand):
    hand.broker.ahead._options = PrefetchOptions(depth=lambda: 1)
    session, other = hand.session(), hand.session()
    other.ask(0)
    session.hint(3, lead=0.5)
    session.hint(4, layer=2, lead=5.0)
    hand.clock.advance(1.0)
    hand.drive.land(0)
    assert list(hand.drive.held) == [2 * FIRST + 4]
    assert counts(hand) == {"issued": 2, "deadline": 1, "pending": 1}


def test_two_sessions_that_guess_the_same_cause_one_read_and_either_may_leave(hand):
    hand.drive.begins = False
    first, second = hand.session(), hand.session()
    first.hint(3)
    second.hint(3)
    assert hand.drive.asked == [FIRST + 3]
    first.close()
    assert list(hand.drive.held) == [FIRST + 3]
    second.close()
    assert hand.drive.held == {}
    assert counts(hand) == {"issued": 1, "cancelled": 1}


@pytest.mark.parametrize(
    ("layer", "experts", "probabilities", "cut"),
    [
        (99, (1, 2), (), 2),
        (1, (1, 1, 77), (), 2),
        (1, tuple(range(16)) * 4, (), 48),
        (1, (1, 2, 3, 4), (float("nan"), -1.0, 2.0, 0.5), 3),
    ],
)
def test_an_absurd_hint_is_cut_to_size(hand, layer, experts, probabilities, cut):
    session = hand.session()
    session.hint(*experts, layer=layer, probabilities=probabilities)
    assert hand.broker.stats.prefetch.cut == cut
    counts(hand)


def test_a_hint_for_everything_reads_a_few(hand):
    hand.broker.ahead._options = PrefetchOptions(most_per_hint=2)
    hand.session().hint(*range(16))
    assert len(hand.drive.held) == 2
    assert hand.broker.stats.prefetch.cut == 14


def test_a_flood_of_hints_has_a_bound():
    hand = BrokerByHand(slots=2, most=2, layers=64)
    session = hand.session()
    for layer in range(64):
        session.hint(*range(16), layer=layer)
    assert counts(hand) == {"issued": 1024, "overflow": 768, "pending": 256}


def test_unasked_uses_of_a_guess_count_as_used(hand):
    session = hand.session()
    session.hint(3)
    hand.drive.land(FIRST + 3)
    hand.sessions.note_use(session.id, FIRST + 3, 0)
    session.ask(1, layer=2)
    assert counts(hand) == {"issued": 1, "used": 1}


def test_off_drops_every_guess():
    hand = BrokerByHand(slots=30, most=4, prefetch=PrefetchOptions(throttle=Throttle(0, fixed=True)))
    hand.session().hint(1, 2)
    assert (hand.drive.asked, counts(hand)) == ([], {"issued": 2, "throttled": 2})


def test_hints_that_never_come_true_are_soon_not_followed_any_more():
    hand = BrokerByHand(slots=30, most=4, layers=2, prefetch=PrefetchOptions(throttle=Throttle(3, fixed=True)))
    session = hand.session()
    read = []
    for step in range(40):
        before = len(hand.drive.asked)
        session.hint(8 + step % 8, step=step, probabilities=(0.9,))
        read.append(len(hand.drive.asked) > before)
        hand.drive.land(*hand.drive.held)
        session.ask(step % 4, layer=1, step=step)
        hand.drive.land(*hand.drive.held)
    assert read[0]
    assert not any(read[-10:])


def test_what_requests_wait_reaches_the_throttle_once_per_token():
    throttle = Throttle()
    told = []
    throttle.token = told.append  # type: ignore[method-assign]
    hand = BrokerByHand(slots=30, most=4, prefetch=PrefetchOptions(throttle=throttle))
    session = hand.session()
    for step in range(3):
        session.hint(15, layer=3, step=step)
        session.ask(step, step=step)
        hand.clock.advance(0.25)
        hand.drive.land(step)
    session.hint(15, layer=3, step=7)
    session.ask(0, step=7)
    assert told == [0.25, 0.25, 0.05, 0.05, 0.05, 0.05, 0.05]
    # What steps cost for which it hinted nothing tells nothing of hints.
    session.ask(0, step=9)
    session.ask(0, step=10)
    assert len(told) == 7


def test_several_guesses_that_the_router_disagrees_with_are_taken_back_at_once(hand):
    hand.drive.begins = False
    session = hand.session()
    session.hint(3, layer=1)
    session.hint(5, layer=2)
    assert len(hand.drive.held) == 2
    session.ask(1, layer=2)
    assert list(hand.drive.held) == [2 * FIRST + 1]
    assert counts(hand) == {"issued": 2, "cancelled": 2}


def test_what_the_only_session_holds_is_not_in_the_way():
    hand = BrokerByHand(slots=4, most=2)
    session = hand.session()
    session.ask(0, 1)
    hand.drive.land(0, 1)
    other = hand.session()
    session.hint(3)
    assert hand.drive.held == {}
    other.close()
    assert list(hand.drive.held) == [FIRST + 3]
