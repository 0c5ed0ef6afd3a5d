"""The kernel that draws, against the same steps written with numpy: the same token, whatever the logits."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from numba import njit

from compute_node.engine.sampler import Sampling, choose_token
from compute_node.kernels.draw import Draw
from compute_node.kernels.exp64 import exp64
from compute_node.kernels.ordering import ID_BITS
from compute_node.kernels.philox import keyed_uniform
from tierd.errors import UsageError


def exponential(x):
    halves = np.rint(x * 1.4426950408889634)
    rest = (x - halves * 0.6931471803691238) - halves * 1.9082149292705877e-10
    result = np.ones_like(rest)
    for term in range(13, 0, -1):
        result = 1.0 + result * rest / term
    return np.ldexp(result, halves.astype(np.int32))


def uniform(seed, position):
    return np.random.Generator(np.random.Philox(key=np.array([seed, position], np.uint64))).random()


def reference(logits, *, temperature, top_k, top_p, min_p, seed, position):
    best = np.float64(logits.max())
    with np.errstate(over="ignore"):
        scaled = (logits.astype(np.float64) - best) / temperature
    candidates = np.flatnonzero(scaled > -50)
    candidates = candidates[np.argsort(-scaled[candidates], kind="stable")]
    if top_k:
        candidates = candidates[:top_k]
    weights = exponential(scaled[candidates])
    sums = np.cumsum(weights)
    if top_p < 1:
        keep = int(np.searchsorted(sums, top_p * sums[-1], side="left")) + 1
        weights, sums = weights[:keep], sums[:keep]
    if min_p > 0:
        sums = sums[: int(np.count_nonzero(weights >= min_p))]
    place = int(np.searchsorted(sums, uniform(seed, position) * sums[-1], side="right"))
    return int(candidates[min(place, sums.size - 1)])


SHAPES = {
    "spread": lambda g, n: g.normal(size=n) * 10 ** g.uniform(-4, 3),
    "of few values": lambda g, n: g.choice(g.normal(size=5), n),
    "zeros of both signs": lambda g, n: g.choice([0.0, -0.0, 1e-45, -1e-45], n),
    "equal after a subtraction": lambda g, n: np.where(g.random(n) < 0.9, np.exp(g.uniform(-90, 0, n)), 2),
    "close": lambda g, n: 4 + 1e-6 * g.normal(size=n),
    "huge": lambda g, n: g.normal(size=n) * 1e37,
    "mostly excluded": lambda g, n: np.where(np.arange(n) == n // 2, 1, np.where(g.random(n) < 0.9, -np.inf, 0)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("width", "rows", "draws"), [(1, 1, 20), (50, 12, 40), (700, 6, 40), (5000, 2, 40)])
def test_tokens_are_those_of_the_steps_in_numpy(shape, width, rows, draws):
    g = np.random.default_rng(width)
    draw = Draw(width)
    for _ in range(rows):
        logits = SHAPES[shape](g, width).astype(np.float32)
        for position in range(draws):
            how = {
                "temperature": float(g.choice([1.0, 0.7, 1e-3, 5e-324, 100.0, g.uniform(0.01, 3)])),
                "top_k": int(g.choice([0, 0, 1, 2, 40, width // 64 + 1, width // 2, width + 1])),
                "top_p": float(g.choice([1.0, 1.0, 0.9, 1e-9, g.uniform(1e-9, 1)])),
                "min_p": float(g.choice([0.0, 0.0, 0.05, 1.0, 1e-20, g.uniform(0, 1)])),
                "seed": int(g.integers(0, 1 << 64, dtype=np.uint64)),
                "position": position,
            }
            assert draw(logits, **how) == reference(logits, **how), how


def test_a_vocabulary_of_a_real_size_is_drawn_from_as_by_numpy():
    logits = (np.random.default_rng(1).normal(size=152_064) * 3).astype(np.float32)
    draw, how = Draw(logits.size), {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
    for position, change in enumerate(({}, {"top_k": 4000}, {"top_k": 40}, {"top_p": 0.99}, {"min_p": 0.01})):
        assert draw(logits, **how | change, position=position) == reference(logits, **how | change, position=position)


def test_the_number_of_a_key_is_that_of_numpys_generator():
    @njit
    def call(seed, position):
        return keyed_uniform(seed, position)

    for seed, position in ((0, 0), (1, 2), ((1 << 63) - 1, 1 << 40), ((1 << 64) - 1, 7), (1 << 63, 0)):
        assert call(np.int64(seed - (1 << 64) if seed >> 63 else seed), position) == uniform(seed, position)


def test_exp_is_accurate_and_rounds_every_step_by_itself():
    @njit
    def call(x, y):
        for i in range(len(x)):
            y[i] = exp64(x[i])

    g = np.random.default_rng(0)
    x = np.concatenate([-np.linspace(0, 700, 5001), -np.logspace(-40, 0, 500), -g.uniform(0, 40, 50_000)])
    y = np.zeros_like(x)
    call(x, y)
    assert (y == exponential(x)).all()
    exact = np.array([math.exp(value) for value in x[:5501]])
    assert np.abs(y[:5501] / exact - 1).max() < 2e-15


def test_threads_that_draw_at_once_get_the_tokens_that_one_gets():
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=3)
    logits = np.random.default_rng(2).normal(size=(2, 30_000)).astype(np.float32)
    alone = [[choose_token(row, position, sampling) for position in range(20)] for row in logits]
    found = [[], []]

    def run(place):
        for position in range(20):
            found[place].append(choose_token(logits[place], position, sampling))

    threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_what_cannot_be_drawn_from_is_refused():
    for width in (0, (1 << ID_BITS) + 1):
        with pytest.raises(UsageError, match="no token can be drawn"):
            Draw(width)
    how = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
    for wrong in (np.zeros(4, np.float64), np.zeros(8, np.float32)[::2], np.zeros((1, 4), np.float32)):
        with pytest.raises(UsageError, match="draw: "):
            Draw(4)(wrong, **how)
