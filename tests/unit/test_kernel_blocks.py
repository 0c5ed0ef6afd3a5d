"""Kernels of fp8-e4m3, mxfp4 and int4-g32: every code under every scale, whatever the sizes, and any bits at all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_node.kernels import Batch, Matrix, QuantisedRows, dequantise, from_float32, matmul, quantise_rows
from compute_node.kernels.matrix import scales_shape
from tierd.store.number_formats import E2M1, E4M3, micro_scales, pack_nibbles, spread_blocks

BLOCKS = ("fp8-e4m3", "mxfp4", "int4-g32")
SMALL = ("mxfp4", "int4-g32")


def product(matrix, x, numerics="exact"):
    batch = Batch(len(x))
    batch.set_rows(len(x))
    y, kept = np.full((len(x), matrix.rows), np.nan, np.float32), None
    if numerics == "fast":
        kept = QuantisedRows(len(x), matrix.cols)
        quantise_rows("q", x, kept, batch)()
    matmul("m", matrix, x, y, batch, numerics=numerics, quantised=kept)()
    return y


def picked(matrix, numerics="exact"):
    """The value that the kernel sees in each place of a matrix: float32 [rows, cols]."""
    return np.ascontiguousarray(product(matrix, np.eye(matrix.cols, dtype=np.float32), numerics).T)


def same(a, b):
    """Equal numbers, and NaN in the same places."""
    return np.array_equal(a, b, equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, -3.5, 2.0**-126, 2.0**-140, 2.0**100, 0.0])
def test_every_8_bit_code_is_its_value_times_the_scale(scale):
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    matrix = Matrix("fp8-e4m3", 16, 16, codes, np.array([[scale]], np.float32))
    finite = Matrix("fp8-e4m3", 16, 16, np.where((codes & 127) == 127, 0, codes).astype(np.uint8), matrix.scales)
    assert same(picked(finite), E4M3[finite.data] * np.float32(scale))
    for row, place in ((7, 15), (15, 15)):  # a code that is no number spoils its own row alone
        x = np.zeros((1, 16), np.float32)
        x[0, place] = 1
        assert np.isnan(product(matrix, x)[0]).tolist() == [number == row or number in (7, 15) for number in range(16)]


def test_each_block_of_8_bit_codes_has_its_own_scale():
    rng = np.random.default_rng(1)
    rows, cols = 260, 300
    codes = rng.integers(0, 127, (rows, cols), np.uint8)
    matrix = Matrix("fp8-e4m3", rows, cols, codes, rng.uniform(0.5, 2, (3, 3)).astype(np.float32))
    assert same(picked(matrix), E4M3[codes] * spread_blocks(matrix.scales, rows, cols))


def scaled(weight_format, exponents_or_bits):
    """All sixteen codes twice in each row, and a row for each scale."""
    scales = np.asarray(exponents_or_bits)[:, None]
    codes = np.tile(np.arange(32, dtype=np.uint8) & 15, (len(scales), 1))
    kind = np.uint8 if weight_format == "mxfp4" else np.uint16
    beyond = 0 if weight_format == "mxfp4" else 8
    return Matrix(weight_format, len(scales), 32, pack_nibbles(codes, beyond), micro_scales(scales.astype(kind)))


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_every_4_bit_float_under_every_scale_is_exact(numerics):
    matrix = scaled("mxfp4", range(253))  # beyond, the largest codes are infinite
    with np.errstate(over="ignore"):
        exact = np.tile(E2M1.astype(np.float64), 2) * 2.0 ** (np.arange(253)[:, None] - 127.0)
        expected = exact.astype(np.float32)
    found = picked(matrix, numerics)
    if numerics == "exact":
        assert same(found, expected)
    else:  # an activation of 1 is 127 steps of 1/127, and codes are counted 8 too high first
        scale = 2.0 ** (np.arange(253)[:, None] - 127.0)
        bound = 2.0**-22 * (np.abs(exact) + 8 * scale) + 2.0**-138
        assert (np.abs(found - exact) <= bound)[scale[:, 0] < 2.0**120].all()


def test_a_scale_byte_of_255_is_no_number():
    matrix = scaled("mxfp4", [255, 127])
    y = product(matrix, np.ones((1, 32), np.float32))[0]
    assert np.isnan(y[0])
    assert y[1] == 0


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_every_4_bit_code_under_every_kind_of_bf16_scale(numerics):
    bits = np.concatenate([np.arange(0, 0x7D80, 37), np.arange(0x8000, 0xFD80, 37)]).astype(np.uint16)
    wide = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)[:, None]
    exact = np.tile(np.arange(16) - 8.0, 2) * wide
    found = picked(scaled("int4-g32", bits), numerics)
    if numerics == "exact":
        with np.errstate(over="ignore"):
            assert same(found, exact.astype(np.float32))
    else:
        bound = 2.0**-22 * (np.abs(exact) + 8 * np.abs(wide)) + 2.0**-138
        assert (np.abs(found - exact) <= bound)[np.abs(wide[:, 0]) < 2.0**120].all()


@pytest.mark.parametrize("weight_format", BLOCKS)
@given(
    rows=st.integers(1, 140),
    cols=st.one_of(st.integers(1, 700), st.sampled_from([16, 32, 64, 128, 512, 576])),
    count=st.integers(1, 9),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=20, deadline=None)
def test_codes_give_the_bits_of_the_same_weights_as_float32(weight_format, rows, cols, count, seed):
    rng = np.random.default_rng(seed)
    matrix = from_float32(rng.standard_normal((rows, cols)).astype(np.float32), weight_format)
    x = rng.standard_normal((count, cols)).astype(np.float32)
    assert product(matrix, x).tobytes() == product(from_float32(dequantise(matrix)), x).tobytes()


@pytest.mark.parametrize("weight_format", SMALL)
def test_largest_codes_and_activations_do_not_overflow(weight_format):
    cols = 1024
    for code in (0, 7, 8, 15):
        packed = pack_nibbles(np.full((1, cols), code, np.uint8), 0)
        one = {"mxfp4": np.uint8(127), "int4-g32": np.uint16(0x3F80)}[weight_format]
        matrix = Matrix(weight_format, 1, cols, packed, np.full(scales_shape(weight_format, 1, cols), one))
        for sign in (1, -1):
            x = np.full((1, cols), sign * 127, np.float32)
            assert product(matrix, x, "fast")[0].tolist() == (dequantise(matrix) @ x[0]).tolist()


@pytest.mark.parametrize("weight_format", BLOCKS)
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_any_bits_are_computed_on_and_spoil_their_own_rows_alone(weight_format, numerics):
    rng = np.random.default_rng(3)
    matrix = from_float32(rng.standard_normal((9, 200)).astype(np.float32), weight_format)
    x = rng.standard_normal((5, 200)).astype(np.float32)
    whole = product(matrix, x, numerics)
    data = matrix.data.copy()
    data[4] = rng.integers(0, 256, data.shape[1], np.uint8)
    scales = matrix.scales.copy()
    if weight_format in SMALL:
        scales[4] = rng.integers(0, 256, scales[4].nbytes, np.uint8).view(scales.dtype)
    torn = product(Matrix(weight_format, 9, 200, data, scales), x, numerics)
    others = [row for row in range(9) if row != 4]
    assert torn[:, others].tobytes() == whole[:, others].tobytes()
