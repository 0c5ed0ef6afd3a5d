"""Mirrors made, killed, continued, damaged and checked, by the command line and on real files."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from daemons import eventually
from inside import commands

from tierd.commands import mirror, verify
from tierd.devices.copies import admit_copy
from tierd.errors import DriveError, LimitExceeded, UsageError
from tierd.mirror import copy as mirror_copy
from tierd.service.history import HistoryFile, history_path
from tierd.store.store import ExpertStore
from tierd.store.synthetic import make_store

RECORD = 1 << 16
SHARDS = [f"experts-0000{n}.safetensors" for n in (1, 2, 3)]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Three shards of four experts, and dense tensors of uneven sizes."""
    dense = {"a": np.arange(70_001, dtype=np.float32), "b": np.arange(13, dtype=np.uint16)}
    return make_store(
        tmp_path_factory.mktemp("original") / "s", layers=3, experts=4, top_k=2, fill="pattern",
        record_bytes=RECORD, shard_bytes=4 * RECORD, dense=dense, config={"model_type": "pattern"},
    )  # fmt: skip


@pytest.fixture
def store(original, tmp_path):
    shutil.copytree(original.path, tmp_path / "primary")
    return ExpertStore.open(tmp_path / "primary")


@pytest.fixture
def run():
    return commands(mirror, verify)


@pytest.fixture
def answer(run):
    """Run `mirror …` with --json; returns the exit code and the object."""

    def invoke(*arguments):
        result = run("mirror", *arguments, "--json")
        table = json.loads(result.stdout)
        assert table["ok"] is not bool(table["problems"])
        return result.exit_code, table

    return invoke


def flip(path, offset=-5000):
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_a_plan_says_to_type_does_what_it_planned(store, run, tmp_path):
    """Also where names have blanks and shards lie elsewhere."""
    (tmp_path / "more shards").mkdir()
    (store.path / SHARDS[1]).rename(tmp_path / "more shards" / SHARDS[1])
    options = ["--also", tmp_path / "more shards", "--reserve", "2MB", "--budget", 2**30]
    told = run("mirror", "plan", store.path, tmp_path / "the copy", *options).stdout
    program, *typed = shlex.split(told.rpartition("to do it: ")[2])
    assert program == "tierd"
    assert run(*typed).exit_code == 0
    assert all((tmp_path / "the copy" / name).exists() for name in SHARDS)


def same_files(store, folder, *more):
    ours, theirs = contents(store.path), contents(folder)
    extra = {name for name in theirs if name not in ours}
    return extra == {"mirror.json", *more} and all(theirs[name] == data for name, data in ours.items())


def test_a_staged_mirror_is_complete_and_ready_and_the_store_untouched(store, answer, tmp_path):
    before = contents(store.path)
    code, staged = answer("stage", store.path, tmp_path / "m")
    assert (code, staged["ok"], staged["kept"]) == (0, True, [])
    assert same_files(store, tmp_path / "m")
    assert contents(store.path) == before
    code, report = answer("verify", store.path, tmp_path / "m")
    assert (code, report["state"], report["receipt"], report["records"]) == (0, "ready", "complete", 12)
    assert admit_copy(store, tmp_path / "m").shards == [0, 1, 2]
    assert ExpertStore.open(tmp_path / "m").fingerprint == store.fingerprint


def test_staging_again_copies_nothing(store, answer, tmp_path):
    answer("stage", store.path, tmp_path / "m")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "m").glob("experts-*")}
    code, report = answer("stage", store.path, tmp_path / "m")
    assert (code, report["copied"], report["bytes_copied"]) == (0, [], 0)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "m").glob("experts-*")} == times


def test_a_copy_made_by_hand_is_ready_without_a_receipt(store, answer, tmp_path):
    subprocess.run(["cp", "-r", store.path, tmp_path / "m"], check=True)
    code, report = answer("verify", store.path, tmp_path / "m")
    assert (code, report["state"], report["receipt"], report["missing"]) == (0, "ready", "none", [])
    code, report = answer("stage", store.path, tmp_path / "m")
    assert (code, report["copied"]) == (0, [])


