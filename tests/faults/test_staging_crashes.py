"""Staging and repair, stopped before and after every call that changes the drive: nothing half is ever in place."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tierd.devices.copies import admit_copy
from tierd.mirror.plan import mirror_files, plan_mirror
from tierd.mirror.scrub import scrub
from tierd.mirror.stage import stage
from tierd.mirror.verify import MirrorState, inspect_mirror
from tierd.store.synthetic import make_store

RECORD = 8192
CALLS = ("pwrite", "ftruncate", "fsync", "fdatasync")


class Killed(BaseException):
    """The process ends here; nothing that it would have done afterwards is done."""


class Crash:
    """Ends the process at its n-th change of the drive: before it, or after it."""

    def __init__(self, patch, at, *, after):
        self.seen = 0
        self._at = at
        self._after = after
        for name in CALLS:
            patch.setattr(os, name, self._watched(getattr(os, name)))
        patch.setattr(Path, "replace", self._watched(Path.replace))

    def _watched(self, call):
        def watched(*arguments):
            self.seen += 1
            if self.seen > self._at:
                raise Killed
            if self.seen == self._at and not self._after:
                raise Killed
            result = call(*arguments)
            if self.seen == self._at:
                raise Killed
            return result

        return watched


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(
        tmp_path_factory.mktemp("crash") / "s", layers=2, experts=3, top_k=1, hidden=16, intermediate=8,
        record_bytes=RECORD, shard_bytes=3 * RECORD, fill="pattern", config={"a": 1},
    )  # fmt: skip


@pytest.fixture
def folder_in_memory():
    """A folder whose flushes cost nothing, where the host has one; there are hundreds of them."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="tierd-", dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


def plan(store):
    return plan_mirror(mirror_files(store.manifest, store.index), budget=None, room=1 << 40)


def whole_under_final_names(store, folder):
    """Every file that has a name of the store is byte for byte the store's."""
    for path in folder.iterdir():
        original = store.path / path.name
        if original.exists():
            assert path.read_bytes() == original.read_bytes(), path.name


@pytest.mark.parametrize("after", [False, True])
def test_staging_killed_at_any_change_leaves_whole_files_only_and_goes_on(store, folder_in_memory, monkeypatch, after):
    untouched = {path.name: path.read_bytes() for path in store.path.iterdir()}
    crashes, at = 0, 0
    while True:
        at += 1
        folder = folder_in_memory / str(at)
        with monkeypatch.context() as patch:
            Crash(patch, at, after=after)
            try:
                stage(store, folder, plan(store))
            except Killed:
                crashes += 1
            else:
                break
        whole_under_final_names(store, folder)
        assert not (folder / "mirror.json").exists() or inspect_mirror(store, folder, read=True).receipt == "complete"
        copies = admit_copy(store, folder)
        assert copies.left_out == []
        report = stage(store, folder, plan(store))
        assert report.ok
        found = inspect_mirror(store, folder, read=True)
        assert (found.state, found.receipt, found.unfinished) == (MirrorState.READY, "complete", [])
        whole_under_final_names(store, folder)
        shutil.rmtree(folder)
    assert crashes > 20
    assert {path.name: path.read_bytes() for path in store.path.iterdir()} == untouched


@pytest.mark.parametrize("after", [False, True])
def test_repair_killed_at_any_change_is_done_by_the_next_one(store, folder_in_memory, monkeypatch, after):
    crashes, at = 0, 0
    while True:
        at += 1
        folder = folder_in_memory / str(at)
        stage(store, folder, plan(store))
        place = store.location(0, 1)
        bad = bytearray((folder / place.path.name).read_bytes())
        bad[place.offset + 7] ^= 1
        (folder / place.path.name).write_bytes(bad)
        os.truncate(folder / store.manifest.shards[1].file, 5000)
        with monkeypatch.context() as patch:
            Crash(patch, at, after=after)
            try:
                scrub(store, folder, sources=[store.path])
            except Killed:
                crashes += 1
            else:
                break
        again = scrub(store, folder, sources=[store.path])
        assert again.ok
        assert inspect_mirror(store, folder, read=True).state is MirrorState.READY
        whole_under_final_names(store, folder)
        shutil.rmtree(folder)
    assert crashes > 8
