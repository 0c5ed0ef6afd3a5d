"""Where two strings of bytes differ: by pieces and byte by byte, of any length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.differing import CHUNK, changed, differing


@given(st.integers(0, 3000), st.lists(st.integers(0, 2999), max_size=20))
@pytest.mark.parametrize("fill", [0, 255])
def test_every_byte_that_differs_is_found_and_no_other(fill, length, places):
    old = bytes([fill]) * length
    new = bytearray(old)
    for place in places:
        if place < length:
            new[place] ^= 1 + place % 255
    expected = [place for place in range(length) if new[place] != old[place]]
    assert changed(bytes(new), old) == expected
    assert list(differing(bytes(new), old)) == sorted({place - place % CHUNK for place in expected})