def test_one_flipped_bit_of_a_copy_made_by_hand_makes_it_not_ready(store, answer, run, tmp_path):
    shutil.copytree(store.path, tmp_path / "m")
    place = store.location(1, 2)
    flip(tmp_path / "m" / place.path.name, place.offset + 77)
    code, report = answer("verify", store.path, tmp_path / "m")
    assert (code, report["state"], report["present"]) == (1, "not ready", [SHARDS[0], SHARDS[2]])
    (problem,) = report["problems"]
    assert (problem["file"], problem["layer"], problem["expert"]) == (place.path.name, 1, 2)
    text = run("mirror", "verify", store.path, tmp_path / "m").stdout
    assert f"! {place.path.name}: layer 1 expert 2" in text
    assert answer("status", store.path, tmp_path / "m")[1]["state"] == "ready", "status reads no bytes"


def test_a_missing_shard_makes_a_copy_partial_and_is_listed(store, answer, run, tmp_path):
    shutil.copytree(store.path, tmp_path / "m")
    (tmp_path / "m" / SHARDS[1]).unlink()
    for command in ("verify", "status"):
        code, report = answer(command, store.path, tmp_path / "m")
        assert (code, report["state"], report["missing"]) == (1, "partial", [SHARDS[1]])
        assert SHARDS[1] in run("mirror", command, store.path, tmp_path / "m").stdout
    answer("stage", store.path, tmp_path / "m")
    assert answer("verify", store.path, tmp_path / "m")[1]["state"] == "ready"


@pytest.mark.parametrize("cut", [1, 4096, 100_000])
def test_a_truncated_shard_is_named_with_the_missing_bytes(store, answer, tmp_path, cut):
    shutil.copytree(store.path, tmp_path / "m")
    path = tmp_path / "m" / SHARDS[2]
    os.truncate(path, path.stat().st_size - cut)
    code, report = answer("status", store.path, tmp_path / "m")
    assert (code, report["state"]) == (1, "not ready")
    assert f"{cut} bytes are missing" in report["problems"][0]["reason"]
    assert answer("stage", store.path, tmp_path / "m")[1]["copied"] == [SHARDS[2]]
    assert answer("verify", store.path, tmp_path / "m")[1]["state"] == "ready"


def test_a_mirror_within_a_budget_holds_the_hottest_shards_and_is_content(store, answer, tmp_path):
    uses = [0, 0, 0, 0, 1, 1, 1, 1, 5, 5, 5, 5]
    (tmp_path / "uses.json").write_text(json.dumps(uses))
    options = ["--budget", "700kB", "--history", tmp_path / "uses.json"]
    code, plan = answer("plan", store.path, tmp_path / "m", *options)
    assert code == 0
    assert not (tmp_path / "m").exists()
    experts = [row["file"] for row in plan["files"] if row["kind"] == "experts"]
    assert (experts, plan["partial"]) == ([SHARDS[2], SHARDS[1]], True)
    assert plan["bytes"] <= plan["budget_bytes"] == 700_000
    assert plan["share_of_uses"] == pytest.approx(1.0)
    assert answer("stage", store.path, tmp_path / "m", *options)[0] == 0
    code, report = answer("verify", store.path, tmp_path / "m")
    assert (code, report["state"], report["missing"]) == (0, "partial", [SHARDS[0]])
    assert admit_copy(store, tmp_path / "m").shards == [1, 2]
    # More budget later: only what is missing is copied.
    assert answer("stage", store.path, tmp_path / "m")[1]["copied"] == [SHARDS[0], "dense-00001.safetensors"]
    assert answer("verify", store.path, tmp_path / "m")[1]["state"] == "ready"


async def test_what_daemons_recorded_decides_what_is_hottest(store, answer, tmp_path):
    uses = np.array([0, 0, 0, 0, 9, 9, 9, 9, 1, 1, 1, 1], dtype=np.float64)
    file = HistoryFile(history_path(store.path, store.fingerprint, None), store.fingerprint, 12)
    assert await file.save(uses)
    plan = answer("plan", store.path, tmp_path / "m")[1]
    experts = [row["file"] for row in plan["files"] if row["kind"] == "experts"]
    assert experts == [SHARDS[1], SHARDS[2], SHARDS[0]]
    file.path.write_text("damaged")
    plan = answer("plan", store.path, tmp_path / "m")[1]
    assert [row["file"] for row in plan["files"] if row["kind"] == "experts"] == SHARDS


