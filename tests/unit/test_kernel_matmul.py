from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_node.kernels import FORMATS, Batch, Matrix, dequantise, from_float32, matmul
from tierd.errors import UsageError

EPS = 2.0**-24


def product(matrix, x, *, bias=None, splits=()):
    batch = Batch(len(x))
    batch.set_rows(len(x))
    y = np.full((len(x), matrix.rows), np.nan, np.float32)
    op = matmul("m", matrix, x, y, batch, bias=bias)
    borders = [0, *splits, matrix.rows]
    for lo, hi in pairwise(borders):
        op(lo, hi)
    return y


def values(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("weight_format", FORMATS)
@given(
    rows=st.integers(1, 40),
    cols=st.one_of(st.integers(1, 300), st.sampled_from([16, 64, 128, 256, 512])),
    count=st.integers(1, 9),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=25, deadline=None)
def test_products_are_within_the_bound_of_float64(weight_format, rows, cols, count, seed):
    matrix, x = from_float32(values(seed, rows, cols), weight_format), values(seed + 1, count, cols)
    w = dequantise(matrix).astype(np.float64)
    exact = x.astype(np.float64) @ w.T
    # Each lane adds cols / 16 products, the tree four more; int4 and int8 multiply by a scale besides.
    bound = (cols / 16 + 12) * EPS * (np.abs(x).astype(np.float64) @ np.abs(w).T) + 1e-30
    assert (np.abs(product(matrix, x) - exact) <= bound).all()


@pytest.mark.parametrize("weight_format", FORMATS)
@given(rows=st.integers(1, 40), cols=st.integers(1, 300), count=st.integers(1, 9), data=st.data(), bias=st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_row_alone_and_any_split_of_columns_give_the_same_bits(weight_format, rows, cols, count, data, bias):
    matrix, x = from_float32(values(1, rows, cols), weight_format), values(2, count, cols)
    b = values(3, rows) if bias else None
    whole = product(matrix, x, bias=b)
    splits = sorted(data.draw(st.lists(st.integers(0, rows), max_size=4)))
    alone = np.concatenate([product(matrix, x[i : i + 1], bias=b, splits=splits) for i in range(count)])
    assert whole.tobytes() == alone.tobytes()


def nearest(exact):
    """The float32 nearest to a fraction, ties to even."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.uint32)) & 1))


def fma(a, b, c):
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    return nearest(exact)


def lane_sums(weights, x):
    lanes = [np.float32(0)] * 16
    for k, (w, v) in enumerate(zip(weights, x, strict=True)):
        lanes[k % 16] = fma(w, v, lanes[k % 16])
    return lanes


def tree(lanes):
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[j] + lanes[half + j] for j in range(half)]
    return lanes[0]


@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_sum_follows_the_stated_order_bit_for_bit(weight_format):
    matrix, x = from_float32(values(5, 3, 150), weight_format), values(6, 1, 150)
    expected = []
    for row in range(matrix.rows):
        if weight_format == "int4-g64":
            one = Matrix(matrix.format, 3, 150, matrix.data, np.ones_like(matrix.scales))
            codes, total = dequantise(one)[row], [np.float32(0)] * 16
            for group in range(0, 150, 64):
                partial = lane_sums(codes[group : group + 64], x[0, group : group + 64])
                scale = np.float32(matrix.scales[row, group // 64])
                total = [fma(scale, p, t) for p, t in zip(partial, total, strict=True)]
            expected.append(tree(total))
        elif weight_format == "int8":
            expected.append(tree(lane_sums(matrix.data[row].astype(np.float32), x[0])) * matrix.scales[row])
        else:
            expected.append(tree(lane_sums(dequantise(matrix)[row], x[0])))
    assert product(matrix, x)[0].tobytes() == np.array(expected, np.float32).tobytes()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_any_bits_as_weights_are_computed_on_without_harm(weight_format):
    rng = np.random.default_rng(0)
    matrix = from_float32(values(1, 9, 200), weight_format)
    noise = rng.integers(0, 256, matrix.data.nbytes, np.uint8).view(matrix.data.dtype).reshape(matrix.data.shape)
    scales = matrix.scales
    if scales is not None:
        raw = rng.integers(0, 256, scales.nbytes, np.uint8)
        scales = raw.view(scales.dtype).reshape(scales.shape)
    y = product(Matrix(weight_format, 9, 200, noise, scales), values(2, 5, 200))
    assert y.shape == (5, 9)


def scaled_seven(scale):
    data = np.full((1, 64), 0x9F, np.uint8)  # every column of group 0 holds 7
    matrix = Matrix("int4-g64", 1, 128, data, np.array([[scale, 0]], np.float16))
    x = np.zeros((1, 128), np.float32)
    x[0, 3] = 1
    return product(matrix, x)[0, 0]


@pytest.mark.parametrize("scale", [0.0, 6.0e-8, 1e-5, 6.1e-5, 1.0, -2.5, 65504.0])
def test_half_scales_of_every_size_are_widened_exactly(scale):
    assert scaled_seven(scale) == np.float32(np.float16(scale)) * np.float32(7)


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_no_number_shows_in_the_result(scale):
    assert not np.isfinite(scaled_seven(scale))


def test_rows_beyond_the_batch_are_left_alone():
    matrix, x = from_float32(values(1, 8, 20)), values(2, 6, 20)
    batch, y = Batch(6), np.full((6, 8), 7, np.float32)
    batch.set_rows(2)
    matmul("m", matrix, x, y, batch)()
    assert (y[2:] == 7).all()
    assert not (y[:2] == 7).any()


def test_views_with_longer_rows_are_read_and_written_in_place():
    matrix, wide, out = from_float32(values(1, 8, 20)), values(2, 3, 60), np.zeros((3, 30), np.float32)
    batch = Batch(3)
    batch.set_rows(3)
    matmul("m", matrix, wide[:, 20:40], out[:, 10:18], batch)()
    assert out[:, 10:18].tobytes() == product(matrix, np.ascontiguousarray(wide[:, 20:40])).tobytes()
    assert not out[:, :10].any()
    assert not out[:, 18:].any()


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (np.zeros((2, 5), np.float32), np.zeros((2, 3), np.float32), {}, r"layer q: x must have shape \[2, 4\]"),
        (np.zeros((1, 4), np.float32), np.zeros((2, 3), np.float32), {}, "layer q: x"),
        (np.zeros((2, 4)), np.zeros((2, 3), np.float32), {}, "float32"),
        (np.zeros((4, 2), np.float32).T, np.zeros((2, 3), np.float32), {}, "contiguous"),
        (np.zeros((2, 4), np.float32), np.zeros((2, 3), np.float32), {"numerics": "rough"}, "no 'rough' kernel"),
        (np.zeros((2, 4), np.float32), np.zeros((2, 3), np.float32), {"bias": np.zeros(2, np.float32)}, "bias"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_by_name(x, y, options, message):
    with pytest.raises(UsageError, match=message):
        matmul("layer q", from_float32(values(1, 3, 4)), x, y, Batch(2), **options)


def test_a_read_only_result_is_refused():
    y = np.zeros((2, 3), np.float32)
    y.flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        matmul("m", from_float32(values(1, 3, 4)), np.zeros((2, 4), np.float32), y, Batch(2))
