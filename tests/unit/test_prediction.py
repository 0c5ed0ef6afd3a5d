"""Guesses of what a layer will want: they learn, they know how sure they are, and the best way to tell is used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from compute_node.prediction.calibration import count_chosen, first_counts, margins, probabilities
from compute_node.prediction.correction import Correction
from compute_node.prediction.layer_guess import LayerGuess
from compute_node.prediction.token_scores import TokenScores
from tierd.policy.token_table import TokenTable

EXPERTS, TOP_K = 16, 4
EVERYTHING = np.ones(EXPERTS, np.bool_)


def top(scores):
    return np.argsort(-scores)[:TOP_K].astype(np.int32)


def test_a_correction_says_at_first_what_its_input_says():
    x = np.arange(6, dtype=np.float32)
    assert Correction(6, 4).predict(x).tolist() == [0, 1, 2, 3]


def test_a_correction_learns_a_map_and_then_another_one():
    rng = np.random.default_rng(1)
    correction = Correction(6, 4)
    for truth in rng.normal(size=(2, 6, 4)).astype(np.float32):
        for _ in range(25_000):
            x = rng.normal(size=6).astype(np.float32)
            correction.learn(x, x @ truth + 1)
        x = rng.normal(size=6).astype(np.float32)
        np.testing.assert_allclose(correction.predict(x), x @ truth + 1, atol=0.2 * abs(truth).sum())


def test_a_correction_is_close_after_few_samples():
    rng = np.random.default_rng(2)
    correction = Correction(6, 4)
    truth = rng.normal(size=(6, 4)).astype(np.float32)
    for _ in range(2000):
        x = rng.normal(size=6).astype(np.float32)
        correction.learn(x, x @ truth)
    np.testing.assert_allclose(correction.predict(x), x @ truth, atol=0.15)


@given(arrays(np.float32, EXPERTS, elements=st.floats(-50, 50, width=32), unique=True))
def test_exactly_the_highest_scores_lie_above_the_border(scores):
    above = np.flatnonzero(margins(scores, TOP_K) > 0)
    assert set(above.tolist()) <= set(top(scores).tolist())
    assert margins(scores, EXPERTS).tolist() == [1.0] * EXPERTS


def test_probabilities_become_what_happens():
    rng = np.random.default_rng(3)
    counts = first_counts()
    for _ in range(3000):
        margin = rng.uniform(-2, 2, EXPERTS).astype(np.float32)
        count_chosen(counts, margin, rng.random(EXPERTS) < np.where(margin > 0, 0.7, 0.1), EVERYTHING)
    low, high = probabilities(counts, np.array([-1.0, 1.0], np.float32))
    assert (low, high) == (pytest.approx(0.1, abs=0.05), pytest.approx(0.7, abs=0.05))


def run_layer(look_noise, token_noise, tokens=600):
    """A layer whose router is seen through noise; returns its guesses' recall by predictor, and the last guess."""
    rng = np.random.default_rng(4)
    layer = LayerGuess(EXPERTS, TOP_K)
    for _ in range(tokens):
        logits = rng.normal(size=EXPERTS).astype(np.float32)
        look = logits + look_noise * rng.normal(size=EXPERTS).astype(np.float32)
        token = logits + token_noise * rng.normal(size=EXPERTS).astype(np.float32)
        guess = layer.guess(look, token, rng.random(EXPERTS) < 0.75)
        layer.learn(guess, top(logits), logits)
    return layer, guess


@pytest.mark.parametrize(
    ("look_noise", "token_noise", "best"),
    [
        (0.1, 5.0, {"look-ahead", "corrected"}),
        (5.0, 0.1, {"token table", "corrected"}),
        (0.5, 0.5, {"both", "corrected"}),
    ],
)
def test_the_predictor_that_tells_best_is_believed(look_noise, token_noise, best):
    layer, guess = run_layer(look_noise, token_noise)
    assert guess.chosen_by in best
    assert layer.recall[guess.chosen_by] == max(layer.recall.values())


def test_a_map_learns_what_no_other_predictor_sees():
    rng = np.random.default_rng(5)
    layer, shuffle = LayerGuess(EXPERTS, TOP_K), rng.permutation(EXPERTS)
    for _ in range(600):
        logits = rng.normal(size=EXPERTS).astype(np.float32)
        guess = layer.guess(logits[shuffle], None, EVERYTHING)
        layer.learn(guess, top(logits), logits)
    assert guess.chosen_by == "corrected"
    assert len(set(top(guess.scores["corrected"]).tolist()) & set(top(logits).tolist())) >= 3


def test_nothing_to_go_by_is_no_guess_and_impossible_numbers_are_passed_over():
    layer = LayerGuess(EXPERTS, TOP_K)
    assert layer.guess(None, None, EVERYTHING) is None
    assert layer.guess(np.full(EXPERTS, np.nan, np.float32), None, EVERYTHING) is None


def test_a_large_layer_learns_no_map():
    layer = LayerGuess(256, TOP_K)
    guess = layer.guess(np.zeros(256, np.float32), np.zeros(256, np.float32), np.ones(256, np.bool_))
    assert set(guess.scores) == {"look-ahead", "token table", "both"}


def test_an_unknown_token_scores_as_the_layer_does_and_a_known_one_as_it_did():
    table = TokenTable([EXPERTS, EXPERTS])
    scores = TokenScores(table, [EXPERTS, EXPERTS], TOP_K)
    for _ in range(100):
        scores.learn(1, np.array([2, 3, 4, 5], np.int32))
    assert set(top(scores.of(7, 1)).tolist()) == {2, 3, 4, 5}
    chosen = np.array([[0, 1, 2, 3], [8, 9, 10, 11]], np.int32) + np.array([[0], [EXPERTS]], np.int32)
    for _ in range(5):
        table.count(7, chosen, previous=None)
    assert set(top(scores.of(7, 1)).tolist()) == {8, 9, 10, 11}
    assert set(top(scores.of(7, 0)).tolist()) == {0, 1, 2, 3}