def test_linked_files_become_real_files(store, answer, tmp_path):
    linked, blobs = tmp_path / "linked", tmp_path / "blobs"
    linked.mkdir()
    blobs.mkdir()
    for number, path in enumerate(sorted(store.path.iterdir())):
        shutil.move(path, blobs / str(number))
        (linked / path.name).symlink_to(f"../blobs/{number}")
    assert answer("stage", linked, tmp_path / "m")[0] == 0
    assert not any(path.is_symlink() for path in (tmp_path / "m").iterdir())
    shutil.rmtree(blobs)
    assert ExpertStore.open(tmp_path / "m").fingerprint == store.fingerprint


def test_a_dangling_link_is_named(store, answer, tmp_path):
    shutil.copytree(store.path, tmp_path / "m")
    (tmp_path / "m" / SHARDS[0]).unlink()
    (tmp_path / "m" / SHARDS[0]).symlink_to("nowhere")
    code, report = answer("verify", store.path, tmp_path / "m")
    assert (code, report["missing"]) == (1, [SHARDS[0]])
    assert "is a link to nowhere" in report["problems"][0]["reason"]
    assert answer("stage", store.path, tmp_path / "m")[1]["copied"] == [SHARDS[0]]
    assert not (tmp_path / "m" / SHARDS[0]).is_symlink()


def test_a_link_to_the_store_itself_is_no_mirror_and_staging_never_writes_through_it(store, answer, tmp_path):
    before = contents(store.path)
    (tmp_path / "m").mkdir()
    for name in SHARDS:
        (tmp_path / "m" / name).symlink_to(store.path / name)
    code, report = answer("status", store.path, tmp_path / "m")
    assert (code, report["state"]) == (1, "not ready")
    assert "the store's own file" in report["problems"][0]["reason"]
    (tmp_path / "m" / (SHARDS[0] + ".partial")).symlink_to(store.path / SHARDS[0])
    with pytest.raises(DriveError, match=r"experts-00001\.safetensors\.partial"):
        answer("stage", store.path, tmp_path / "m")
    (tmp_path / "m" / (SHARDS[0] + ".partial")).unlink()
    assert answer("stage", store.path, tmp_path / "m")[0] == 0
    assert contents(store.path) == before
    assert answer("verify", store.path, tmp_path / "m")[1]["state"] == "ready"


def test_the_store_itself_another_store_and_a_file_are_refused(store, run, tmp_path):
    other = make_store(tmp_path / "other", layers=1, experts=2, top_k=1)
    shutil.copytree(other.path, tmp_path / "m")
    (tmp_path / "link").symlink_to(store.path)
    (tmp_path / "file").write_text("")
    for command in ("plan", "stage", "verify", "status"):
        for folder, message in [
            (store.path, "is the store itself"),
            (tmp_path / "link", "is the store itself"),
            (tmp_path / "m", "copy of another store"),
            (tmp_path / "file", "not a directory"),
        ]:
            with pytest.raises(UsageError, match=message):
                run("mirror", command, store.path, folder)


def test_a_strangers_file_is_not_replaced(store, answer, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / SHARDS[1]).write_text("mine")
    (tmp_path / "m" / "notes.txt").write_text("mine, too")
    code, report = answer("stage", store.path, tmp_path / "m")
    assert code == 1
    assert [problem["file"] for problem in report["problems"]] == [SHARDS[1]]
    assert (tmp_path / "m" / SHARDS[1]).read_text() == "mine"
    assert (tmp_path / "m" / "notes.txt").read_text() == "mine, too"
    assert not (tmp_path / "m" / "mirror.json").exists()


def test_a_bad_record_of_the_store_is_not_copied_and_the_rest_is(store, answer, tmp_path):
    place = store.location(0, 1)
    flip(place.path, place.offset)
    code, report = answer("stage", store.path, tmp_path / "m")
    assert code == 1
    assert [problem["file"] for problem in report["problems"]] == [SHARDS[0]]
    assert "layer 0 expert 1" in report["problems"][0]["reason"]
    assert not (tmp_path / "m" / SHARDS[0]).exists()
    assert not (tmp_path / "m" / "mirror.json").exists()
    assert admit_copy(store, tmp_path / "m").shards == [1, 2]


