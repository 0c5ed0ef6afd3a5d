"""Mirrors that a running daemon gains and loses, and its reads that follow."""

from __future__ import annotations

import json
import shutil

import pytest
from daemons import command
from sessions import RawSession

from tierd.store.synthetic import make_store

LAYERS, EXPERTS = 3, 8


@pytest.fixture
def store(tmp_path):
    return make_store(
        tmp_path / "s", layers=LAYERS, experts=EXPERTS, top_k=2, fill="pattern", record_bytes=1 << 16,
        shard_bytes=EXPERTS << 16,
    )  # fmt: skip


@pytest.fixture
def mirror(store, tmp_path):
    done = command("tierd", "mirror", "stage", store.path, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    return tmp_path / "m"


def drives(daemon):
    return {drive["name"]: drive for drive in daemon.stats()["drives"]}


def test_a_daemon_takes_up_a_mirror_reads_from_it_and_lets_it_go(serve, store, mirror):
    daemon = serve(store.path, "--arena", f"{4 * store.geometry.slot_bytes}")
    added = command("tierd", "mirror", "add", daemon.name, f"{mirror}=1000", "--json")
    assert added.returncode == 0, added.stderr
    answer = json.loads(added.stdout)
    assert (answer["ok"], answer["problems"]) == (True, [])
    assert answer["drive"]["name"] == "mirror1"
    assert answer["drive"]["directory"] == str(mirror)
    assert len(answer["drive"]["shards"]) == answer["drive"]["shards_total"] == LAYERS

    session = RawSession(daemon.address)
    session.hello(fingerprint=store.fingerprint)
    for layer in range(LAYERS):
        for pair in ([0, 1], [2, 3], [4, 5]):
            session.acquire(layer, pair)
            ready, failed = session.answers(2)
            assert (sorted(ready), failed) == (pair, {})
    served = drives(daemon)
    # The mirror was weighed a thousand times as fast.
    assert served["mirror1"]["reads"] > served["nvme"]["reads"]
    session.close()

    removed = command("tierd", "mirror", "remove", daemon.name, str(mirror))
    assert removed.returncode == 0, removed.stderr
    assert removed.stdout == "mirror1 is no longer read from\n"
    assert list(drives(daemon)) == ["nvme"]


def test_refusals_come_from_the_daemon_as_clear_errors(serve, store, tmp_path):
    daemon = serve(store.path)
    (tmp_path / "empty").mkdir()
    shutil.copytree(make_store(tmp_path / "o", layers=1, experts=2, top_k=1).path, tmp_path / "other")
    for arguments, words in [
        (("add", daemon.name, tmp_path / "empty"), "holds no copy of a shard"),
        (("add", daemon.name, tmp_path / "other"), "is of another store"),
        (("add", daemon.name, f"{tmp_path / 'empty'}=0"), "weight must be a positive number"),
        (("add", "127.0.0.1:1", tmp_path / "empty"), "over a Unix socket only"),
        (("remove", daemon.name, "nvme"), "there is no mirror nvme"),
        (("remove", daemon.name, "mirror7"), "there is no mirror mirror7"),
    ]:
        done = command("tierd", "mirror", *arguments)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_a_daemon_that_is_not_there_is_said_to_be_not_there(tmp_path):
    done = command("tierd", "mirror", "add", f"unix:{tmp_path}/none.sock", tmp_path)
    assert done.returncode == 1
    assert f"no answer from unix:{tmp_path}/none.sock" in done.stderr
