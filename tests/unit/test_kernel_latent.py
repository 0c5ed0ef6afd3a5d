"""Latent attention, the indexer and the ops around them against float64, and bits whatever the company of a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_node.kernels import Batch, bf16_bits
from compute_node.kernels.indexer import choose_positions, index_scores
from compute_node.kernels.latent_attention import latent_attention, plane_append
from compute_node.kernels.layer_norm import layer_norm
from compute_node.kernels.pages import PAGE
from compute_node.kernels.per_head import copy_heads, head_matmul, scale_heads
from tierd.errors import UsageError

PAGES = 6


def values(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def at_positions(positions, table, limit=PAGES * PAGE):
    """Rows of one sequence whose pages lie in the order of `table`, which the caller keeps."""
    batch = Batch(len(positions))
    batch.set(np.zeros(len(positions), np.int64), positions, tables=int(table.ctypes.data), limits=limit)
    return batch


@pytest.fixture
def table():
    return np.array([4, 0, 5, 2, 1, 3], np.int64)


def filled(rows, table):
    """A plane that holds `rows` [positions, width] in the pages of a table."""
    plane = np.zeros((1, PAGES * PAGE, rows.shape[1]), np.float32)
    batch = at_positions(np.arange(len(rows)), table)
    plane_append("append", rows, plane, batch)()
    for position in (0, len(rows) - 1):
        slot = table[position // PAGE] * PAGE + position % PAGE
        assert np.array_equal(plane[0, slot], rows[position])
    return plane


def reference(q, rows, rank, scale):
    scores = rows.astype(np.float64) @ q.astype(np.float64) * scale
    weights = np.exp(scores - scores.max())
    return weights @ rows[:, :rank] / weights.sum()


@pytest.mark.parametrize(("heads", "width", "rank"), [(1, 8, 8), (4, 40, 32), (7, 24, 17), (6, 576, 512)])
def test_latent_attention_matches_float64_at_every_position(heads, width, rank, table):
    rows, positions = values(1, 300, width), np.array([0, 1, 63, 64, 130, 299])
    q, plane = values(2, len(positions), heads * width), filled(rows, table)
    y = np.zeros((len(positions), heads * rank), np.float32)
    latent_attention("a", q, plane, y, at_positions(positions, table), rank=rank, scale=width**-0.5)()
    for row, position in enumerate(positions):
        for head in range(heads):
            exact = reference(q[row, head * width : (head + 1) * width], rows[: position + 1], rank, width**-0.5)
            np.testing.assert_allclose(y[row, head * rank : (head + 1) * rank], exact, atol=2e-6 * width**0.5)


@pytest.mark.parametrize("heads", [3, 4, 9])
def test_company_slices_and_a_list_of_all_positions_change_no_bit_of_latent_attention(heads, table):
    width, rank, positions = 20, 16, np.array([5, 63, 64, 200, 201])
    rows, q = values(3, 202, width), values(4, len(positions), heads * width)
    plane = filled(rows, table)
    whole, apart, listed = (np.zeros((len(positions), heads * rank), np.float32) for _ in range(3))
    op = latent_attention("a", q, plane, whole, at_positions(positions, table), rank=rank, scale=0.3)
    op()
    for row, position in enumerate(positions):
        one = at_positions([position], table)
        alone = latent_attention("a", q[row : row + 1], plane, apart[row : row + 1], one, rank=rank, scale=0.3)
        for unit in range(alone.live_units()):
            alone(unit, unit + 1)
    assert np.array_equal(apart, whole)
    chosen = np.zeros((len(positions), 1 + 202), np.int32)
    chosen[:, 0], chosen[:, 1:] = positions + 1, np.arange(202)
    latent_attention("a", q, plane, listed, at_positions(positions, table), rank=rank, scale=0.3, chosen=chosen)()
    assert np.array_equal(listed, whole)


def test_chosen_positions_alone_are_read(table):
    rank, rows = 9, values(5, 180, 12)
    plane, q, y = filled(rows, table), values(6, 1, 12), np.zeros((1, 9), np.float32)
    picked = np.array([3, 4, 64, 100, 178, 179])
    chosen = np.zeros((1, 101), np.int32)
    chosen[0, : len(picked) + 1] = [len(picked), *picked]
    latent_attention("a", q, plane, y, at_positions([179], table), rank=rank, scale=0.5, chosen=chosen)()
    np.testing.assert_allclose(y[0], reference(q[0], rows[picked], rank, 0.5), atol=1e-5)


def test_rows_beyond_their_pages_become_nan_and_are_not_kept(table):
    plane, q, y = filled(values(7, 10, 8), table), values(8, 2, 16), np.zeros((2, 12), np.float32)
    before = plane.copy()
    batch = at_positions([3, 64], table, limit=64)
    latent_attention("a", q, plane, y, batch, rank=6, scale=1.0)()
    assert np.isfinite(y[0]).all()
    assert np.isnan(y[1]).all()
    plane_append("append", q[:, :8].copy(), plane, batch)()
    assert np.array_equal(np.flatnonzero((plane != before).any(-1)[0]), [4 * PAGE + 3])


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8"])
@given(
    heads=st.integers(1, 5),
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 40),
    rows=st.integers(1, 6),
    room=st.integers(0, 3),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=15, deadline=None)
def test_a_matrix_for_each_head_matches_float64_whatever_the_company(kind, heads, outputs, inputs, rows, room, seed):
    weights = values(seed, heads, outputs, inputs)
    data, scales = weights, None
    if kind == "bf16":
        data = bf16_bits(weights)
        weights = (data.astype(np.uint32) << 16).view(np.float32)
    elif kind == "int8":
        data = np.clip(np.rint(weights * 40), -127, 127).astype(np.int8)
        scales = np.abs(values(seed + 2, heads, outputs)) / 40
        weights = data * scales[:, :, None]
    x = values(seed + 1, rows, heads * (inputs + room))
    y, apart = (np.full((rows, heads * (outputs + room)), 7, np.float32) for _ in range(2))
    batch = Batch(rows)
    batch.set_rows(rows)
    head_matmul("h", data, x, y, batch, scales=scales)()
    exact = np.einsum("hoi,rhi->rho", weights.astype(np.float64), x.reshape(rows, heads, -1)[:, :, :inputs])
    found = y.reshape(rows, heads, outputs + room)
    np.testing.assert_allclose(found[:, :, :outputs], exact, atol=1e-4)
    assert (found[:, :, outputs:] == 7).all()
    one = Batch(1)
    one.set_rows(1)
    for row in range(rows):
        op = head_matmul("h", data, x[row : row + 1], apart[row : row + 1], one, scales=scales)
        for unit in range(op.live_units()):
            op(unit, unit + 1)
    assert np.array_equal(apart, y)


def test_parts_of_heads_are_copied_and_the_rest_is_left():
    x, y = values(9, 3, 2 * 5), np.full((3, 2 * 7), -1, np.float32)
    batch = Batch(3)
    batch.set_rows(3)
    copy_heads("c", x, y, batch, heads=2, source=3, target=4, width=2)()
    expected = np.full((3, 2, 7), -1, np.float32)
    expected[:, :, 4:6] = x.reshape(3, 2, 5)[:, :, 3:]
    assert np.array_equal(y.reshape(3, 2, 7), expected)
    with pytest.raises(UsageError, match="4 \\+ 2"):
        copy_heads("c", x, y, batch, heads=2, source=4, target=0, width=2)


def test_the_front_of_each_head_is_scaled_in_place():
    x, factors = values(17, 3, 2 * 5), values(18, 2, 3)
    expected = x.reshape(3, 2, 5).copy()
    expected[:, :, :3] *= factors
    batch = Batch(3)
    batch.set_rows(3)
    scale_heads("s", x, factors, batch)()
    assert np.array_equal(x.reshape(3, 2, 5), expected)


def test_layer_norm_matches_float64_in_place():
    x, weight, bias = values(10, 3, 37), values(11, 37), values(12, 37)
    wide = x.astype(np.float64)
    exact = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6) * weight + bias
    batch = Batch(3)
    batch.set_rows(3)
    layer_norm("n", x, weight, bias, 1e-6, x, batch)()
    np.testing.assert_allclose(x, exact, atol=1e-5)


def index(positions, table, most, keys, q, weights):
    plane, context = filled(keys, table), len(keys)
    scores, chosen = np.zeros((len(positions), context), np.float32), np.zeros((len(positions), 1 + most), np.int32)
    batch = at_positions(positions, table)
    index_scores("s", q, weights, plane, scores, batch, most=most, scale=0.25, weight_scale=0.5)()
    choose_positions("c", scores, chosen, batch)()
    return scores, chosen


@pytest.mark.parametrize(("heads", "most"), [(1, 3), (4, 8), (7, 64), (16, 70)])
def test_index_scores_and_the_choice_match_float64(heads, most, table):
    positions, width = np.array([0, 2, most - 1, most, 64, 199]), 12
    keys, q, weights = values(13, 200, width), values(14, 6, heads * width), values(15, 6, heads)
    scores, chosen = index(positions, table, most, keys, q, weights)
    for row, position in enumerate(positions):
        count = min(most, position + 1)
        assert chosen[row, 0] == count
        picked = chosen[row, 1 : 1 + count]
        assert (np.diff(picked) > 0).all()
        if position < most:
            assert np.array_equal(picked, np.arange(position + 1))
            continue
        products = np.maximum(q[row].reshape(heads, width).astype(np.float64) @ keys[: position + 1].T * 0.25, 0)
        exact = (weights[row].astype(np.float64) * 0.5) @ products
        np.testing.assert_allclose(scores[row, : position + 1], exact, atol=1e-5)
        order = np.lexsort((np.arange(position + 1), -scores[row, : position + 1]))
        assert np.array_equal(picked, np.sort(order[:most]))
        alone, choice = index([position], table, most, keys, q[row : row + 1], weights[row : row + 1])
        assert np.array_equal(alone[0, : position + 1], scores[row, : position + 1])
        assert np.array_equal(choice[0], chosen[row])


@given(
    scores=st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -3e38, 1e-40, np.inf, -np.inf]), min_size=2, max_size=90
    ),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_equal_scores_go_to_the_lower_position(scores, data):
    most = data.draw(st.integers(1, len(scores)))
    table = np.arange(PAGES, dtype=np.int64)
    batch, chosen = at_positions([len(scores) - 1], table), np.zeros((1, 1 + most), np.int32)
    choose_positions("c", np.array([scores], np.float32), chosen, batch)()
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    assert chosen[0].tolist() == [most, *sorted(order[:most])]


def test_scores_that_are_no_numbers_still_choose_distinct_positions():
    scores = np.full((1, 100), np.nan, np.float32)
    scores[0, ::3] = -np.abs(values(16, 34))
    chosen = np.zeros((1, 41), np.int32)
    choose_positions("c", scores, chosen, at_positions([99], np.arange(PAGES, dtype=np.int64)))()
    assert chosen[0, 0] == 40
    assert len(set(chosen[0, 1:].tolist())) == 40


def test_buffers_that_do_not_fit_are_refused(table):
    plane, batch = np.zeros((1, PAGE, 8), np.float32), at_positions([0], table)
    for q, y, rank in ((12, 8, 8), (8, 9, 9), (8, 5, 6)):
        with pytest.raises(UsageError):
            latent_attention(
                "a", np.zeros((1, q), np.float32), plane, np.zeros((1, y), np.float32), batch, rank=rank, scale=1.0
            )
    with pytest.raises(UsageError, match="plane"):
        plane_append("p", np.zeros((1, 8), np.float32), np.zeros((2, PAGE, 8), np.float32), batch)
    with pytest.raises(UsageError, match="at least one position"):
        choose_positions("c", np.zeros((1, 8), np.float32), np.zeros((1, 1), np.int32), batch)
