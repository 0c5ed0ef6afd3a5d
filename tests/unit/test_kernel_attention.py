from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_node.kernels import Batch, attention, kv_append
from tierd.errors import UsageError

EPS = 2.0**-24


class Layer:
    """One layer's cache and the inputs of a whole sequence."""

    def __init__(self, length, heads, kv_heads, head_dim, *, slots=None, base=0, window=None, seed=0):
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.head_dim, self.base, self.window = heads, kv_heads, head_dim, base, window
        self.q = rng.standard_normal((length, heads * head_dim)).astype(np.float32) * 2
        self.k = rng.standard_normal((length, kv_heads * head_dim)).astype(np.float32)
        self.v = rng.standard_normal((length, kv_heads * head_dim)).astype(np.float32)
        shape = (kv_heads, slots or base + length, head_dim)
        self.k_cache, self.v_cache = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        self.scale = head_dim**-0.5

    def run(self, begin, end, *, split=False):
        """Appends and attends rows begin..end in one call."""
        rows, batch = end - begin, Batch(end - begin)
        batch.set([0] * rows, range(begin, end), bases=self.base)
        q, k, v = (a[begin:end] for a in (self.q, self.k, self.v))
        y = np.full_like(q, np.nan)
        kv_append("append", k, v, self.k_cache, self.v_cache, batch)()
        op = attention("attend", q, self.k_cache, self.v_cache, y, batch, scale=self.scale, window=self.window)
        if split:
            for unit in reversed(range(op.live_units())):
                op(unit, unit + 1)
        else:
            op()
        return y

    def exact(self):
        length, group = len(self.q), self.heads // self.kv_heads
        q = self.q.astype(np.float64).reshape(length, self.heads, self.head_dim)
        k = np.repeat(self.k.astype(np.float64).reshape(length, self.kv_heads, self.head_dim), group, axis=1)
        v = np.repeat(self.v.astype(np.float64).reshape(length, self.kv_heads, self.head_dim), group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * self.scale
        distance = np.arange(length)[:, None] - np.arange(length)[None, :]
        hidden = (distance < 0) | (distance >= (self.window or length))
        scores = np.where(hidden, -np.inf, scores)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", p, v).reshape(length, -1)


@given(
    length=st.integers(1, 150),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 128])),
    base=st.integers(0, 70),
    window=st.one_of(st.none(), st.integers(1, 160)),
)
@settings(max_examples=40, deadline=None)
def test_attention_matches_float64(length, kv_heads, group, head_dim, base, window):
    layer = Layer(length, kv_heads * group, kv_heads, head_dim, base=base, window=window, seed=length)
    y = layer.run(0, length)
    # Errors of scores up to about 20 in magnitude pass through exp; values are a weighted mean of some 4 at most.
    assert np.abs(y - layer.exact()).max() <= 64 * EPS * 20


@given(
    borders=st.lists(st.integers(1, 199), max_size=6, unique=True).map(sorted),
    window=st.sampled_from([None, 1, 50, 64, 100]),
    head_dim=st.sampled_from([8, 24, 64]),
)
@settings(max_examples=20, deadline=None)
def test_prefill_in_any_chunks_and_decode_give_the_same_bits(borders, window, head_dim):
    length = 200
    layer = Layer(length, 4, 2, head_dim, base=3, window=window)
    whole = layer.run(0, length)
    layer.k_cache[:], layer.v_cache[:] = np.nan, np.nan
    edges = [0, *borders, length]
    chunks = [layer.run(a, b, split=True) for a, b in pairwise(edges)]
    assert np.concatenate(chunks).tobytes() == whole.tobytes()
    layer.k_cache[:], layer.v_cache[:] = np.nan, np.nan
    decode = [layer.run(i, i + 1) for i in range(length)]
    assert np.concatenate(decode).tobytes() == whole.tobytes()


def test_rows_of_several_sequences_share_a_batch_without_mixing():
    first, second = Layer(90, 2, 1, 16, base=0, slots=200, seed=1), Layer(70, 2, 1, 16, base=100, slots=200, seed=2)
    alone = first.run(0, 90)[-1], second.run(0, 70)[-1]
    second.k_cache[:, :90], second.v_cache[:, :90] = first.k_cache[:, :90], first.v_cache[:, :90]
    batch = Batch(2)
    batch.set([0, 0], [89, 69], bases=[0, 100])
    q = np.stack([first.q[-1], second.q[-1]])
    y = np.zeros_like(q)
    attention("a", q, second.k_cache, second.v_cache, y, batch, scale=first.scale)()
    assert y.tobytes() == np.stack(alone).tobytes()


def test_the_place_in_the_cache_does_not_change_bits():
    layers = [Layer(130, 2, 2, 32, base=base) for base in (0, 17)]
    assert layers[0].run(0, 130).tobytes() == layers[1].run(0, 130).tobytes()


def test_positions_beyond_the_cache_are_neither_written_nor_read():
    layer = Layer(4, 1, 1, 8, slots=3)
    y = layer.run(0, 4)
    assert np.isfinite(y[:3]).all()
    assert np.isnan(y[3]).all()
    assert layer.k_cache.tobytes() == layer.k[:3].tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((1, 12), np.float32)}, "do not fit 2 kv heads of 8"),
        ({"q": np.zeros((1, 24), np.float32)}, "do not fit 2 kv heads of 8"),
        ({"window": 0}, "at least one position"),
        ({"v": np.zeros((2, 5, 8), np.float32)}, "one shape"),
        ({"k": np.zeros((2, 16), np.float32)}, r"k_cache must be float32 \[any, any, any\]"),
    ],
)
def test_caches_and_queries_that_do_not_fit_are_refused(change, message):
    given_values = {"q": np.zeros((1, 16), np.float32), "k": np.zeros((2, 4, 8), np.float32)}
    given_values |= {"v": np.zeros((2, 4, 8), np.float32), "window": None} | change
    q, k, v, window = (given_values[name] for name in ("q", "k", "v", "window"))
    with pytest.raises(UsageError, match=message):
        attention("a", q, k, v, np.zeros_like(q), Batch(1), scale=1.0, window=window)


def test_rows_that_share_loads_keep_their_own_sequence_and_their_own_faults():
    """Four rows in a row may be of two sequences, or one of them may lie beyond the cache."""
    layer = Layer(12, 2, 1, 40, slots=24)
    layer.k_cache[:], layer.v_cache[:] = np.random.default_rng(3).standard_normal((2, 1, 24, 40))
    positions, bases = [3, 4, 5, 11, 2, 3, 30, 5, 6, 7, 8, 0], [0] * 5 + [12] * 7

    def run(rows):
        batch = Batch(len(rows))
        batch.set([0] * len(rows), [positions[row] for row in rows], bases=[bases[row] for row in rows])
        q, y = layer.q[list(rows)], np.zeros((len(rows), 80), np.float32)
        attention("attend", q, layer.k_cache, layer.v_cache, y, batch, scale=0.3)()
        return y

    together = run(range(12))
    assert np.isnan(together[6]).all()
    assert np.isfinite(np.delete(together, 6, axis=0)).all()
    for row in range(12):
        assert together[row].tobytes() == run([row])[0].tobytes()
