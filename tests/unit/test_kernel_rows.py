from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from compute_node.kernels import (
    Batch,
    RoutingRule,
    add,
    clip,
    combine,
    dequantise,
    embed,
    from_float32,
    gather_rows,
    likeliest,
    rms_norm,
    rope,
    rope_tables,
    router,
    silu_mul,
)
from compute_node.kernels.lanes import exp32
from tierd.errors import LimitExceeded, UsageError

EPS = 2.0**-24


def live(rows, max_rows=None, **fields):
    batch = Batch(max_rows or rows)
    batch.set_rows(rows)
    for name, value in fields.items():
        getattr(batch, name)[:rows] = value
    return batch


def values(seed, *shape, size=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(np.float32)


@njit
def exp_of(x, out):
    for i in range(len(x)):
        out[i] = exp32(x[i])


def test_exp_is_within_its_bound_and_defined_everywhere():
    x = np.concatenate([np.linspace(-87, 88, 400_001), [0.0, -0.0, 1e-40, np.log(2) / 2]]).astype(np.float32)
    out = np.empty_like(x)
    exp_of(x, out)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) <= 2.0**-23 * exact).all()
    assert out[-4] == 1
    edges = np.array([-np.inf, -1e30, -87.5, 89, np.inf, np.nan], np.float32)
    out = np.empty_like(edges)
    exp_of(edges, out)
    assert out[:3].tolist() == [0, 0, 0]
    assert out[3] == out[4] == pytest.approx(np.exp(88), rel=1e-6)
    assert np.isnan(out[5])


@given(rows=st.integers(1, 5), width=st.integers(1, 200), seed=st.integers(0, 1 << 30), size=st.floats(1e-3, 1e3))
@settings(max_examples=30, deadline=None)
def test_element_ops_match_float64(rows, width, seed, size):
    a, b = values(seed, rows, width, size=size), values(seed + 1, rows, width)
    y = np.empty_like(a)
    silu_mul("s", a, b, y, live(rows))()
    wide = a.astype(np.float64)
    with np.errstate(over="ignore"):
        exact = wide / (1 + np.exp(-wide)) * b
    assert (np.abs(y - exact) <= 6 * EPS * np.abs(exact) + 1e-34).all()
    total = a.copy()
    add("a", total, b, live(rows))()
    assert total.tobytes() == (a + b).tobytes()
    limited = a.copy()
    clip("c", limited, 0.5, live(rows))()
    assert limited.tobytes() == np.clip(a, -0.5, 0.5).tobytes()


def test_element_ops_on_part_of_the_rows_and_units():
    x, y = np.zeros((4, 150), np.float32), np.ones((4, 150), np.float32)
    op = add("a", x, y, live(3, 4))
    assert op.live_units() == 9
    op(1, 5)
    assert not x[0, :64].any()
    assert x[0, 64:].all()
    assert x[1, :128].all()
    assert not x[1, 128:].any()
    assert not x[2:].any()


def test_clip_keeps_nan():
    x = np.array([[np.nan, 5, -5, 0.25]], np.float32)
    clip("c", x, 2.0, live(1))()
    assert np.isnan(x[0, 0])
    assert x[0, 1:].tolist() == [2, -2, 0.25]
    with pytest.raises(UsageError, match="positive"):
        clip("c", x, 0.0, live(1))


@given(rows=st.integers(1, 4), k=st.integers(1, 8), width=st.integers(1, 150), seed=st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_expert_rows_are_added_in_router_order(rows, k, width, seed):
    residual, experts = values(seed, rows, width), values(seed + 1, rows, k, width)
    weights, y = values(seed + 2, rows, k), np.empty((rows, width), np.float32)
    combine("c", residual, experts, weights, y, live(rows))()
    exact = np.einsum("rk,rkd->rd", weights.astype(np.float64), experts) + residual
    scale = np.einsum("rk,rkd->rd", np.abs(weights).astype(np.float64), np.abs(experts)) + np.abs(residual)
    assert (np.abs(y - exact) <= (k + 2) * EPS * scale).all()
    in_place = residual.copy()
    combine("c", in_place, experts, weights, in_place, live(rows))()
    assert in_place.tobytes() == y.tobytes()


def test_combining_follows_places_not_arrival():
    big, small = np.float32(2.0**24), np.float32(1)
    rows = np.array([[[big], [small], [small]]], np.float32)
    weights, zero, y = np.ones((1, 3), np.float32), np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)
    combine("c", zero, rows, weights, y, live(1))()
    assert y[0, 0] == 2.0**24  # each small one is lost; small + small first would be kept
    combine("c", zero, np.ascontiguousarray(rows[:, ::-1]), weights, y, live(1))()
    assert y[0, 0] == 2.0**24 + 2


