"""The next token's first layers: tokens that may be sampled are foreseen, and their experts from these."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from compute_node.kernels import Batch
from compute_node.kernels.matrix import dequantise, from_float32
from compute_node.models import candidate_head
from compute_node.models.candidate_head import CandidateHead, HeadWeights
from compute_node.prediction.layer_guesses import LayerGuesses
from compute_node.prediction.likely_tokens import Likely, LikelyTokens
from compute_node.prediction.native import likeliest_of
from compute_node.prediction.next_guess import NextGuess
from compute_node.prediction.next_step import NextStep
from compute_node.prediction.token_scores import TokenScores
from tierd.policy.token_table import TokenTable

EXPERTS, TOP_K, HIDDEN, VOCABULARY = 16, 4, 64, 300
RNG = np.random.default_rng(5)
ROWS = RNG.normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)
ABSENT = np.ones(EXPERTS, np.bool_)


def run(segment):
    for op in segment.ops:
        op()


def head_of(head, norm=None):
    batch, state = Batch(4), np.zeros((4, HIDDEN), np.float32)
    batch.set_rows(1)
    norm = np.ones(HIDDEN, np.float32) if norm is None else norm
    return CandidateHead(HeadWeights(norm, head), 1e-6, state, batch), state


def table_of(tokens):
    """Counts in which each token always goes with the same experts."""
    table = TokenTable([EXPERTS])
    for token in tokens:
        chosen = (np.arange(TOP_K, dtype=np.int32) + TOP_K * token) % EXPERTS
        for _ in range(9):
            table.count(token, chosen[None], previous=None)
    return table


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "int4-g64"])
def test_candidates_have_the_logits_that_the_whole_head_gives_them(kind):
    matrix, norm = from_float32(ROWS, kind), RNG.normal(size=HIDDEN).astype(np.float32)
    head, state = head_of(matrix, norm)
    state[0] = RNG.normal(size=HIDDEN)
    chosen = np.array([3, 4, 77, 299])
    head.choose(chosen)
    run(head.segment)
    normed = state[0] / np.sqrt((state[0] ** 2).mean() + 1e-6) * norm
    np.testing.assert_allclose(head.logits[0], (dequantise(matrix) @ normed)[chosen], rtol=1e-4, atol=1e-4)


def test_a_head_is_not_asked_whose_rows_are_too_wide_or_share_their_scales():
    assert head_of(from_float32(ROWS, "fp8-e4m3"))[0].most == 0
    wide = SimpleNamespace(format="bf16", rows=1000, nbytes=1000 * 40_000)
    assert CandidateHead(HeadWeights(np.ones(1, np.float32), wide), 0, np.ones((1, 1)), Batch(1)).most == 0
    assert head_of(from_float32(ROWS, "bf16"))[0].most == VOCABULARY


@given(
    arrays(np.float32, st.integers(1, 50), elements=st.floats(-30, 30, width=32) | st.just(np.nan)),
    st.floats(0.25, 16), st.integers(1, 8),
)  # fmt: skip
def test_the_likeliest_are_those_of_the_softmax_and_torn_sums_are_passed_over(logits, sharpness, most):
    places, shares = np.empty(most, np.int64), np.empty(most, np.float32)
    count = likeliest_of(logits, sharpness, places, shares)
    finite = logits[np.isfinite(logits)].astype(np.float64)
    assert count == min(most, len(finite))
    if count:
        powers = np.exp(sharpness * (finite - finite.max()))
        expected = np.sort(powers / powers.sum())[::-1][:count]
        np.testing.assert_allclose(np.sort(shares[:count])[::-1], expected, atol=1e-5)
        assert np.isfinite(logits[places[:count]]).all()
        assert len(set(places[:count].tolist())) == count


def test_candidates_are_the_tokens_seen_most():
    table = table_of(range(5))
    table.count(3, np.arange(TOP_K, dtype=np.int32)[None], previous=None)
    table.count(1, np.arange(TOP_K, dtype=np.int32)[None], previous=None)
    assert table.now.most_seen(2).tolist() == [1, 3]
    assert table.now.most_seen(9).tolist() == [0, 1, 2, 3, 4]
    assert table.now.rows_of([4, 9]).tolist() == [4, -1]


@pytest.mark.parametrize(("greedy", "least", "most"), [(True, 3.0, 16.0), (False, 0.5, 1.7)])
def test_how_sharply_tokens_are_chosen_is_learned(greedy, least, most):
    head, state = head_of(from_float32(ROWS / 4, "f32"))
    asked, rng = LikelyTokens(head, run, table_of(range(20)).now), np.random.default_rng(1)
    assert asked.ask(1) == []
    asked.refresh()
    for _ in range(400):
        state[0] = rng.normal(size=HIDDEN)
        (likely,) = asked.ask(1)
        assert likely.shares.sum() <= 1 - asked.missed + 1e-4
        powers = np.exp(head.logits[0].astype(np.float64))
        asked.learn([int(head.logits[0].argmax() if greedy else rng.choice(VOCABULARY, p=powers / powers.sum()))])
    assert least <= asked.sharpness <= most
    assert asked.missed < 0.01


def test_tokens_that_are_no_candidates_make_the_others_less_likely(monkeypatch):
    monkeypatch.setattr(candidate_head, "_MOST_TOKENS", 100)
    head, state = head_of(from_float32(ROWS, "f32"))
    asked = LikelyTokens(head, run, table_of(range(150, 170)).now)
    asked.ask(1)
    asked.refresh()
    assert head.tokens.tolist() == [*range(80), *range(150, 170)]
    state[0] = ROWS[3]
    for _ in range(200):
        asked.ask(1)
        asked.learn([200])
    assert asked.ask(1)[0].shares.sum() < 0.1


def test_experts_of_likely_tokens_are_as_likely_as_these_and_the_rest_as_what_followed():
    table = table_of([0, 1])
    for _ in range(3):
        table.count(2, np.array([[8, 9, 10, 11]], np.int32), previous=5)
    scores = TokenScores(table, [EXPERTS], TOP_K)
    likely = Likely(table.now.rows_of([0, 1, 250]), np.array([0.5, 0.2, 0.1], np.float32))
    base = TOP_K / EXPERTS  # of any expert, where nothing is known
    followed = scores.next_step(5, None, 0)
    expected = 0.2 * followed + 0.1 * base
    expected[0:4] += 0.5 * 0.9
    expected[4:8] += 0.2 * 0.9
    expected += (0.5 + 0.2) * 0.1 * base
    np.testing.assert_allclose(scores.next_step(5, likely, 0), expected, atol=1e-5)
    assert followed[8] > 3 * followed[0]


def test_a_probability_that_never_comes_true_loses_its_credit():
    guess, claimed = NextGuess(), np.full(EXPERTS, 0.9, np.float32)
    assert guess.guess(claimed, ABSENT).probabilities[0] > 0.8
    for _ in range(60):
        guess.learn(guess.guess(claimed, ABSENT), np.zeros(1, np.int32))
    assert guess.guess(claimed, ABSENT).probabilities[0] < 0.1


def test_a_step_foresees_the_next_ones_experts_of_each_row_and_learns_of_them_only_if_it_comes():
    head, state = head_of(from_float32(ROWS, "f32"))
    look, table = SimpleNamespace(candidates=head), table_of([1, 2, 7])
    step = NextStep(look, run, table, TokenScores(table, [EXPERTS], TOP_K), LayerGuesses([EXPERTS], TOP_K))
    step.ask(1)
    step.refresh()
    head._batch.set_rows(2)
    state[:2] = ROWS[[2, 7]] * 3
    step.begin([1, 1], follows=False)
    step.ask(2)
    wanted = step.wanted(0, [1, 1], ABSENT)
    assert set(np.argsort(-wanted)[:8].tolist()) == {8, 9, 10, 11, 12, 13, 14, 15}
    assert step.asked
    routes = np.arange(2 * TOP_K, dtype=np.int32).reshape(2, TOP_K) + 8
    step.begin([2, 7], follows=True)
    assert len(list(step.lessons(0, routes))) == 2
    step.ask(2)
    step.wanted(0, [2, 7], ABSENT)
    step.begin([2, 7], follows=False)
    assert not list(step.lessons(0, routes))
