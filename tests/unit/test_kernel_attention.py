from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_node.kernels import Batch, attention, kv_append
from compute_node.kernels.op import address_of
from compute_node.kernels.pages import PAGE
from tierd.errors import UsageError

EPS = 2.0**-24


class Layer:
    """One layer's cache, in pages without order, and the inputs of a whole sequence."""

    def __init__(self, length, heads, kv_heads, head_dim, *, pages=None, limit=None, window=None, sinks=None, seed=0):
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.head_dim, self.window, self.sinks = heads, kv_heads, head_dim, window, sinks
        needed = -(-length // PAGE)
        self.table = np.random.default_rng(9).permutation(pages or needed + 2)[:needed]
        self.limit = needed * PAGE if limit is None else limit
        self.q = rng.standard_normal((length, heads * head_dim)).astype(np.float32) * 2
        self.k = rng.standard_normal((length, kv_heads * head_dim)).astype(np.float32)
        self.v = rng.standard_normal((length, kv_heads * head_dim)).astype(np.float32)
        shape = (kv_heads, (pages or needed + 2) * PAGE, head_dim)
        self.k_cache, self.v_cache = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        self.scale = head_dim**-0.5

    def run(self, begin, end, *, split=False):
        """Appends and attends rows begin..end in one call."""
        rows, batch = end - begin, Batch(end - begin)
        batch.set([0] * rows, range(begin, end), tables=address_of(self.table), limits=self.limit)
        q, k, v = (a[begin:end] for a in (self.q, self.k, self.v))
        y = np.full_like(q, np.nan)
        kv_append("append", k, v, self.k_cache, self.v_cache, batch)()
        op = attention(
            "attend", q, self.k_cache, self.v_cache, y, batch, scale=self.scale, window=self.window, sinks=self.sinks
        )
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
        if self.sinks is not None:
            scores = np.concatenate([scores, np.broadcast_to(self.sinks[:, None, None], (*scores.shape[:2], 1))], 2)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", p[:, :, :length], v).reshape(length, -1)


@given(
    length=st.integers(1, 150),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 128])),
    window=st.one_of(st.none(), st.integers(1, 160)),
)
@settings(max_examples=40, deadline=None)
def test_attention_matches_float64(length, kv_heads, group, head_dim, window):
    layer = Layer(length, kv_heads * group, kv_heads, head_dim, window=window, seed=length)
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
    layer = Layer(length, 4, 2, head_dim, window=window)
    whole = layer.run(0, length)
    layer.k_cache[:], layer.v_cache[:] = np.nan, np.nan
    edges = [0, *borders, length]
    chunks = [layer.run(a, b, split=True) for a, b in pairwise(edges)]
    assert np.concatenate(chunks).tobytes() == whole.tobytes()
    layer.k_cache[:], layer.v_cache[:] = np.nan, np.nan
    decode = [layer.run(i, i + 1) for i in range(length)]
    assert np.concatenate(decode).tobytes() == whole.tobytes()


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("size", [0.1, 30.0])
def test_sinks_take_their_share_of_the_softmax_in_every_chunk(window, size):
    sinks = (np.random.default_rng(5).standard_normal(4) * size).astype(np.float32)
    layer = Layer(140, 4, 2, 24, window=window, sinks=sinks)
    whole = layer.run(0, 140)
    assert np.abs(whole - layer.exact()).max() <= 64 * EPS * 20
    chunks = [layer.run(a, b, split=True) for a, b in pairwise([0, 1, 6, 66, 139, 140])]
    assert np.concatenate(chunks).tobytes() == whole.tobytes()


def test_rows_of_several_sequences_share_a_batch_without_mixing():
    first, second = Layer(90, 2, 1, 16, pages=4, seed=1), Layer(70, 2, 1, 16, pages=4, seed=2)
    first.table, second.table = np.array([3, 0]), np.array([1, 2])
    alone = first.run(0, 90)[-1], second.run(0, 70)[-1]
    for slots in (slice(0, PAGE), slice(3 * PAGE, 4 * PAGE)):
        second.k_cache[:, slots], second.v_cache[:, slots] = first.k_cache[:, slots], first.v_cache[:, slots]
    batch = Batch(2)
    tables = [address_of(first.table), address_of(second.table)]
    batch.set([0, 0], [89, 69], tables=tables, limits=2 * PAGE)
    q = np.stack([first.q[-1], second.q[-1]])
    y = np.zeros_like(q)
    attention("a", q, second.k_cache, second.v_cache, y, batch, scale=first.scale)()
    assert y.tobytes() == np.stack(alone).tobytes()


def test_the_place_in_the_cache_does_not_change_bits():
    layers = [Layer(130, 2, 2, 32, pages=pages) for pages in (3, 40)]
    assert layers[0].table.tolist() != layers[1].table.tolist()
    assert layers[0].run(0, 130).tobytes() == layers[1].run(0, 130).tobytes()


def test_positions_beyond_the_cache_are_neither_written_nor_read():
    layer = Layer(4, 1, 1, 8, limit=3)
    y = layer.run(0, 4)
    assert np.isfinite(y[:3]).all()
    assert np.isnan(y[3]).all()
    written = np.flatnonzero(~np.isnan(layer.k_cache[0, :, 0]))
    assert written.tolist() == [layer.table[0] * PAGE + position for position in range(3)]
    assert layer.k_cache[0, written].tobytes() == layer.k[:3].tobytes()


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
    layer = Layer(12, 2, 1, 40, pages=3)
    layer.k_cache[:], layer.v_cache[:] = np.random.default_rng(3).standard_normal((2, 1, 3 * PAGE, 40))
    positions, pages = [3, 4, 5, 11, 2, 3, 80, 5, 6, 7, 8, 0], np.array([0, 2])
    tables = [address_of(pages)] * 5 + [address_of(pages[1:])] * 7

    def run(rows):
        batch = Batch(len(rows))
        own = [tables[row] for row in rows]
        batch.set([0] * len(rows), [positions[row] for row in rows], tables=own, limits=PAGE)
        q, y = layer.q[list(rows)], np.zeros((len(rows), 80), np.float32)
        attention("attend", q, layer.k_cache, layer.v_cache, y, batch, scale=0.3)()
        return y

    together = run(range(12))
    assert np.isnan(together[6]).all()
    assert np.isfinite(np.delete(together, 6, axis=0)).all()
    for row in range(12):
        assert together[row].tobytes() == run([row])[0].tobytes()
