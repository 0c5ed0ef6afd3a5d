"""A verification that was interrupted goes on where it stopped, and believes nothing that may have changed."""

from __future__ import annotations

import os

import pytest

from tierd.store.synthetic import make_store
from tierd.store.verification import verify_store


class Interruption(Exception):
    pass


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "s", layers=2, experts=4, top_k=1, fill="pattern", shard_bytes=25_000)


@pytest.fixture
def interrupted(store, tmp_path):
    """Stop a verification inside the third shard; returns the folder of its notes."""
    third = store.manifest.shards[2].file

    def stop(_done, _total, file):
        if file == third:
            raise Interruption

    with pytest.raises(Interruption):
        verify_store(store.path, stop, notes_folder=tmp_path / "notes")
    return tmp_path / "notes"


def flip_last_byte(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0] ^ 1
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte]))


def test_the_next_run_reads_only_the_rest(store, interrupted):
    files = []
    report = verify_store(store.path, lambda _d, _t, file: files.append(file), notes_folder=interrupted)
    whole = verify_store(store.path)
    first = sum(shard.bytes - shard.header_bytes for shard in store.manifest.shards[:2])
    assert report.bytes_before == first
    assert (report.records, report.bytes_read, report.problems) == (whole.records, whole.bytes_read, [])
    assert files.count(store.manifest.shards[0].file) == 1
    assert files.count(store.manifest.shards[3].file) > 1


def test_notes_are_gone_when_the_verification_is_complete(store, interrupted):
    verify_store(store.path, notes_folder=interrupted)
    assert not list(interrupted.iterdir())


def test_a_shard_that_changed_is_read_again(store, interrupted):
    flip_last_byte(store.path / store.manifest.shards[0].file)
    report = verify_store(store.path, notes_folder=interrupted)
    assert [problem.file for problem in report.problems] == [store.manifest.shards[0].file]


def test_problems_of_the_interrupted_run_are_not_forgotten(store, tmp_path):
    flip_last_byte(store.path / store.manifest.shards[0].file)
    third = store.manifest.shards[2].file

    def stop(_done, _total, file):
        if file == third:
            raise Interruption

    with pytest.raises(Interruption):
        verify_store(store.path, stop, notes_folder=tmp_path / "notes")
    report = verify_store(store.path, notes_folder=tmp_path / "notes")
    assert report.bytes_before
    assert report.problems == verify_store(store.path).problems
    assert len(report.problems) == 1


def test_old_notes_are_not_believed(store, interrupted):
    assert verify_store(store.path, notes_folder=interrupted, max_notes_age=0.0).bytes_before == 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 1, "fingerprint": "x", "shards": []}'])
def test_damaged_notes_are_ignored(store, interrupted, text):
    (notes,) = interrupted.iterdir()
    notes.write_text(text)
    report = verify_store(store.path, notes_folder=interrupted)
    assert report.ok
    assert report.bytes_before == 0


def test_a_folder_that_cannot_be_written_does_not_stop_the_verification(store, tmp_path):
    (tmp_path / "file").write_text("")
    assert verify_store(store.path, notes_folder=tmp_path / "file" / "notes").ok
