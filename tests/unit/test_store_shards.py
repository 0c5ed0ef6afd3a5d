"""Safetensors headers: what is written can be read by others, and no malformed header passes."""

from __future__ import annotations

import contextlib
import json
import resource

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import StoreDamaged, UsageError
from tierd.store.shards import DTYPE_BITS, encode_header, parse_header, read_header


def shard(table, *, data=b"", length=None):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refuse(tmp_path, content):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(StoreDamaged) as caught:
        read_header(path)
    assert "bad.safetensors" in caught.value.message
    return caught.value.message


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=8
    ),
    st.sampled_from([8, 64, 4096]),
)
def test_a_written_header_is_read_back_as_it_was(tensors, alignment):
    named = [(f"t{number}", dtype, tuple(shape)) for number, (dtype, shape) in enumerate(tensors)]
    header = encode_header(named, alignment=alignment)
    assert header.header_bytes % alignment == 0
    parsed = parse_header(header.raw, header.file_bytes, "file")
    assert parsed.tensors == header.tensors
    assert [(e.name, e.dtype, e.shape) for e in header.tensors.values()] == named


def test_the_ecosystem_reads_what_is_written(tmp_path):
    header = encode_header([("a", "F32", (2, 3)), ("b", "U8", (5,))], alignment=4096)
    values = np.arange(6, dtype=np.float32)
    (tmp_path / "x.safetensors").write_bytes(header.raw + values.tobytes() + b"hello")
    loaded = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert np.array_equal(loaded["a"], values.reshape(2, 3))
    assert loaded["b"].tobytes() == b"hello"


def test_what_the_ecosystem_writes_is_read(tmp_path):
    arrays = {"a": np.zeros((3, 2), np.float16), "b": np.ones(7, np.int64), "empty": np.zeros((0, 4), np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert {name: (e.dtype, e.shape) for name, e in header.tensors.items()} == {
        "a": ("F16", (3, 2)),
        "b": ("I64", (7,)),
        "empty": ("F32", (0, 4)),
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors header"),
        (b"\x04\x00\x00", "no safetensors header"),
        (shard({}, length=0), "no safetensors header"),
        (shard({}, length=1 << 63), "beyond the limit"),
        (shard({}, length=90_000_000), "needs 90000008 bytes"),
        (shard(b"{not json"), "not JSON"),
        (shard(b"\xff\xfe{}"), "not JSON"),
        (shard(b"[" * 50_000), "not JSON"),
        (shard(b"[1, 2]"), "not a JSON object"),
        (shard({"a": 5}), "needs dtype"),
        (shard({"a": {"dtype": "U8", "shape": [4]}}), "needs dtype"),
        (shard({"a": entry(dtype="Q9")}, data=b"1234"), "unknown dtype"),
        (shard({"a": entry(dtype=["U8"])}, data=b"1234"), "unknown dtype"),
        (shard({"a": entry(shape=(-4,))}, data=b"1234"), "shape"),
        (shard({"a": entry(shape=(4.0,))}, data=b"1234"), "shape"),
        (shard({"a": entry(shape=(True,) * 4)}, data=b"1234"), "shape"),
        (shard({"a": entry(shape=(1 << 70,))}, data=b"1234"), "shape"),
        (shard({"a": entry(shape=(1,) * 40)}, data=b"1"), "shape"),
        (shard({"a": entry(offsets=(4, 0))}, data=b"1234"), "rising offsets"),
        (shard({"a": entry(offsets=(-4, 0))}, data=b"1234"), "rising offsets"),
        (shard({"a": entry(offsets=(0, 4, 8))}, data=b"1234"), "rising offsets"),
        (shard({"a": entry(shape=(5,))}, data=b"1234"), "needs 5 bytes"),
        (shard({"a": entry(shape=(1 << 40, 1 << 40))}, data=b"1234"), "needs"),
        (shard({"a": entry()}, data=b"12"), "2 bytes are missing"),
        (shard({"a": entry()}, data=b"123456"), "belong to nothing"),
        (shard({"a": entry(), "b": entry(offsets=(2, 6))}, data=b"123456"), "overlaps"),
        (shard({"a": entry(), "b": entry(offsets=(5, 9))}, data=b"123456789"), "1 unused bytes"),
        (shard(b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": 1}'), "twice"),
    ],
)
def test_malformed_headers_are_refused_by_name(tmp_path, content, message):
    assert message in refuse(tmp_path, content)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(StoreDamaged, match=r"gone\.safetensors is missing"):
        read_header(tmp_path / "gone.safetensors")


def test_a_huge_declared_header_costs_no_memory(tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refuse(tmp_path, shard({}, length=99_999_999))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["U8", "F32"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries({"dtype": json_values, "shape": json_values, "data_offsets": json_values})


@given(st.dictionaries(st.text(max_size=6), entries | json_values, max_size=4), st.integers(0, 64))
def test_any_json_is_parsed_or_refused(table, data):
    raw = shard(table)
    with contextlib.suppress(StoreDamaged):
        header = parse_header(raw, len(raw) + data, "file")
        assert max((e.end for e in header.tensors.values()), default=header.header_bytes) == header.file_bytes


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(raw):
    padded = raw.ljust(8, b"\0")
    with contextlib.suppress(StoreDamaged):
        assert parse_header(padded, len(padded), "file").file_bytes == len(padded)


def test_the_same_name_is_not_written_twice():
    with pytest.raises(UsageError, match="twice"):
        encode_header([("a", "U8", (1,)), ("a", "U8", (2,))], alignment=8)
