from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_node.kernels.matrix import (
    FORMATS,
    Matrix,
    bf16_bits,
    data_shape,
    dequantise,
    from_float32,
    scales_shape,
)
from tierd.errors import UsageError


def test_int4_codes_lie_where_the_layout_says():
    data = np.full((1, 128), 0x88, np.uint8)
    data[0, 5] = 0x3F  # column 5 of group 0 is 15, column 5 of group 1 is 3
    data[0, 64 + 9] = 0x08  # column 9 of group 2 is 8, of group 3 is 0
    scales = np.array([[1, 2, 4, 8]], np.float16)
    values = dequantise(Matrix("int4-g64", 1, 256, data, scales))[0]
    expected = np.zeros(256, np.float32)
    expected[5], expected[64 + 5], expected[192 + 9] = 7, (3 - 8) * 2, -8 * 8
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("weight_format", FORMATS)
@given(rows=st.integers(1, 9), cols=st.integers(1, 300), seed=st.integers(0, 1 << 30))
@settings(max_examples=15, deadline=None)
def test_quantising_and_back_stays_within_half_a_step(weight_format, rows, cols, seed):
    w = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    matrix = from_float32(w, weight_format)
    assert matrix.data.shape == data_shape(weight_format, rows, cols)
    assert (None if matrix.scales is None else matrix.scales.shape) == scales_shape(weight_format, rows, cols)
    step = {
        "f32": 0, "bf16": 2**-8, "int8": 1 / 254, "int4-g64": 1 / 7.9,
        "fp8-e4m3": 1 / 27, "mxfp4": 1 / 4, "int4-g32": 1 / 13,
    }[weight_format]  # fmt: skip
    assert np.abs(dequantise(matrix) - w).max() <= step * np.abs(w).max()


def test_padding_of_int4_is_code_eight_and_scale_zero():
    matrix = from_float32(np.ones((2, 130), np.float32), "int4-g64")
    assert matrix.data.shape == (2, 128)
    assert (matrix.data[:, 64 + 2 :] == 0x88).all()
    assert (matrix.data[:, 64 : 64 + 2] >> 4 == 8).all()
    assert (matrix.scales[:, 3] == 0).all()


def test_bf16_rounds_to_nearest_even_and_keeps_nan_and_infinity():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0x7F800001, 0xFF7FFFFF], np.uint32)
    rounded = bf16_bits(bits.view(np.float32))
    assert rounded.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFF80]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("q3", 1, 1, np.zeros((1, 1), np.float32)), "unknown weight format 'q3'"),
        (("f32", 0, 1, np.zeros((0, 1), np.float32)), "outside"),
        (("f32", 2, 3, np.zeros((2, 4), np.float32)), "shape \\(2, 3\\)"),
        (("bf16", 2, 3, np.zeros((2, 3), np.float32)), "uint16"),
        (("f32", 2, 3, np.zeros((3, 2), np.float32).T), "contiguous"),
        (("f32", 2, 3, np.zeros((2, 3), np.float32), np.zeros(2, np.float32)), "no scales"),
        (("int8", 2, 3, np.zeros((2, 3), np.int8)), "needs scales"),
        (("int8", 2, 3, np.zeros((2, 3), np.int8), np.zeros(3, np.float32)), "scales of a int8"),
        (("int4-g64", 2, 3, np.zeros((2, 64), np.uint8), np.zeros((2, 1), np.float16)), "scales of a int4"),
        (("fp8-e4m3", 2, 3, np.zeros((2, 3), np.uint8), np.zeros((2, 3), np.float32)), "scales of a fp8"),
        (("mxfp4", 2, 3, np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.uint8)), "scales of a mxfp4"),
        (("int4-g32", 2, 3, np.zeros((2, 32), np.uint8), np.zeros((2, 16), np.float32)), "scales of a int4-g32"),
    ],
)
def test_a_wrong_array_is_refused_with_what_was_wanted(arguments, message):
    with pytest.raises(UsageError, match=message):
        Matrix(*arguments)
