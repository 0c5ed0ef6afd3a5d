from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_node.engine.sampler import Sampling, choose_token
from tierd.errors import TierdError, UsageError


def logits(*values):
    return np.array(values, np.float32)


def draws(values, count=400, **how):
    sampling = Sampling(**({"temperature": 1.0, "seed": 7} | how))
    return [choose_token(values, position, sampling) for position in range(count)]


def test_greedy_takes_the_largest_and_the_lower_id_among_equals():
    assert choose_token(logits(1, 3, 2), 0, Sampling()) == 1
    assert choose_token(logits(1, 3, 3, 3), 5, Sampling()) == 1


def test_draws_depend_on_seed_and_position_alone():
    values = np.random.default_rng(0).normal(size=100).astype(np.float32)
    sampling = Sampling(temperature=1.0, seed=3)
    forwards = [choose_token(values, position, sampling) for position in range(50)]
    backwards = [choose_token(values, position, sampling) for position in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) > 10
    assert forwards != [choose_token(values, position, Sampling(temperature=1.0, seed=4)) for position in range(50)]


def test_draws_stay_the_same_from_version_to_version():
    values = np.linspace(-2, 2, 50).astype(np.float32)
    assert draws(values, 8, seed=1) == [45, 49, 45, 37, 27, 31, 33, 21]


def test_draws_follow_the_probabilities():
    values = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    counts = np.bincount(draws(values, 4000), minlength=4) / 4000
    assert np.abs(counts - [0.5, 0.3, 0.15, 0.05]).max() < 0.03


def test_temperature_sharpens():
    values = logits(0, 1)
    assert set(draws(values, temperature=5e-324)) == {1}
    assert sum(draws(values, temperature=0.2)) > sum(draws(values)) > sum(draws(values, temperature=5.0))


def test_top_k_keeps_k_and_prefers_lower_ids_among_equals():
    assert set(draws(logits(1, 2, 2, 2, 0), top_k=2)) == {1, 2}
    assert set(draws(logits(1, 2, 3), top_k=1)) == {2}
    assert set(draws(logits(1, 1, 1), top_k=50)) == {0, 1, 2}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    values = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    assert set(draws(values, top_p=0.7)) == {0, 1}
    assert set(draws(values, top_p=0.01)) == {0}
    assert set(draws(values, top_p=1.0)) == {0, 1, 2, 3}


def test_min_p_is_relative_to_the_likeliest():
    values = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    assert set(draws(values, min_p=0.25)) == {0, 1, 2}
    assert set(draws(values, min_p=1.0)) == {0}


def test_repetition_penalty_lowers_seen_tokens_once():
    values = logits(2.0, 1.9, -1.0)
    sampling = Sampling(repetition_penalty=1.2)
    assert choose_token(values, 0, sampling, prompt=[0]) == 1
    assert choose_token(values, 0, sampling, prompt=[0], generated=[0, 1]) == 0
    assert values.tolist() == logits(2.0, 1.9, -1.0).tolist()


def test_presence_and_frequency_count_generated_tokens_only():
    values = logits(2.0, 1.5, 1.0)
    presence, frequency = Sampling(presence_penalty=0.8), Sampling(frequency_penalty=0.3)
    assert choose_token(values, 0, presence, prompt=[0]) == 0
    assert choose_token(values, 0, presence, generated=[0, 0, 0]) == 1
    assert choose_token(values, 0, frequency, generated=[0]) == 0
    assert choose_token(values, 0, frequency, generated=[0, 0]) == 1
    assert choose_token(values, 0, frequency, generated=[0, 0, 0, 0, 1, 1]) == 2
    assert choose_token(values, 0, Sampling(presence_penalty=-2.0), generated=[2]) == 2


def test_biases_masks_and_forbidden_tokens_decide_before_the_draw():
    values = logits(2.0, 1.5, 1.0)
    assert choose_token(values, 0, Sampling(logit_bias=((2, 5.0),))) == 2
    assert choose_token(values, 0, Sampling(), allowed=np.array([False, True, True])) == 1
    assert choose_token(values, 0, Sampling(), allowed=np.array([False, True, True]), forbidden=[1]) == 2
    sampling = Sampling(temperature=5.0, seed=1, logit_bias=((0, -100.0),))
    found = {choose_token(values, position, sampling, forbidden=[2]) for position in range(50)}
    assert found == {1}
    with pytest.raises(TierdError, match="no token may be chosen at position 7"):
        choose_token(values, 7, Sampling(), allowed=np.zeros(3, bool))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error(broken):
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        with pytest.raises(TierdError, match="position 9"):
            choose_token(logits(1, broken), 9, sampling)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 2},
        {"seed": -1},
        {"seed": 1 << 64},
        {"repetition_penalty": 0},
        {"frequency_penalty": 101},
        {"presence_penalty": float("nan")},
        {"logit_bias": ((3, 101.0),)},
        {"logit_bias": ((-1, 1.0),)},
    ],
)
def test_values_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong)).replace("_", "-")):
        Sampling(**wrong)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    st.floats(0, 100),
    st.integers(0, 50),
    st.floats(1e-9, 1),
    st.floats(0, 1),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, 1 << 32),
)
def test_any_setting_chooses_one_of_the_allowed_tokens(values, temperature, top_k, top_p, min_p, seed, position):
    array = logits(*values)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    token = choose_token(array, position, sampling)
    assert 0 <= token < len(values)
    if top_k:
        assert sorted(values, reverse=True)[: max(top_k, 1)][-1] <= array[token]


def test_a_penalty_beyond_the_largest_number_still_chooses():
    values = np.array([3e38, 1, -3e38], np.float32)
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, repetition_penalty=0.01)
        assert choose_token(values, 0, sampling, prompt=[0, 1, 2]) == 0