def stage_slowly(store, folder, *options):
    command = [sys.executable, "-m", "tierd", "mirror", "stage", store.path, folder, "--rate", "200kB", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(path, size=0):
    eventually(lambda: path.exists() and path.stat().st_size >= size)


def test_killed_in_the_middle_nothing_half_is_in_place_and_the_next_run_goes_on(store, answer, tmp_path):
    folder = tmp_path / "m"
    process = stage_slowly(store, folder)
    wait_for(folder / (SHARDS[1] + ".partial"), 4096 + RECORD)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.communicate()
    assert (folder / SHARDS[0]).read_bytes() == (store.path / SHARDS[0]).read_bytes()
    assert not (folder / SHARDS[1]).exists()
    assert not (folder / "mirror.json").exists()
    code, report = answer("status", store.path, folder)
    assert (code, report["state"], report["receipt"]) == (0, "partial", "staging")
    assert report["unfinished"] == [SHARDS[1] + ".partial"]
    assert admit_copy(store, folder).shards == [0]
    first = (folder / SHARDS[0]).stat().st_mtime_ns
    assert answer("stage", store.path, folder)[0] == 0
    assert (folder / SHARDS[0]).stat().st_mtime_ns == first
    assert same_files(store, folder)


def test_the_good_start_of_an_unfinished_file_is_kept_and_a_bad_one_written_again(store, answer, tmp_path):
    folder, data = tmp_path / "m", (store.path / SHARDS[0]).read_bytes()
    answer("stage", store.path, folder)
    shard = store.manifest.shards[0]
    for bad in (None, 100, shard.header_bytes + 5, shard.header_bytes + RECORD + 5):
        start = bytearray(data[: shard.header_bytes + 2 * RECORD + 999])
        if bad is not None:
            start[bad] ^= 1
        (folder / SHARDS[0]).unlink()
        (folder / (SHARDS[0] + ".partial")).write_bytes(start)
        assert answer("stage", store.path, folder)[1]["copied"] == [SHARDS[0]]
        assert (folder / SHARDS[0]).read_bytes() == data


def test_two_stagings_of_one_mirror_do_not_meet(store, run, tmp_path):
    folder = tmp_path / "m"
    process = stage_slowly(store, folder)
    try:
        wait_for(folder / (SHARDS[0] + ".partial"))
        with pytest.raises(UsageError, match="another staging"):
            run("mirror", "stage", store.path, folder)
    finally:
        process.kill()
        process.communicate()


def test_a_full_drive_stops_staging_with_a_clear_error_and_it_goes_on_later(store, answer, run, tmp_path, monkeypatch):
    folder = tmp_path / "m"
    write, left = os.pwrite, [5 * RECORD]

    def full(fd, data, offset):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, offset)

    monkeypatch.setattr(mirror_copy.os, "pwrite", full)
    with pytest.raises(DriveError, match=r"experts-00002\.safetensors\.partial.*No space left") as caught:
        run("mirror", "stage", store.path, folder)
    assert "goes on where it stopped" in caught.value.hint
    monkeypatch.undo()
    report = answer("stage", store.path, folder)[1]
    assert (report["ok"], SHARDS[0] in report["kept"]) == (True, True)


def test_room_is_checked_before_each_file(store, run, tmp_path, monkeypatch):
    monkeypatch.setattr("tierd.mirror.stage.free_bytes", lambda _: 1000)
    with pytest.raises(LimitExceeded, match=r"experts-00001\.safetensors needs .* are free"):
        run("mirror", "stage", store.path, tmp_path / "m")


@pytest.mark.parametrize("text", ["", "[]", '{"version": 9}', '{"version": 1, "files": []}'])
def test_a_damaged_receipt_is_a_problem_and_not_a_crash(store, answer, tmp_path, text):
    answer("stage", store.path, tmp_path / "m")
    (tmp_path / "m" / "mirror.json").write_text(text)
    code, report = answer("verify", store.path, tmp_path / "m")
    assert (code, [problem["file"] for problem in report["problems"]]) == (1, ["mirror.json"])
    assert report["present"] == SHARDS


def test_a_file_that_changed_after_its_receipt_is_checked_again(store, answer, tmp_path):
    folder = tmp_path / "m"
    answer("stage", store.path, folder)
    flip(folder / SHARDS[1])
    assert answer("stage", store.path, folder)[1]["copied"] == [SHARDS[1]]
    assert same_files(store, folder)


def test_staging_in_a_pipe_says_what_it_does(store, tmp_path):
    command = [sys.executable, "-m", "tierd", "mirror", "stage", store.path, tmp_path / "m"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "3 of 3 expert shards" in done.stdout
    assert "ok: 7 files copied" in done.stdout
    assert done.stderr == ""
