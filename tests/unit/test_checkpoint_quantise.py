"""Number formats: exact where they promise it, bounded where they round, the same layout as written down."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tierd.checkpoint.quantise import (
    bf16_to_f32,
    dequantise_int4,
    dequantise_int8,
    f32_to_bf16,
    quantise_int4,
    quantise_int8,
)
from tierd.errors import UsageError

shapes = st.tuples(st.integers(1, 9), st.integers(1, 300))
finite = st.floats(-(2.0**99), 2.0**99, width=32)


def test_every_bf16_pattern_survives_the_way_to_float32_and_back():
    bits = np.arange(1 << 16, dtype=np.uint16)
    back = f32_to_bf16(bf16_to_f32(bits))
    nan = np.isnan(bf16_to_f32(bits))
    assert np.array_equal(back[~nan], bits[~nan])
    assert np.isnan(bf16_to_f32(back[nan])).all()


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F808000, 0x3F80),  # half way: to even, down
        (0x3F818000, 0x3F82),  # half way: to even, up
        (0x3F808001, 0x3F81),
        (0x3F807FFF, 0x3F80),
        (0x7F7FFFFF, 0x7F80),  # the largest float32 rounds to infinity
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),  # a NaN whose payload lies in the lost bits stays a NaN
        (0x80000001, 0x8000),
    ],
)
def test_bf16_rounds_to_nearest_even(bits, rounded):
    value = np.array([bits], dtype=np.uint32).view(np.float32)
    assert f32_to_bf16(value)[0] == rounded


@given(arrays.arrays(np.float32, shapes, elements=finite))
def test_int8_is_within_half_a_step_of_every_weight(weights):
    codes, scales = quantise_int8(weights)
    assert codes.dtype == np.int8
    assert codes.min() >= -127
    error = np.abs(dequantise_int8(codes, scales).astype(np.float64) - weights)
    assert (error <= 0.5001 * scales[:, None].astype(np.float64) + 1e-38).all()


def test_int8_codes_and_scales_of_a_known_row():
    codes, scales = quantise_int8(np.array([[127.0, -63.5, 0.5, 1.5], [0, 0, 0, 0]], np.float32))
    assert scales.tolist() == [1.0, 0.0]
    assert codes.tolist() == [[127, -64, 0, 2], [0, 0, 0, 0]]  # ties to even


def as_groups(weights):
    """Rows padded with zeros to whole blocks, as [rows, groups, 64]."""
    rows, cols = weights.shape
    padded = np.zeros((rows, -(-cols // 128) * 128), np.float32)
    padded[:, :cols] = weights
    return padded.reshape(rows, -1, 64)


@given(arrays.arrays(np.float32, shapes, elements=st.floats(-1e4, 1e4, width=32)))
@example(np.array([[1188.0] * 4 + [3645.0] + [1188.0] * 10 + [-3363.0, 1188.0]], np.float32))
def test_int4_keeps_shape_padding_and_bound(weights):
    packed, scales = quantise_int4(weights)
    rows, cols = weights.shape
    blocks = -(-cols // 128)
    assert packed.shape == (rows, blocks * 64)
    assert scales.shape == (rows, blocks * 2)
    back = dequantise_int4(packed, scales, cols)
    assert back.shape == weights.shape
    # The side opposite to the largest magnitude m reaches 7/8 of 0.9 m at least; float16 scales round by 2^-11.
    # Below float16's range a scale becomes 0 or a subnormal, which loses less than 1e-6.
    largest = np.abs(as_groups(weights)).max(axis=2)
    bound = np.repeat(largest * (1 - 0.9 * 7 / 8 + 2**-10), 64, axis=1)[:, :cols] + 1e-6
    assert (np.abs(back - weights) <= bound).all()


@given(arrays.arrays(np.float32, shapes, elements=st.floats(-1e4, 1e4, width=32)))
def test_int4_loses_no_more_than_the_common_choice_of_scale(weights):
    groups = as_groups(weights).astype(np.float64)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)
    scale = (extreme / -8).astype(np.float16).astype(np.float64)
    codes = np.clip(np.rint(groups / np.where(scale == 0, 1, scale)), -8, 7)
    common = ((codes * scale - groups) ** 2).sum(axis=2)
    packed, scales = quantise_int4(weights)
    chosen = ((dequantise_int4(packed, scales, groups.shape[1] * 64).reshape(groups.shape) - groups) ** 2).sum(axis=2)
    assert (chosen <= common * (1 + 1e-4) + 1e-11).all()


def test_int4_bytes_of_a_known_row():
    row = np.zeros((1, 130), dtype=np.float32)
    row[0, 0] = -8.0  # group 0: scale 1
    row[0, 1] = 3.0
    row[0, 64] = 16.0  # group 1: scale -2
    row[0, 65] = -14.0
    row[0, 128] = 4.0  # group 2: scale -0.5
    packed, scales = quantise_int4(row)
    assert scales.tolist() == [[1.0, -2.0, -0.5, 0.0]]
    assert packed.shape == (1, 128)
    assert packed[0, 0] == 0 | 0 << 4  # column 0 is code 0 (-8), column 64 is code 0 (16 / -2)
    assert packed[0, 1] == 11 | 15 << 4  # 3 -> 11; -14 / -2 = 7 -> 15
    assert packed[0, 2] == 0x88
    assert packed[0, 64] == 0 | 8 << 4  # column 128; its block has no fourth group: code 8
    assert (packed[0, 65:] == 0x88).all()
    assert np.array_equal(dequantise_int4(packed, scales, 130), row)


def test_int4_weights_on_the_grid_are_exact():
    generator = np.random.default_rng(1)
    values = generator.integers(-8, 8, (16, 256)).astype(np.float32)
    values[:, ::64] = -8
    scale = np.float32(2.0**-7)
    packed, scales = quantise_int4(values * scale)
    assert np.array_equal(dequantise_int4(packed, scales, 256), values * scale)


def test_int4_error_on_gaussian_weights_is_as_stated():
    weights = np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)
    packed, scales = quantise_int4(weights)
    error = dequantise_int4(packed, scales, 1024) - weights
    assert float(np.sqrt(np.mean(error**2))) < 0.093


def test_huge_and_tiny_weights_stay_finite():
    weights = np.array([[3e38] + [1e-44] * 63, [1e-44] * 64], dtype=np.float32)
    assert np.isfinite(dequantise_int8(*quantise_int8(weights))).all()
    weights[0, 0] = -524_032
    back = dequantise_int4(*quantise_int4(weights), 64)
    assert back[0, 0] == -524_032
    assert np.isfinite(back).all()


def test_weights_beyond_float16_scales_are_refused():
    with pytest.raises(UsageError, match="beyond the range of int4-g64"):
        quantise_int4(np.full((2, 64), 530_000, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(bad):
    weights = np.zeros((3, 70), np.float32)
    weights[2, 69] = bad
    for quantise in (quantise_int4, quantise_int8):
        with pytest.raises(UsageError, match="NaN or infinite"):
            quantise(weights)


def test_blocks_of_rows_do_not_change_the_result():
    weights = np.random.default_rng(2).standard_normal((700, 1000)).astype(np.float32)
    packed, scales = quantise_int4(weights)
    codes, rows = quantise_int8(weights)
    for row in (0, 130, 131, 132, 699):
        alone = quantise_int4(weights[row : row + 1])
        assert np.array_equal(alone[0][0], packed[row])
        assert np.array_equal(alone[1][0], scales[row])
        alone8 = quantise_int8(weights[row : row + 1])
        assert np.array_equal(alone8[0][0], codes[row])
        assert alone8[1][0] == rows[row]