@given(rows=st.integers(1, 4), groups=st.integers(1, 5), width=st.integers(1, 140), seed=st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_rms_norm_of_rows_and_of_heads_matches_float64(rows, groups, width, seed):
    x, weight = values(seed, rows, groups * width, size=3), values(seed + 1, width)
    y = np.empty_like(x)
    op = rms_norm("n", x, weight, 1e-6, y, live(rows))
    assert op.live_units() == rows * groups
    op()
    heads = x.astype(np.float64).reshape(rows, groups, width)
    exact = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * weight
    assert (np.abs(y.reshape(exact.shape) - exact) <= (width / 32 + 12) * EPS * np.abs(exact) + 1e-37).all()
    alone = np.empty_like(x[-1:])
    rms_norm("n", x[-1:], weight, 1e-6, alone, live(1))()
    assert alone.tobytes() == y[-1:].tobytes()


def test_rms_norm_refuses_a_weight_that_divides_nothing():
    x = np.zeros((1, 10), np.float32)
    with pytest.raises(UsageError, match="does not divide rows of 10"):
        rms_norm("n", x, np.ones(3, np.float32), 1e-6, x, live(1))


@given(
    rows=st.integers(1, 4), heads=st.integers(1, 3), half=st.integers(1, 40), rest=st.integers(0, 8), seed=st.integers()
)
@settings(max_examples=30, deadline=None)
def test_rope_rotates_pairs_by_position(rows, heads, half, rest, seed):
    rng = np.random.default_rng(abs(seed))
    head_dim = 2 * half + rest
    x = rng.standard_normal((rows, heads * head_dim)).astype(np.float32)
    positions = rng.integers(0, 50, rows)
    cos, sin = rope_tables(50, 2 * half, 10_000.0)
    y = x.copy()
    rope("r", y, cos, sin, live(rows, positions=positions), head_dim=head_dim)()
    frequency = 10_000.0 ** (-np.arange(half) / half)
    angle = positions[:, None, None] * frequency
    wide = x.astype(np.float64).reshape(rows, heads, head_dim)
    a, b = wide[..., :half], wide[..., half : 2 * half]
    exact = np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), wide[..., 2 * half :]], -1
    )
    assert np.abs(y.reshape(exact.shape) - exact).max() <= 8 * EPS * np.abs(x).max()


@pytest.mark.parametrize(("start", "half", "rest"), [(0, 4, 0), (16, 4, 0), (3, 5, 2)])
def test_neighbours_as_pairs_turn_like_halves_apart_and_leave_what_is_before_and_behind(start, half, rest):
    heads, head_dim, positions = 3, start + 2 * half + rest, [0, 7]
    x = values(5, 2, heads * head_dim)
    cos, sin = rope_tables(8, 2 * half, 10_000.0)
    y = x.copy()
    options = {"head_dim": head_dim, "start": start, "interleaved": True}
    rope("r", y, cos, sin, live(2, positions=positions), **options)()
    before, after = (a.reshape(2, heads, head_dim) for a in (x, y))
    turned = slice(start, start + 2 * half)
    apart = np.concatenate([before[..., turned][..., 0::2], before[..., turned][..., 1::2]], -1).reshape(2, -1).copy()
    rope("r", apart, cos, sin, live(2, positions=positions), head_dim=2 * half)()
    pairs = apart.reshape(2, heads, 2, half).swapaxes(2, 3).reshape(2, heads, 2 * half)
    assert np.array_equal(after[..., turned], pairs)
    assert np.array_equal(np.delete(after, np.r_[turned], -1), np.delete(before, np.r_[turned], -1))


