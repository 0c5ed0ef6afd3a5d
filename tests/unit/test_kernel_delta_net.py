"""The gated delta rule, its convolution and its gates: against float64, cut anywhere, with states that stay apart."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from compute_node.kernels import Batch
from compute_node.kernels.causal_conv import causal_conv
from compute_node.kernels.delta_net import delta_gates, delta_rule, l2_norm, softplus
from compute_node.kernels.gates import sigmoid_mul
from tierd.errors import UsageError

EPS = 2.0**-24


def values(seed, *shape, size=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(np.float32)


def rows_of(positions, states_in=0, states_out=1):
    """A batch whose rows read and write these copies."""
    batch = Batch(len(positions))
    batch.set_rows(len(positions))
    batch.positions[:] = positions
    batch.states_in[:] = states_in
    batch.states_out[:] = states_out
    return batch


class DeltaLayer:
    """Inputs of a whole sequence, and its states in two copies."""

    def __init__(self, length, key_heads, group, key, width, seed=0):
        self.heads = key_heads * group
        self.q, self.k = values(seed, length, key_heads * key), values(seed + 1, length, key_heads * key)
        for x in (self.q, self.k):
            l2_norm("l2", x, x, rows_of(range(length)), width=key)()
        self.v = values(seed + 2, length, self.heads * width)
        rng = np.random.default_rng(seed + 3)
        self.decay = rng.uniform(0.5, 1, (length, self.heads)).astype(np.float32)
        self.beta = rng.uniform(0, 1, (length, self.heads)).astype(np.float32)
        self.state = np.full((2, self.heads, key, width), np.nan, np.float32)
        self.copy, self.group = 0, group

    def run(self, begin, end, *, split=False):
        """Rows begin..end in one step; the copies change their roles after it."""
        batch = rows_of(range(begin, end), self.copy, 1 - self.copy)
        inputs = (a[begin:end] for a in (self.q, self.k, self.v, self.decay, self.beta))
        y = np.full_like(self.v[begin:end], np.nan)
        op = delta_rule("delta", *inputs, self.state, y, batch)
        if split:
            for unit in reversed(range(op.live_units())):
                op(unit, unit + 1)
        else:
            op()
        self.copy = 1 - self.copy
        return y

    def exact(self):
        _, heads, key, width = self.state.shape
        length = len(self.q)
        q, k = (np.repeat(x.reshape(length, -1, key), self.group, axis=1).astype(np.float64) for x in (self.q, self.k))
        v, s = self.v.reshape(length, heads, width).astype(np.float64), np.zeros((heads, key, width))
        out = []
        for t in range(length):
            s *= self.decay[t][:, None, None]
            change = (v[t] - np.einsum("hkv,hk->hv", s, k[t])) * self.beta[t][:, None]
            s += k[t][:, :, None] * change[:, None, :]
            out.append(np.einsum("hkv,hk->hv", s, q[t]).reshape(-1))
        return np.array(out)


@given(
    length=st.integers(1, 40),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    key=st.integers(1, 70),
    width=st.integers(1, 140),
)
@settings(max_examples=25, deadline=None)
def test_the_delta_rule_matches_float64(length, key_heads, group, key, width):
    layer = DeltaLayer(length, key_heads, group, key, width, seed=length)
    exact = layer.exact()
    assert np.abs(layer.run(0, length) - exact).max() <= 64 * EPS * max(1.0, np.abs(layer.v).max()) * 4


@given(borders=st.lists(st.integers(1, 39), max_size=5, unique=True).map(sorted), width=st.sampled_from([16, 100]))
@settings(max_examples=20, deadline=None)
def test_prefill_in_any_chunks_and_decode_give_the_same_bits(borders, width):
    whole = DeltaLayer(40, 2, 2, 24, width).run(0, 40)
    layer = DeltaLayer(40, 2, 2, 24, width)
    chunks = [layer.run(a, b, split=True) for a, b in pairwise([0, *borders, 40])]
    assert np.concatenate(chunks).tobytes() == whole.tobytes()
    layer = DeltaLayer(40, 2, 2, 24, width)
    assert np.concatenate([layer.run(i, i + 1) for i in range(40)]).tobytes() == whole.tobytes()


def test_a_step_that_is_repeated_starts_from_the_same_state():
    layer = DeltaLayer(12, 1, 2, 16, 16)
    layer.run(0, 8)
    before = layer.state[layer.copy].copy()
    first = layer.run(8, 12)
    layer.copy = 1 - layer.copy  # the step failed: the engine did not change the roles
    assert layer.state[layer.copy].tobytes() == before.tobytes()
    assert layer.run(8, 12).tobytes() == first.tobytes()


def mixed_rows():
    """Two sequences of five and three rows, the second in the middle of its text, then a row without a state."""
    return rows_of([0, 1, 2, 3, 4, 7, 8, 9, 5], [0] * 5 + [2] * 3 + [9], [1] * 5 + [3] * 3 + [4])


def test_sequences_of_one_step_have_their_own_states():
    layer = DeltaLayer(9, 2, 2, 16, 24)
    state = values(7, 4, 4, 16, 24)
    y = np.zeros_like(layer.v)
    arrays = (layer.q, layer.k, layer.v, layer.decay, layer.beta)
    together = state.copy()
    delta_rule("delta", *arrays, together, y, mixed_rows())()
    assert np.isnan(y[8]).all()
    for begin, end, copy in ((0, 5, 0), (5, 8, 2)):
        alone, part = state.copy(), np.zeros_like(layer.v[begin:end])
        batch = rows_of(mixed_rows().positions[begin:end], copy, copy + 1)
        delta_rule("delta", *(a[begin:end] for a in arrays), alone, part, batch)()
        assert part.tobytes() == y[begin:end].tobytes()
        assert alone[copy + 1].tobytes() == together[copy + 1].tobytes()
        assert together[copy].tobytes() == state[copy].tobytes()


def exact_conv(x, weight):
    """Of a whole sequence, from its beginning."""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x.astype(np.float64)])
    total = sum(weight[:, i].astype(np.float64) * padded[i : i + len(x)] for i in range(taps))
    return total / (1 + np.exp(-total))


@given(
    length=st.integers(1, 14),
    channels=st.integers(1, 150),
    taps=st.integers(2, 5),
    borders=st.lists(st.integers(1, 13), max_size=8, unique=True).map(sorted),
)
@settings(max_examples=40, deadline=None)
def test_a_convolution_in_any_chunks_matches_float64_and_the_whole(length, channels, taps, borders):
    x, weight = values(length, length, channels), values(1, channels, taps)
    edges = [0, *(border for border in borders if border < length), length]

    def run(edges):
        state, parts = np.full((2, taps - 1, channels), np.nan, np.float32), []
        for step, (begin, end) in enumerate(pairwise(edges)):
            y = np.zeros((end - begin, channels), np.float32)
            batch = rows_of(range(begin, end), step % 2, 1 - step % 2)
            causal_conv("conv", x[begin:end], weight, state, y, batch)()
            parts.append(y)
        return np.concatenate(parts)

    whole = run([0, length])
    assert np.abs(whole - exact_conv(x, weight)).max() <= 16 * EPS * taps * 8
    assert run(edges).tobytes() == whole.tobytes()


def test_convolutions_of_one_step_have_their_own_states():
    x, weight, state = values(1, 9, 70), values(2, 70, 4), values(3, 4, 3, 70)
    y, together = np.zeros_like(x), state.copy()
    causal_conv("conv", x, weight, together, y, mixed_rows())()
    assert np.isnan(y[8]).all()
    assert together[2].tobytes() == state[2].tobytes()
    assert together[3].tobytes() == x[5:8].tobytes()
    assert together[1].tobytes() == x[2:5].tobytes()
    history = np.concatenate([state[2], x[5:8]])
    assert np.abs(y[5:8] - exact_conv(history, weight)[3:]).max() <= 256 * EPS


@njit
def softplus_of(x, out):
    for i in range(len(x)):
        out[i] = softplus(x[i])


def test_softplus_is_near_float64_everywhere():
    x = np.concatenate([np.linspace(-86, 86, 100_001), [0.0, 300.0, -300.0]]).astype(np.float32)
    out = np.empty_like(x)
    softplus_of(x, out)
    exact = np.logaddexp(0.0, x.astype(np.float64))
    assert (np.abs(out - exact) <= 2.0**-21 * exact + 1e-37).all()
    nan = np.array([np.nan], np.float32)
    softplus_of(nan, nan)
    assert np.isnan(nan[0])


def test_gates_match_float64():
    a, b, log_rate, bias = values(1, 3, 6, size=3), values(2, 3, 6, size=3), values(3, 6), values(4, 6)
    decay, beta = np.zeros((3, 6), np.float32), np.zeros((3, 6), np.float32)
    delta_gates("gates", a, b, log_rate, bias, decay, beta, rows_of([0, 1, 2]))()
    rate = np.exp(log_rate.astype(np.float64)) * np.logaddexp(0, a.astype(np.float64) + bias)
    assert np.abs(decay - np.exp(-rate)).max() <= 16 * EPS
    assert np.abs(beta - 1 / (1 + np.exp(-b.astype(np.float64)))).max() <= 4 * EPS


def test_an_l2_norm_has_unit_length_times_its_scale():
    x = values(1, 3, 40, size=5)
    y = np.zeros_like(x)
    l2_norm("l2", x, y, rows_of([0, 1, 2]), width=20, scale=0.25, eps=1e-6)()
    wide = x.astype(np.float64).reshape(3, 2, 20)
    exact = wide / np.sqrt((wide**2).sum(-1, keepdims=True) + 1e-6) * 0.25
    assert np.abs(y.reshape(exact.shape) - exact).max() <= 8 * EPS


@pytest.mark.parametrize("gates", [1, 150])
def test_a_sigmoid_gate_is_for_each_element_or_for_the_row(gates):
    x, gate = values(1, 3, 150), values(2, 3, gates, size=4)
    y = x.copy()
    sigmoid_mul("gate", y, gate, y, rows_of([0, 1, 2]))()
    exact = x / (1 + np.exp(-gate.astype(np.float64)))
    assert (np.abs(y - exact) <= 8 * EPS * np.abs(exact)).all()


def test_states_and_rows_that_do_not_fit_are_refused():
    layer, batch = DeltaLayer(1, 2, 2, 8, 8), rows_of([0])
    arrays = (layer.q, layer.k, layer.v, layer.decay, layer.beta)
    with pytest.raises(UsageError, match=r"state must have shape \[2, 4, 8, 8\]"):
        delta_rule("delta", *arrays, layer.state[:1], np.zeros_like(layer.v), batch)
    with pytest.raises(UsageError, match="do not fit 3 states"):
        delta_rule("delta", *arrays, np.zeros((2, 3, 8, 8), np.float32), np.zeros_like(layer.v), batch)
    with pytest.raises(UsageError, match="v and y overlap"):
        delta_rule("delta", *arrays, layer.state, layer.v, batch)
    x = np.zeros((1, 6), np.float32)
    with pytest.raises(UsageError, match="looks back"):
        causal_conv("conv", x, np.zeros((6, 1), np.float32), np.zeros((2, 1, 6), np.float32), x.copy(), batch)
    with pytest.raises(UsageError, match="x and y overlap"):
        causal_conv("conv", x, np.zeros((6, 3), np.float32), np.zeros((2, 2, 6), np.float32), x, batch)
    with pytest.raises(UsageError, match="do not divide"):
        l2_norm("l2", x, x, batch, width=4)
