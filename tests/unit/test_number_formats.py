"""Codes and scales of published formats: every bit pattern against what its specification says, in exact numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.store.number_formats import (
    E2M1,
    E4M3,
    e8m0_to_f32,
    micro_scales,
    pack_nibbles,
    repack_pairs,
    spread_blocks,
    spread_groups,
    unpack_nibbles,
)


def small_float(code, exponent_bits, mantissa_bits, bias):
    """The value of a code without infinities, as a fraction."""
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    one = 1 << mantissa_bits
    if exponent == 0:
        return sign * Fraction(mantissa, one) * Fraction(2) ** (1 - bias)
    return sign * Fraction(one + mantissa, one) * Fraction(2) ** (exponent - bias)


def test_every_8_bit_float_has_its_value():
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert np.isnan(E4M3[code])
        else:
            assert Fraction(float(E4M3[code])) == small_float(code, 4, 3, 7)
    assert E4M3[0x7E] == 448
    assert np.signbit(E4M3[0x80])


def test_every_4_bit_float_has_its_value():
    assert [Fraction(float(value)) for value in E2M1] == [small_float(code, 2, 1, 1) for code in range(16)]
    assert E2M1[7] == 6


def test_every_scale_byte_is_its_power_of_two():
    scales = e8m0_to_f32(np.arange(256, dtype=np.uint8))
    for exponent in range(255):
        assert Fraction(float(scales[exponent])) == Fraction(2) ** (exponent - 127)
    assert np.isnan(scales[255])


@pytest.mark.parametrize("cols", [1, 31, 32, 33, 63, 64, 65, 128, 200])
def test_neighbours_in_a_byte_and_records_hold_the_same_codes(cols):
    codes = np.random.default_rng(cols).integers(0, 16, (3, cols)).astype(np.uint8)
    packed = pack_nibbles(codes, 8)
    assert packed.shape == (3, -(-cols // 64) * 32)
    assert np.array_equal(unpack_nibbles(packed, cols), codes)
    assert (unpack_nibbles(packed, packed.shape[1] * 2)[:, cols:] == 8).all()
    even = np.zeros((3, cols + cols % 2), np.uint8)
    even[:, :cols] = codes
    even[:, cols:] = 3  # what lies behind the last column is not taken over
    pairs = even[:, 0::2] | even[:, 1::2] << 4
    assert np.array_equal(repack_pairs(pairs, cols, 8), packed)


def test_a_block_holds_its_first_32_columns_in_low_nibbles():
    codes = np.zeros((1, 64), np.uint8)
    codes[0, 5], codes[0, 37] = 3, 12
    packed = pack_nibbles(codes, 0)
    assert packed[0, 5] == 0xC3
    assert packed[0].sum() == 0xC3


@given(st.integers(1, 300), st.integers(1, 300))
def test_scales_reach_the_weights_they_belong_to(rows, cols):
    blocks = np.arange((-(-rows // 128)) * -(-cols // 128)).reshape(-(-rows // 128), -1)
    spread = spread_blocks(blocks, rows, cols)
    assert spread.shape == (rows, cols)
    assert spread[rows - 1, cols - 1] == blocks[(rows - 1) // 128, (cols - 1) // 128]
    groups = micro_scales(np.arange(2 * -(-cols // 32)).reshape(2, -1))
    assert groups.shape[1] % 16 == 0
    assert spread_groups(groups, cols)[1, cols - 1] == groups[1, (cols - 1) // 32]