def test_a_position_beyond_the_rotary_tables_gives_nan_not_other_memory():
    cos, sin = rope_tables(4, 8, 10_000.0)
    x = np.ones((2, 8), np.float32)
    rope("r", x, cos, sin, live(2, positions=[3, 4]), head_dim=8)()
    assert np.isfinite(x[0]).all()
    assert np.isnan(x[1]).all()
    with pytest.raises(UsageError, match="heads of 6"):
        rope("r", x, cos, sin, live(2), head_dim=6)
    with pytest.raises(UsageError, match="rotary"):
        rope_tables(4, 7, 10_000.0)


@pytest.mark.parametrize("weight_format", ["f32", "bf16", "int8"])
def test_embedding_rows_are_the_table_exactly(weight_format):
    table = from_float32(values(1, 11, 37), weight_format)
    y = np.zeros((4, 37), np.float32)
    embed("e", table, y, live(3, 4, token_ids=[10, 0, 4]))()
    assert y[:3].tobytes() == dequantise(table)[[10, 0, 4]].tobytes()
    assert not y[3].any()


def test_a_token_outside_the_table_gives_nan_not_other_memory():
    y = np.zeros((2, 5), np.float32)
    embed("e", from_float32(values(1, 3, 5)), y, live(2, token_ids=[3, -1]))()
    assert np.isnan(y).all()
    for weight_format in ("int4-g64", "fp8-e4m3", "mxfp4"):
        with pytest.raises(UsageError, match=weight_format):
            embed("e", from_float32(values(1, 3, 5), weight_format), y, live(2))


@given(
    rows=st.integers(1, 4),
    experts=st.integers(1, 130),
    data=st.data(),
    renormalise=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=40, deadline=None)
def test_router_matches_float64_and_breaks_ties_by_lower_id(rows, experts, data, renormalise, seed):
    k = data.draw(st.integers(1, min(8, experts)))
    logits = np.round(values(seed, rows, experts, size=2), 1)  # rounding makes ties common
    indices, weights = np.full((rows, k), -1, np.int32), np.zeros((rows, k), np.float32)
    router("r", logits, indices, weights, live(rows), rule=RoutingRule(renormalise=renormalise))()
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, chosen)
    exact = np.take_along_axis(p, chosen, -1)
    if renormalise:
        exact /= exact.sum(-1, keepdims=True)
    assert (np.abs(weights - exact) <= (experts + 20) * EPS * exact).all()


def test_logits_that_cannot_be_compared_still_choose_valid_experts():
    logits = np.array([[1, np.nan, 3, 2], [np.inf, 1, 1, 1], [np.nan] * 4], np.float32)
    indices, weights = np.full((3, 3), 99, np.int32), np.zeros((3, 3), np.float32)
    router("r", logits, indices, weights, live(3), rule=RoutingRule(renormalise=True))()
    for row in indices:
        assert len(set(row.tolist())) == 3
        assert set(row.tolist()) <= {0, 1, 2, 3}
    with pytest.raises(UsageError, match="3 experts of 2"):
        router("r", logits[:, :2].copy(), indices, weights, live(3), rule=RoutingRule(renormalise=True))


@given(
    rows=st.integers(1, 4),
    groups=st.integers(1, 6),
    size=st.integers(2, 12),
    data=st.data(),
    renormalise=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=40, deadline=None)
