"""Counts of experts by token, in bounded memory, and the expectations that are made of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.errors import UsageError
from tierd.policy.expectation import Expectation
from tierd.policy.token_table import ChoiceTable, TokenTable


def chosen(*layers):
    return np.array(layers, np.int32)


def as_dict(found):
    experts, probabilities = found
    return {int(e): float(p) for e, p in zip(experts.ravel(), probabilities.ravel(), strict=True) if e >= 0}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 7), min_size=2, max_size=2)), max_size=30))
def test_with_a_place_for_every_expert_the_counts_are_exact(history):
    table, counts, seen = ChoiceTable(1, 10, places=8), {}, {}
    for token, experts in history:
        table.count(token, chosen(sorted(experts)))
        seen[token] = seen.get(token, 0) + 1
        for expert in experts:
            counts[token, expert] = counts.get((token, expert), 0) + 1
    assert len(table) == len(seen)
    for token in range(4):
        found = table.probabilities(token)
        if token not in seen:
            assert found is None
        else:
            expected = {e: counts[token, e] / (seen[token] + 1) for e in range(8) if (token, e) in counts}
            assert as_dict(found) == pytest.approx(expected)


def test_a_frequent_expert_keeps_its_place_among_many_rare_ones():
    table = ChoiceTable(1, 4, places=4)
    for number in range(600):
        table.count(9, chosen([0, 1 + number % 100]))
    assert as_dict(table.probabilities(9))[0] == pytest.approx(600 / 601)


def test_the_token_that_was_counted_the_longest_ago_makes_room():
    table = ChoiceTable(2, 3)
    for token in (1, 2, 3, 1, 4):
        table.count(token, chosen([token], [8 + token]))
    assert [table.probabilities(token) is not None for token in (1, 2, 3, 4)] == [True, False, True, True]
    assert as_dict(table.probabilities(4)) == {4: 0.5, 12: 0.5}
    assert len(table) == 3


def test_counts_of_a_token_are_halved_before_they_overflow():
    table = ChoiceTable(1, 1)
    for _ in range(1 << 14):
        table.count(0, chosen([3]))
    assert int(table._seen[0]) == int(table._counts.max()) == 1 << 13
    assert as_dict(table.probabilities(0))[3] == pytest.approx(1, abs=1e-3)


def test_memory_stays_within_its_bound():
    table = TokenTable([4, 4], max_bytes=100_000)
    for token in range(5000):
        table.count(token, chosen([token % 4], [4 + token % 4]), previous=token - 1 if token else None)
    assert 90_000 < table.nbytes <= 100_000
    with pytest.raises(UsageError, match="does not fit 10 bytes"):
        TokenTable([4], max_bytes=10)


def test_a_saved_table_comes_back():
    table, again = TokenTable([4, 4]), TokenTable([4, 4])
    for token, previous in ((5, None), (6, 5), (5, 6)):
        table.count(token, chosen([token % 4], [4 + token % 4]), previous=previous)
    again.restore(table.as_arrays())
    for token in (5, 6):
        for ours, theirs in ((table.now, again.now), (table.after, again.after)):
            assert as_dict(ours.probabilities(token)) == as_dict(theirs.probabilities(token))
    again.count(7, chosen([0], [4]), previous=5)
    assert len(again.now) == 3


def test_a_smaller_table_keeps_the_newest_tokens():
    large, small = ChoiceTable(1, 10), ChoiceTable(1, 2)
    for token in (1, 2, 3):
        large.count(token, chosen([0]))
    small.restore(large.as_arrays(), experts=1)
    assert [small.probabilities(token) is not None for token in (1, 2, 3)] == [False, True, True]


@pytest.mark.parametrize(
    "change",
    [
        {"now.counts": None},
        {"now.experts": np.full((1, 2, 16), 8, np.int32)},
        {"now.experts": np.full((1, 2, 16), -2, np.int32)},
        {"after.seen": np.zeros(3, np.uint32)},
        {"now.tokens": np.zeros(1, np.float64)},
        {"now.counts": np.zeros((1, 3, 16), np.uint16)},
    ],
)
def test_a_saved_table_that_cannot_be_is_refused(change):
    table = TokenTable([4, 4])
    table.count(1, chosen([0], [4]), previous=1)
    arrays = {name: array for name, array in (table.as_arrays() | change).items() if array is not None}
    with pytest.raises(UsageError, match="saved token table"):
        TokenTable([4, 4]).restore(arrays)


def test_a_table_has_room_for_something():
    with pytest.raises(UsageError, match="at least one"):
        ChoiceTable(1, 0)


@pytest.fixture
def expectation():
    """Two layers of four; token 1 chose experts 0 and 4 three times, and token 2 after it chose 1 and 5."""
    table = TokenTable([4, 4])
    for _ in range(3):
        table.count(1, chosen([0], [4]), previous=None)
        table.count(2, chosen([1], [5]), previous=1)
    return Expectation(table)


def test_a_step_expects_its_own_layers_until_they_are_passed_and_then_the_next_step(expectation):
    expectation.begin([1])
    assert expectation.out.tolist() == [191, 0, 0, 0, 191, 0, 0, 0]
    expectation.passed(0)
    assert expectation.out.tolist() == [0, 96, 0, 0, 191, 0, 0, 0]
    expectation.passed(1)
    assert expectation.out.tolist() == [0, 96, 0, 0, 0, 96, 0, 0]


def test_an_unknown_token_expects_nothing_and_is_learned_from(expectation):
    expectation.begin([3])
    assert not expectation.out.any()
    expectation.passed(0)
    expectation.end(np.array([[[2], [6]]], np.int32), previous=2)
    expectation.begin([3])
    assert expectation.out.tolist() == [0, 0, 128, 0, 0, 0, 128, 0]
    expectation.begin([2])
    expectation.passed(0)
    assert expectation.out.tolist() == [0, 0, 64, 0, 0, 191, 0, 0]


def test_tokens_of_a_prompt_expect_together_and_are_learned_in_their_order(expectation):
    expectation.begin([1, 2, 1])
    assert expectation.out.tolist() == [239, 191, 0, 0, 239, 191, 0, 0]  # 1 - (1/4)^2 of 255
    expectation.end(np.array([[[3], [7]], [[2], [6]], [[3], [7]]], np.int32), previous=None)
    assert as_dict(expectation.table.after.probabilities(2)) == {3: 0.5, 7: 0.5}
    assert as_dict(expectation.table.after.probabilities(1))[2] == pytest.approx(1 / 5)


def test_next_to_nothing_is_nothing():
    table = TokenTable([200])
    for number in range(100):
        table.count(1, chosen([0] if number else [7]), previous=None)
    expectation = Expectation(table)
    expectation.begin([1])
    assert expectation.out.tolist() == [round(255 * 99 / 101)] + [0] * 199


def test_expectations_are_written_where_they_are_wanted():
    out = np.zeros(4, np.uint8)
    table = TokenTable([4])
    table.count(1, chosen([2]), previous=None)
    Expectation(table, out).begin([1])
    assert out.tolist() == [0, 0, 128, 0]
    for wrong in (np.zeros(5, np.uint8), np.zeros(4, np.int8)):
        with pytest.raises(UsageError, match="4 experts"):
            Expectation(table, wrong)
