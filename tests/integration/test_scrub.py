"""Scrubbing finds what nobody has read for long; repair writes only what was asked for, and only right bytes."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from daemons import command, eventually
from inside import commands
from sessions import RawSession

from tierd.client.daemon_scrub import watch_scrub
from tierd.client.loop_thread import LoopThread
from tierd.commands import mirror, scrub
from tierd.errors import SessionRefused, UsageError
from tierd.store.synthetic import expected_record, make_store

RECORD = 1 << 16
SHARDS = [f"experts-0000{n}.safetensors" for n in (1, 2, 3)]


@pytest.fixture
def store(tmp_path):
    return make_store(
        tmp_path / "s", layers=3, experts=4, top_k=2, fill="pattern", record_bytes=RECORD, shard_bytes=4 * RECORD
    )


@pytest.fixture
def run():
    return commands(scrub, mirror)


@pytest.fixture
def copy(store, run, tmp_path):
    """A staged mirror."""
    run("mirror", "stage", store.path, tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def answer(run):
    def invoke(*arguments):
        result = run("scrub", *arguments, "--json")
        table = json.loads(result.stdout)
        assert table["ok"] is not bool(table["problems"])
        assert result.exit_code == (0 if table["ok"] else 1)
        return table

    return invoke


def damage(path, place, nbytes=10):
    with path.open("r+b") as file:
        file.seek(place.offset + 500)
        file.write(bytes(nbytes))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_good_directory_is_read_and_left_alone(store, copy, answer):
    before = files(copy)
    report = answer(copy)
    assert (report["ok"], report["shards"], report["records"]) == (True, 3, 12)
    assert report["bytes_read"] == 12 * RECORD
    assert files(copy) == before
    assert answer(store.path)["ok"]


def test_a_bad_record_is_reported_and_written_again_only_on_request(store, copy, answer, run):
    place = store.location(1, 2)
    damage(copy / place.path.name, place)
    damaged = files(copy)
    text = run("scrub", copy).stdout
    assert f"! {place.path.name}: layer 1 expert 2" in text
    assert f"tierd scrub --repair {copy}" in text
    assert files(copy) == damaged
    original = files(store.path)
    report = answer(copy, "--repair")
    assert [(p["file"], p["layer"], p["expert"]) for p in report["repaired"]] == [(place.path.name, 1, 2)]
    assert {name: files(copy)[name] for name in SHARDS} == {name: original[name] for name in SHARDS}
    assert files(store.path) == original
    assert answer(copy)["ok"]
    status = json.loads(run("mirror", "stage", store.path, copy, "--json").stdout)
    assert status["copied"] == [], "the receipt vouches for the repaired file"


@pytest.mark.parametrize("spoil", ["cut", "header"])
def test_a_cut_or_foreign_file_is_copied_anew(store, copy, answer, spoil):
    path = copy / SHARDS[0]
    if spoil == "cut":
        os.truncate(path, path.stat().st_size - RECORD - 1)
    else:
        with path.open("r+b") as file:
            file.seek(9)
            file.write(b"????")
    assert not answer(copy)["ok"]
    assert answer(copy, "--repair")["ok"]
    assert path.read_bytes() == (store.path / SHARDS[0]).read_bytes()


def test_a_record_that_is_bad_everywhere_stays_reported_and_is_not_overwritten(store, copy, answer):
    place = store.location(0, 0)
    damage(copy / SHARDS[0], place, 10)
    damage(store.path / SHARDS[0], place, 20)
    before = (copy / SHARDS[0]).read_bytes()
    report = answer(copy, "--repair")
    assert [problem["reason"].split(":")[0] for problem in report["problems"]][1] == "not repaired"
    assert (copy / SHARDS[0]).read_bytes() == before


def test_a_second_source_serves_where_the_first_is_bad(store, copy, answer, tmp_path):
    shutil.copytree(store.path, tmp_path / "third")
    place = store.location(2, 1)
    damage(copy / place.path.name, place)
    damage(store.path / place.path.name, place)
    assert answer(copy, "--repair", "--from", store.path, "--from", tmp_path / "third")["ok"]
    assert not answer(store.path)["ok"], "the first source was not touched"
    assert answer(store.path, "--repair", "--from", copy)["ok"]


def test_a_linked_file_is_not_written_through(store, copy, answer, tmp_path):
    shutil.copy(copy / SHARDS[0], tmp_path / "elsewhere")
    (copy / SHARDS[0]).unlink()
    (copy / SHARDS[0]).symlink_to(tmp_path / "elsewhere")
    damage(tmp_path / "elsewhere", store.location(0, 1))
    before = (tmp_path / "elsewhere").read_bytes()
    assert "cannot be written" in answer(copy, "--repair")["problems"][1]["reason"]
    assert (tmp_path / "elsewhere").read_bytes() == before


def test_wrong_use_is_refused(store, copy, run, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copytree(store.path, tmp_path / "hand")
    for arguments, words in [
        ((tmp_path / "empty",), "nothing says what its bytes should be"),
        ((tmp_path / "none",), "is not a directory"),
        ((tmp_path / "hand", "--repair"), "does not say where good copies are"),
        ((copy, "--repair", "--from", copy), "is no other directory"),
        ((copy, "--from", store.path), "goes with --repair"),
        (("unix:/x", "--repair"), "go with a directory"),
        ((copy, "--rate", "fast"), "--rate"),
    ]:
        with pytest.raises(UsageError, match=words):
            run("scrub", *arguments)


def test_a_daemon_scrubs_all_its_drives_and_then_avoids_the_bad_record(serve, store, copy):
    place = store.location(1, 2)
    damage(copy / place.path.name, place)
    daemon = serve(store.path, "--mirror", f"{copy}=1000", "--arena", str(4 * RECORD))
    done = command("tierd", "scrub", daemon.name, "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    (problem,) = report["problems"]
    assert (problem["drive"], problem["file"]) == ("mirror1", str(copy / place.path.name))
    assert (problem["layer"], problem["expert"], problem["offset"]) == (1, 2, place.offset)
    assert report["records"] == 24
    (event,) = eventually(lambda: [e for e in daemon.events if e["event"] == "scrub found a bad copy"])
    assert f"tierd scrub {copy} --repair" in event["advice"]

    session = RawSession(daemon.address)
    session.hello(fingerprint=store.fingerprint)
    session.acquire(1, [2])
    ready, failed = session.answers(1)
    assert (list(ready), failed) == ([2], {})
    drives = {drive["name"]: drive for drive in daemon.stats()["drives"]}
    assert (drives["nvme"]["reads"], drives["mirror1"]["checksum_failures"]) == (1, 0)
    session.close()


def test_one_scrub_at_a_time_and_it_ends_with_its_watcher(serve, store):
    daemon = serve(store.path)

    async def first_message(rate):
        watching = watch_scrub(daemon.address, rate)
        try:
            return await anext(watching)
        finally:
            await watching.aclose()

    async def two():
        slow = watch_scrub(daemon.address, RECORD)
        await anext(slow)
        with pytest.raises(SessionRefused, match="running already"):
            await first_message(0)
        await slow.aclose()

    def on_loop(work):
        return LoopThread.shared().run(work, seconds=20.0, what="a test's call")

    def ended():
        try:
            return on_loop(first_message(1 << 30))
        except SessionRefused:
            return None

    on_loop(two())
    assert eventually(ended).bytes_total == sum(shard.bytes for shard in store.manifest.shards)


def test_the_bytes_of_a_repaired_record_are_the_converted_ones(store, copy, answer):
    place = store.location(2, 3)
    damage(copy / place.path.name, place)
    answer(copy, "--repair")
    data = (copy / place.path.name).read_bytes()
    assert data[place.offset : place.offset + place.nbytes] == expected_record(store.manifest, 2, 3)
