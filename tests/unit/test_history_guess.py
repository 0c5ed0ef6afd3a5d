"""What the daemon guesses for sessions that send no hints, and how it learns from what they then choose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.by_hand import BrokerByHand

from tierd.broker.reading_ahead import PrefetchOptions
from tierd.policy.decayed_frequency import DecayedFrequency
from tierd.prefetch.history_guess import HistoryGuess
from tierd.prefetch.reliability import Reliability
from tierd.prefetch.throttle import Throttle
from tierd.prefetch.transitions import Transitions

LAYERS, EXPERTS, TOP_K = (3, 5, 6), 16, 2
CHOICES = st.lists(
    st.tuples(*[st.lists(st.integers(0, 7), min_size=2, max_size=2, unique=True)] * 2), min_size=1, max_size=30
)


def nothing_known(_flat):
    return False


def guesses():
    return HistoryGuess(LAYERS, [EXPERTS] * 3, TOP_K)


def walk(guess, steps, routes, *, session=1, first=0, tokens=None, known=nothing_known):
    """Let a session choose `routes`, expert numbers by layer, for some steps; returns the hints of the last step."""
    hints = []
    for step in range(first, first + steps):
        hints = guess.said(session, step, tokens, known) if tokens else []
        for place, layer in enumerate(LAYERS):
            wanted = [place * EXPERTS + expert for expert in routes[place]]
            hints.append(guess.reached(session, step, layer, wanted, (), known))
    return [hint for hint in hints if hint is not None]


ROUTES = ((1, 2), (3, 4), (5, 6))


@given(CHOICES)
def test_followers_are_counted_with_decay(choices):
    transitions, counts, seen = Transitions(24), np.zeros((8, 8)), np.zeros(8)
    for before, after in choices:
        transitions.count(np.array(before, np.int32), np.array(after, np.int32) + 8)
        counts[before] *= 0.98
        seen[before] = seen[before] * 0.98 + 1
        for expert in before:
            counts[expert, after] += 1
    before = choices[0][0]
    expected = (counts[before] / (seen[before, None] + 1)).mean(0)
    np.testing.assert_allclose(transitions.scores(np.array(before, np.int32), 8, 8), expected, rtol=1e-4)
    assert not transitions.scores(np.array(before, np.int32), 16, 8).any()


def test_a_frequent_follower_stays_among_many_rare_ones():
    transitions = Transitions(64)
    for number in range(200):
        transitions.count(np.array([0], np.int32), np.array([16, 17 + number % 40], np.int32))
    assert transitions.scores(np.array([0], np.int32), 16, 48).argmax() == 0


def test_scores_become_the_frequencies_with_which_they_came_true():
    reliability, rng = Reliability(), np.random.default_rng(0)
    scores = rng.random(4000, np.float32)
    reliability.learn(scores, rng.random(4000) < scores / 4)
    asked = np.array([0.1, 0.5, 0.9], np.float32)
    np.testing.assert_allclose(reliability.probability(asked), asked / 4, atol=0.08)


def test_the_next_layer_is_guessed_from_what_followed_before():
    hints = walk(guesses(), 12, ROUTES)
    assert [(hint.step, hint.layer, set(hint.experts)) for hint in hints] == [
        (11, 5, {3, 4}),
        (11, 6, {5, 6}),
        (12, 3, {1, 2}),
    ]
    assert all(min(hint.probabilities) > 0.7 for hint in hints)


def test_residents_are_not_guessed():
    hints = walk(guesses(), 12, ROUTES, known=lambda flat: flat in (EXPERTS + 3, 1, 2))
    assert [(hint.layer, set(hint.experts)) for hint in hints] == [(5, {4}), (6, {5, 6})]


def test_a_token_that_is_said_tells_of_the_first_layers_before_they_run():
    guess, other = guesses(), ((7, 8), (9, 10), (11, 12))
    for first in range(0, 40, 2):
        walk(guess, 1, ROUTES, first=first, tokens=[100])
        walk(guess, 1, other, first=first + 1, tokens=[200])
    said = guess.said(1, 40, [200], nothing_known)
    assert [(hint.step, hint.layer) for hint in said] == [(40, 3), (40, 5)]
    for hint, experts in zip(said, other, strict=False):
        assert set(hint.experts[:2]) == set(experts)
    assert guess.said(2, 0, [300], nothing_known) == []


def test_a_guess_that_keeps_being_wrong_loses_its_probability():
    guess, rng = guesses(), np.random.default_rng(1)
    before = walk(guess, 12, ROUTES)[0].probabilities[0]
    for step in range(12, 200):
        draw = [rng.choice(EXPERTS, 2, replace=False).tolist() for _ in LAYERS]
        hints = walk(guess, 1, (ROUTES[0], *draw[1:]), first=step)
    after = max(p for hint in hints if hint.layer == 5 for p in hint.probabilities)
    assert after < before / 2


def test_several_tokens_at_once_are_taken_together():
    guess = guesses()
    for first in range(0, 40, 2):
        walk(guess, 1, ROUTES, first=first)
        walk(guess, 1, ((7, 8), (9, 10), (11, 12)), first=first + 1)
    hint = guess.reached(2, 0, 3, [1, 2, 7, 8], (), nothing_known)
    assert hint is not None
    assert set(hint.experts[:4]) == {3, 4, 9, 10}


def test_steps_that_have_passed_and_unknown_layers_are_ignored():
    guess = guesses()
    walk(guess, 5, ROUTES)
    assert guess.reached(1, 2, 3, [1, 2], (), nothing_known) is None
    assert guess.reached(1, 9, 4, [1, 2], (), nothing_known) is None
    assert guess.said(1, 2, [5], nothing_known) == []


def test_an_ended_session_begins_anew():
    guess = guesses()
    walk(guess, 12, ROUTES)
    guess.ended(1)
    assert guess.reached(1, 0, 3, [1, 2], (), nothing_known) is not None


def test_the_token_table_keeps_to_its_bound():
    guess = HistoryGuess(LAYERS, [EXPERTS] * 3, TOP_K, max_bytes=4096)
    plain = guess.nbytes
    for token in range(300):
        walk(guess, 1, ROUTES, first=token, tokens=[token])
    assert plain < guess.nbytes <= plain + 4096


# With a broker.


def hand_that_guesses(throttle=None):
    guess = HistoryGuess(range(4), [16] * 4, 2)
    options = PrefetchOptions(guesses=guess, guess_throttle=throttle)
    return BrokerByHand(slots=30, most=4, layers=4, policy=DecayedFrequency(), prefetch=options)


def go_round(hand, session, steps=16, *, says=False):
    """Eight steps that use all 64 experts, two of each layer, again and again: more than fit."""
    for step in range(steps):
        if says:
            hand.broker.said(session.id, step, [step % 8])
            hand.drive.land(*list(hand.drive.held))
        for layer in range(4):
            session.ask(2 * step % 16, (2 * step + 1) % 16, layer=layer, step=step)
            while hand.drive.held:  # what was asked for, then what is read ahead while the node computes
                hand.drive.land(*list(hand.drive.held))


@pytest.fixture
def hand():
    return hand_that_guesses()


def test_the_next_layer_of_a_session_without_hints_is_read_while_it_computes(hand):
    session = hand.session()
    go_round(hand, session)
    counts = hand.broker.stats.prefetch
    assert counts.guessed == counts.hinted == counts.cut + counts.known + counts.issued.experts
    assert counts.used.experts > 0


def test_a_session_that_hints_is_left_to_its_own_hints(hand):
    session = hand.session()
    session.hint(9, layer=3)
    go_round(hand, session)
    assert hand.broker.stats.prefetch.guessed == 0


def test_nothing_is_guessed_while_the_throttle_is_off():
    hand = hand_that_guesses(Throttle(0, fixed=True))
    go_round(hand, hand.session())
    assert (hand.broker.stats.prefetch.hinted, hand.broker.ahead.guess_level) == (0, 0)


def test_a_throttle_that_begins_at_off_tries_guesses_in_the_end():
    throttle = Throttle(0)
    hand = hand_that_guesses(throttle)
    go_round(hand, hand.session(), steps=40)
    assert hand.broker.stats.prefetch.guessed > 0


def test_a_token_that_is_said_is_read_ahead_of_before_the_step():
    plain, told = hand_that_guesses(), hand_that_guesses()
    go_round(plain, plain.session(), steps=24)
    go_round(told, told.session(), steps=24, says=True)
    # The first layer follows the last one of the step before, or its token.
    assert told.broker.stats.total().hits > plain.broker.stats.total().hits
