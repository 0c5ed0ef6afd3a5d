"""The index file: exact, validated row by row, and harmless when its bytes are hostile."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import StoreDamaged
from tierd.store.checksums import sha256
from tierd.store.geometry import ExpertLayer, Geometry
from tierd.store.index import check_index, decode_index, encode_index, new_index
from tierd.store.manifest import Shard
from tierd.store.records import expert_layout

LAYOUT = expert_layout("f32", 16, 8)
SIZE = LAYOUT.record_bytes
GEOMETRY = Geometry(
    hidden_size=16,
    intermediate_size=8,
    top_k=1,
    layers=(ExpertLayer(layer=1, experts=2, layout=0), ExpertLayer(layer=3, experts=3, layout=0)),
    layouts=(LAYOUT,),
)
SHARDS = [
    Shard(file="a.safetensors", bytes=4096 + 3 * SIZE, header_bytes=4096, header_sha256="0" * 64),
    Shard(file="b.safetensors", bytes=4096 + 2 * SIZE, header_bytes=4096, header_sha256="0" * 64),
]


def good_index():
    index = new_index(GEOMETRY)
    index["shard"] = [0, 0, 0, 1, 1]
    index["offset"] = [4096, 4096 + SIZE, 4096 + 2 * SIZE, 4096, 4096 + SIZE]
    return index


def test_a_good_index_passes_and_survives_the_file():
    index = good_index()
    check_index(index, GEOMETRY, SHARDS, "experts.npy")
    loaded = decode_index(encode_index(index), GEOMETRY, "experts.npy")
    assert np.array_equal(loaded, index)
    assert not loaded.flags.writeable
    assert np.array_equal(np.load(io.BytesIO(encode_index(index)), allow_pickle=False), index)


def test_an_index_has_the_bytes_that_it_always_had():
    """Other ones would be another fingerprint: stores and their far nodes, session files and histories hang on it."""
    data = encode_index(good_index())
    assert (len(data) - good_index().nbytes) % 64 == 0
    assert sha256(data) == "4ae00db2ff2d76ba646266f6fecb99440edbbad66cd71e579701773cd5178acb"


def test_records_may_lie_in_any_order_inside_their_shard():
    index = good_index()
    index["offset"][:3] = index["offset"][:3][::-1].copy()
    check_index(index, GEOMETRY, SHARDS, "experts.npy")


@pytest.mark.parametrize(
    ("row", "field", "value", "message"),
    [
        (0, "layer", 2, "wrong layer"),
        (1, "expert", 0, "wrong expert"),
        (2, "bytes", SIZE + 4096, "wrong bytes"),
        (3, "shard", 2, "unknown shard"),
        (4, "offset", 4096 + SIZE + 512, "multiple of 4096"),
        (0, "offset", 0, "inside the shard's header"),
        (4, "offset", 4096 + 2 * SIZE, "ends after its shard"),
        (2, "offset", (1 << 64) - 4096, "ends after its shard"),
        (1, "offset", 4096, "overlaps"),
    ],
)
def test_every_wrong_row_is_refused_by_expert(row, field, value, message):
    index = good_index()
    index[field][row] = value
    with pytest.raises(StoreDamaged, match=message) as caught:
        check_index(index, GEOMETRY, SHARDS, "experts.npy")
    assert "layer" in caught.value.message


def test_bytes_that_no_record_covers_are_refused():
    shards = [SHARDS[0], SHARDS[1].model_copy(update={"bytes": SHARDS[1].bytes + SIZE})]
    with pytest.raises(StoreDamaged, match=r"b\.safetensors"):
        check_index(good_index(), GEOMETRY, shards, "experts.npy")


def test_truncated_and_foreign_files_are_refused():
    data = encode_index(good_index())
    for bad in (
        b"",
        data[:5],
        data[:60],
        data[:-1],
        data + b"\0",
        encode_index(good_index()[:4]),
        b"\x93NUMPY\x09\x00",
    ):
        with pytest.raises(StoreDamaged, match=r"experts\.npy"):
            decode_index(bad, GEOMETRY, "experts.npy")


def test_pickled_objects_are_never_loaded():
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(StoreDamaged):
        decode_index(file.getvalue(), GEOMETRY, "experts.npy")


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_never_gives_an_index_outside_the_shards(position, value):
    data = bytearray(encode_index(good_index()))
    data[position % len(data)] = value
    with contextlib.suppress(StoreDamaged):
        index = decode_index(bytes(data), GEOMETRY, "experts.npy")
        check_index(index, GEOMETRY, SHARDS, "experts.npy")
        ends = index["offset"] + index["bytes"]
        assert all(int(end) <= SHARDS[shard].bytes for end, shard in zip(ends, index["shard"], strict=True))
