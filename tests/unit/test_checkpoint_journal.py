"""The journal of a conversion: what it remembers, and what it does not believe."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.checkpoint.journal import IDENTITY_FILE, LOG_FILE, Identity, Journal, read_identity, read_log, write_identity
from tierd.errors import StoreDamaged, UsageError
from tierd.store.shards import encode_header

HEADER = encode_header([("a", "F32", (3,)), ("b", "BF16", (2, 2))], alignment=8)
IDENTITY = Identity(
    {"experts": "int8"}, "0" * 64, {"config.json": "1" * 64}, {"m.safetensors": (HEADER.file_bytes, 7, HEADER)}
)


def test_an_identity_is_read_back_with_the_headers_of_the_source(tmp_path):
    assert read_identity(tmp_path) is None
    write_identity(tmp_path, IDENTITY)
    assert read_identity(tmp_path) == IDENTITY


def test_finished_shards_and_freed_files_survive_a_restart(tmp_path):
    with Journal.open(tmp_path) as journal:
        journal.finish_shard("x.safetensors", [1, (1 << 64) - 1])
        journal.note_consumed("m.safetensors")
    with Journal.open(tmp_path) as journal:
        assert journal.finished == {"x.safetensors": [1, (1 << 64) - 1]}
        assert journal.consumed == {"m.safetensors"}
        journal.finish_shard("y.safetensors", [])
    assert set(read_log(tmp_path)[0]) == {"x.safetensors", "y.safetensors"}


@given(st.integers(0, 400), st.integers(0, 255))
def test_only_the_intact_beginning_of_a_damaged_log_counts(tmp_path_factory, position, value):
    folder = tmp_path_factory.mktemp("journal")
    with Journal.open(folder) as journal:
        for number in range(4):
            journal.finish_shard(f"{number}.safetensors", [number])
    log = folder / LOG_FILE
    data = bytearray(log.read_bytes())
    data[position % len(data)] = value
    log.write_bytes(data)
    with Journal.open(folder) as journal:
        assert list(journal.finished) == [f"{number}.safetensors" for number in range(len(journal.finished))]
        assert all(journal.finished[f"{number}.safetensors"] == [number] for number in range(len(journal.finished)))
        journal.finish_shard("next.safetensors", [9])
    assert list(read_log(folder)[0])[-1] == "next.safetensors"


def test_only_one_conversion_holds_the_journal(tmp_path):
    with Journal.open(tmp_path), pytest.raises(UsageError, match="another conversion"):
        Journal.open(tmp_path)
    with Journal.open(tmp_path) as journal:
        journal.remove()
    assert not list(tmp_path.iterdir())


@given(st.integers(0, 2000), st.integers(0, 255))
def test_a_damaged_identity_is_refused_or_harmless(position, value):
    data = bytearray(IDENTITY.to_json())
    data[position % len(data)] = value
    with contextlib.suppress(StoreDamaged, UsageError):
        identity = Identity.from_json(bytes(data), "conversion.json")
        assert all(size == header.file_bytes for size, _, header in identity.files.values())


def test_a_journal_of_another_version_is_refused(tmp_path):
    table = json.loads(IDENTITY.to_json()) | {"version": 99}
    (tmp_path / IDENTITY_FILE).write_text(json.dumps(table))
    with pytest.raises(UsageError, match="another version"):
        read_identity(tmp_path)
