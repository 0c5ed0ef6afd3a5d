"""The fast numerics: integer products of quantised weights and quantised activations."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_node.engine.executor import Executor
from compute_node.kernels import (
    Batch,
    ExpertFFN,
    Matrix,
    QuantisedRows,
    dequantise,
    from_float32,
    matmul,
    quantise_rows,
    quantises,
)
from compute_node.kernels.integer_dots import WIDE_GROUPS
from compute_node.kernels.matmul import ROW_BYTES
from compute_node.kernels.quantised_rows import row_layout
from tierd.errors import UsageError

EPS = 2.0**-24
QUANTISED = ("int8", "int4-g64")


def values(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantised(x):
    batch = Batch(len(x))
    batch.set_rows(len(x))
    rows = QuantisedRows(len(x), x.shape[1])
    quantise_rows("q", x, rows, batch)()
    return rows


def product(matrix, x, *, bias=None, splits=()):
    batch = Batch(len(x))
    batch.set_rows(len(x))
    y = np.full((len(x), matrix.rows), np.nan, np.float32)
    op = matmul("m", matrix, x, y, batch, bias=bias, numerics="fast", quantised=quantised(x))
    for lo, hi in pairwise([0, *splits, matrix.rows]):
        op(lo, hi)
    return y


def scales_of(x):
    """The scale of each column, float32 [rows, cols]."""
    padded = np.zeros((len(x), -(-x.shape[1] // 64) * 64), np.float32)
    padded[:, : x.shape[1]] = x
    largest = np.abs(padded.reshape(len(x), -1, 64)).max(axis=2)
    return np.repeat(largest / np.float32(127), 64, axis=1)[:, : x.shape[1]]


def reach(matrix):
    """The largest products that sums pass through, over activations: codes of int4 are multiplied unsigned."""
    w = np.abs(dequantise(matrix)).astype(np.float64)
    if matrix.format != "int4-g64":
        return w
    scales = np.repeat(np.abs(matrix.scales.astype(np.float64)), 64, axis=1)[:, : matrix.cols]
    return w + 8 * scales


@given(rows=st.integers(1, 5), cols=st.integers(1, 300), seed=st.integers(0, 1 << 30), power=st.integers(-40, 40))
@settings(max_examples=25, deadline=None)
def test_a_quantised_value_is_off_by_half_a_scale_at_most(rows, cols, seed, power):
    x = values(seed, rows, cols) * np.float32(2.0**power)
    kept = quantised(x)
    found = np.stack([kept.values(row) for row in range(rows)])
    assert (np.abs(found - x) <= 0.5001 * scales_of(x)).all()


def test_rows_are_laid_out_as_documented():
    x = values(3, 2, 130)
    rows = quantised(x)
    assert rows.data.shape == (2, 4 * 64 + 4 * 64)
    floats = rows.data[:, :256].view(np.float32)
    scales, offsets, halves = floats[:, :16], floats[:, 16:32], floats[:, 32:]
    codes = rows.data[:, 256:].view(np.int8).reshape(2, 4, 64)
    sums = -8 * codes.reshape(2, 4, 2, 32).sum(axis=3, dtype=np.int32)
    assert (offsets[:, :4] == sums.sum(axis=2).astype(np.float32) * scales[:, :4]).all()
    assert (halves[:, :8].reshape(2, 4, 2) == sums.astype(np.float32) * scales[:, :4, None]).all()
    assert not codes[:, 2, 2:].any()
    assert not codes[:, 3].any()
    assert rows.data.ctypes.data % 64 == 0


@pytest.mark.parametrize("weight_format", QUANTISED)
@given(
    rows=st.integers(1, 40),
    cols=st.one_of(st.integers(1, 300), st.sampled_from([64, 128, 512, 1024, 1152, 2048])),
    count=st.integers(1, 9),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=25, deadline=None)
def test_products_are_within_the_bound_of_float64(weight_format, rows, cols, count, seed):
    matrix, x = from_float32(values(seed, rows, cols), weight_format), values(seed + 1, count, cols)
    w = np.abs(dequantise(matrix)).astype(np.float64)
    exact = x.astype(np.float64) @ dequantise(matrix).astype(np.float64).T
    # Half a scale for each activation; then a few roundings in every group, lane and the tree.
    quantising = 0.5001 * scales_of(x).astype(np.float64) @ w.T
    rounding = (cols / 64 + 12) * EPS * (np.abs(x) + scales_of(x)).astype(np.float64) @ reach(matrix).T
    assert (np.abs(product(matrix, x) - exact) <= quantising + rounding + 1e-30).all()


@pytest.mark.parametrize("weight_format", QUANTISED)
@given(rows=st.integers(1, 40), cols=st.integers(1, 1300), seed=st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_integer_products_are_exact(weight_format, rows, cols, seed):
    matrix, x = from_float32(values(seed, rows, cols), weight_format), values(seed + 1, 1, cols)
    kept = quantised(x)
    w, a = dequantise(matrix).astype(np.float64), kept.values(0).astype(np.float64)
    bound = (cols / 64 + 12) * EPS * np.abs(a) @ reach(matrix).T + 1e-30
    assert (np.abs(product(matrix, x)[0] - w @ a) <= bound).all()


@pytest.mark.parametrize("weight_format", QUANTISED)
@given(rows=st.integers(1, 40), cols=st.integers(1, 1300), count=st.integers(1, 9), data=st.data(), bias=st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_row_alone_and_any_split_of_columns_give_the_same_bits(weight_format, rows, cols, count, data, bias):
    matrix, x = from_float32(values(1, rows, cols), weight_format), values(2, count, cols)
    b = values(3, rows) if bias else None
    splits = sorted(data.draw(st.lists(st.integers(0, rows), max_size=4)))
    alone = np.concatenate([product(matrix, x[i : i + 1], bias=b, splits=splits) for i in range(count)])
    assert product(matrix, x, bias=b).tobytes() == alone.tobytes()


@pytest.mark.parametrize("weight_format", QUANTISED)
def test_extreme_codes_do_not_overflow(weight_format):
    cols = 256
    data = {"int8": np.full((2, cols), -128, np.int8), "int4-g64": np.full((2, cols // 2), 0, np.uint8)}[weight_format]
    data[1] = 127 if weight_format == "int8" else 0xFF
    scales = np.ones(2, np.float32) if weight_format == "int8" else np.ones((2, cols // 64), np.float16)
    matrix = Matrix(weight_format, 2, cols, data, scales)
    for sign in (1, -1):
        x = np.full((4, cols), sign * 127, np.float32)
        assert product(matrix, x).tolist() == (x @ dequantise(matrix).T).tolist()
        assert product(matrix, x[:1])[0].tolist() == (dequantise(matrix) @ x[0]).tolist()


def test_room_is_made_for_the_longest_rows_that_are_widened():
    longest = WIDE_GROUPS * 64
    assert row_layout(longest)[1] <= ROW_BYTES < row_layout(longest + 1)[1]
    for cols in (longest, longest + 1):
        matrix, x = from_float32(values(1, 5, cols), "int8"), values(2, 4, cols)
        alone = np.concatenate([product(matrix, x[i : i + 1]) for i in range(4)])
        assert product(matrix, x).tobytes() == alone.tobytes()


@pytest.mark.parametrize("weight_format", QUANTISED)
def test_any_bits_as_weights_are_computed_on_without_harm(weight_format):
    rng = np.random.default_rng(0)
    matrix = from_float32(values(1, 9, 200), weight_format)
    noise = rng.integers(0, 256, matrix.data.nbytes, np.uint8).view(matrix.data.dtype).reshape(matrix.data.shape)
    raw = rng.integers(0, 256, matrix.scales.nbytes, np.uint8)
    scales = raw.view(matrix.scales.dtype).reshape(matrix.scales.shape)
    assert product(Matrix(weight_format, 9, 200, noise, scales), values(2, 5, 200)).shape == (5, 9)


@pytest.mark.parametrize("weight_format", QUANTISED)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_an_activation_that_is_no_number_shows_in_its_row_only(weight_format, value):
    x = values(1, 2, 200)
    x[0, 150] = value
    y = product(from_float32(values(2, 5, 200), weight_format), x)
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


@pytest.mark.parametrize("weight_format", QUANTISED)
def test_tiny_activations_count_as_zeros(weight_format):
    x = np.full((1, 64), 1e-38, np.float32)
    assert not product(from_float32(values(2, 5, 64), weight_format), x).any()


def test_float_weights_keep_their_exact_kernels():
    x = values(1, 3, 50)
    batch = Batch(3)
    batch.set_rows(3)
    for weight_format in ("f32", "bf16"):
        assert not quantises("fast", weight_format)
        matrix = from_float32(values(2, 7, 50), weight_format)
        found = []
        for numerics in ("exact", "fast"):
            y = np.zeros((3, 7), np.float32)
            matmul("m", matrix, x, y, batch, numerics=numerics)()
            found.append(y.tobytes())
        assert found[0] == found[1]


def test_quantised_weights_want_quantised_rows():
    x, y = np.zeros((2, 64), np.float32), np.zeros((2, 3), np.float32)
    matrix = from_float32(values(1, 3, 64), "int8")
    for rows in (None, QuantisedRows(2, 63), QuantisedRows(1, 64)):
        with pytest.raises(UsageError, match="quantised rows"):
            matmul("m", matrix, x, y, Batch(2), numerics="fast", quantised=rows)
    with pytest.raises(UsageError, match="2 quantised rows for a batch of 3"):
        quantise_rows("q", np.zeros((3, 64), np.float32), QuantisedRows(2, 64), Batch(3))
    with pytest.raises(UsageError, match="no quantised rows of 0 x 5"):
        QuantisedRows(0, 5)


HIDDEN, WIDTH, ROWS, SLOTS = 160, 200, 5, 3


def expert(weight_format, seed):
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    return [from_float32(values(seed + i, *shape) / 8, weight_format) for i, shape in enumerate(shapes)]


def expert_rows(weight_format, x, order, *, threads, together):
    rows = np.zeros((ROWS, SLOTS, HIDDEN), np.float32)
    ffn = ExpertFFN(
        "e", x, rows, intermediate=WIDTH, format=weight_format, numerics="fast", quantised=quantised(x)
    )  # fmt: skip
    with Executor(threads) as executor:
        for slot in order:
            ffn.point_matrices(*expert(weight_format, slot))
            for group in [range(ROWS)] if together else [[row] for row in range(ROWS)]:
                ffn.assign(list(group), [slot] * len(group))
                executor.run(ffn.segment)
    return rows


@pytest.mark.parametrize("weight_format", QUANTISED)
def test_experts_alone_together_and_over_threads_give_the_same_bits(weight_format):
    x = values(9, ROWS, HIDDEN)
    first = expert_rows(weight_format, x, (0, 1, 2), threads=1, together=True)
    assert first.tobytes() == expert_rows(weight_format, x, (2, 0, 1), threads=2, together=False).tobytes()
    for slot in range(SLOTS):
        gate, up, down = (dequantise(m).astype(np.float64) for m in expert(weight_format, slot))
        for row in range(ROWS):
            g, u = gate @ x[row], up @ x[row]
            exact = down @ (g / (1 + np.exp(-g)) * u)
            assert np.linalg.norm(first[row, slot] - exact) < 0.02 * np.linalg.norm(exact)


def test_fast_experts_want_quantised_rows():
    with pytest.raises(UsageError, match="quantised rows of 160"):
        ExpertFFN(
            "e",
            np.zeros((ROWS, HIDDEN), np.float32),
            np.zeros((ROWS, SLOTS, HIDDEN), np.float32),
            intermediate=WIDTH,
            format="int8",
            numerics="fast",
        )