def test_sigmoid_routing_by_groups_matches_float64_and_breaks_ties_downwards(
    rows, groups, size, data, renormalise, seed
):
    kept = data.draw(st.integers(1, groups))
    k, experts = data.draw(st.integers(1, min(8, kept * size))), groups * size
    logits = np.round(values(seed, rows, experts, size=2), 1)
    correction = np.round(values(seed + 1, experts), 1)
    indices, weights = np.full((rows, k), -1, np.int32), np.zeros((rows, k), np.float32)
    rule = RoutingRule(
        score="sigmoid", renormalise=renormalise, eps=1e-20, scaling=2.5, groups=groups, kept_groups=kept
    )
    router("r", logits, indices, weights, live(rows), rule=rule, correction=correction)()
    for row in range(rows):
        # The kernel's own float32 scores, so that ties are the same; the weights are checked against float64.
        choice = np.array([found_score(x) for x in logits[row]], np.float32) + correction
        parts = choice.reshape(groups, size)
        sums = np.sort(parts, axis=1)[:, ::-1]
        best = np.lexsort((np.arange(groups), -(sums[:, 0] + sums[:, 1])))[:kept]
        open_ids = [e for e in range(experts) if e // size in best]
        chosen = sorted(open_ids, key=lambda e: (-choice[e], e))[:k]
        assert indices[row].tolist() == chosen
        exact = 1 / (1 + np.exp(-logits[row, chosen].astype(np.float64)))
        exact = exact / exact.sum() * 2.5 if renormalise else exact * 2.5
        assert (np.abs(weights[row] - exact) <= (k + 8) * EPS * exact).all()


@njit
def found_score(x):
    """The kernel's own sigmoid."""
    return np.float32(1) / (np.float32(1) + exp32(-x))


@pytest.mark.parametrize(("groups", "kept", "k"), [(5, 1, 1), (4, 0, 1), (4, 5, 1), (12, 3, 1), (4, 1, 4)])
def test_groups_that_cannot_hold_the_choice_are_refused(groups, kept, k):
    indices, weights = np.zeros((1, k), np.int32), np.zeros((1, k), np.float32)
    rule = RoutingRule(renormalise=True, groups=groups, kept_groups=kept)
    with pytest.raises(UsageError, match="groups"):
        router("r", values(1, 1, 12), indices, weights, live(1), rule=rule)


@given(seed=st.integers(0, 2**32), width=st.one_of(st.integers(1, 70), st.integers(1000, 3100)), coarse=st.booleans())
def test_the_likeliest_is_the_lowest_of_the_largest(seed, width, coarse):
    logits = values(seed, 3, width, size=1e3)
    if coarse:
        logits = np.rint(logits / 500) * np.float32(500)  # many equals, zeros of both signs among them
    ids = np.full(3, 7, np.int64)
    likeliest("l", logits, ids, live(3))()
    assert ids.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 1023, 1024, 2049])
def test_where_a_logit_is_not_finite_none_is_the_likeliest(wrong, place):
    logits, ids = values(1, 3, 2050), np.zeros(3, np.int64)
    logits[1, place] = wrong
    likeliest("l", logits, ids, live(3))()
    assert ids.tolist() == [logits[0].argmax(), -1, logits[2].argmax()]


def test_gathered_rows_are_those_of_the_index():
    x, y, index = values(1, 5, 70), np.zeros((3, 70), np.float32), np.array([4, 0, 5], np.int64)
    gather_rows("g", x, index, y, live(3))()
    assert y[:2].tobytes() == x[[4, 0]].tobytes()
    assert np.isnan(y[2]).all()


def test_a_batch_refuses_more_rows_and_negative_positions():
    batch = Batch(2)
    batch.set([1, 2], [0, 5], tables=[8, 16], limits=64, states_in=[2, 5], states_out=[3, 4])
    assert (batch.rows, batch.positions.tolist(), batch.tables.tolist()) == (2, [0, 5], [8, 16])
    assert (batch.limits.tolist(), batch.states_in.tolist(), batch.states_out.tolist()) == ([64, 64], [2, 5], [3, 4])
    with pytest.raises(LimitExceeded, match="3 rows in a batch of at most 2"):
        batch.set([1, 2, 3], [0, 1, 2])
    for wrong in ({"positions": [0]}, {"positions": [0, 1], "tables": [8]}):
        with pytest.raises(UsageError, match="as many positions"):
            batch.set([1, 2], **wrong)
    for wrong in ({"positions": [-1]}, {"positions": [1], "limits": -1}):
        with pytest.raises(LimitExceeded, match="never negative"):
            batch.set([1], **wrong)
    assert batch.rows == 0


def test_an_op_refuses_units_it_does_not_have():
    x = np.zeros((1, 10), np.float32)
    with pytest.raises(UsageError, match=r"a: no units 0\.\.2 of 1"):
        add("a", x, x.copy(), live(1))(0, 2)
