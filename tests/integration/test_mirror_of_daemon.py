"""Mirrors that a running daemon gains and loses, and its reads that follow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from daemons import command, eventually, on_loop
from sessions import RawSession
from typer.testing import CliRunner

from tierd.addresses import Address
from tierd.client.daemon_mirrors import add_mirror, remove_mirror
from tierd.commands import mirror as mirror_commands
from tierd.errors import DaemonUnavailable, LimitExceeded, UsageError
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

    def mirror_is_ahead():
        for layer in range(LAYERS):
            for pair in ([0, 1], [2, 3], [4, 5]):
                session.acquire(layer, pair)
                ready, failed = session.answers(2)
                assert (sorted(ready), failed) == (pair, {})
        served = drives(daemon)
        return served["mirror1"]["reads"] > served["nvme"]["reads"]

    # The mirror was weighed a thousand times as fast; one slow moment of it may send some reads elsewhere.
    eventually(mirror_is_ahead, 30)
    session.close()

    removed = command("tierd", "mirror", "remove", daemon.name, str(mirror))
    assert removed.returncode == 0, removed.stderr
    assert removed.stdout == "mirror1 is no longer read from\n"
    assert list(drives(daemon)) == ["nvme"]


def read_all(session):
    """Every expert, through the session; each must come."""
    for layer in range(LAYERS):
        for pair in range(0, EXPERTS, 2):
            session.acquire(layer, [pair, pair + 1])
            ready, failed = session.answers(2)
            assert (sorted(ready), failed) == ([pair, pair + 1], {})


def whole_shards(folder):
    return {path.name for path in folder.glob("experts-*.safetensors")}


def offered_by(daemon, folder):
    """Names of the shards that the daemon reads from a mirror which it is told to look at now."""
    return set(on_loop(add_mirror(daemon.address, folder, 1.0))["shards"])


def test_a_mirror_offers_whole_files_only_while_it_is_staged_and_after_that_was_killed(serve, store, tmp_path):
    daemon, folder = serve(store.path, "--arena", f"{4 * store.geometry.slot_bytes}"), tmp_path / "m"
    session = RawSession(daemon.address)
    session.hello(fingerprint=store.fingerprint)
    stage = [sys.executable, "-m", "tierd", "mirror", "stage", str(store.path), str(folder), "--rate", "600KB"]
    with subprocess.Popen(stage, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as staging:
        try:
            eventually(lambda: 1 <= len(whole_shards(folder)) < LAYERS and list(folder.glob("experts-*.partial")), 30)
            before = whole_shards(folder)
            offered = offered_by(daemon, folder)
            assert before <= offered <= whole_shards(folder)
            read_all(session)
        finally:
            staging.kill()
    assert offered_by(daemon, folder) == whole_shards(folder)
    read_all(session)
    assert command("tierd", "mirror", "stage", store.path, folder).returncode == 0
    assert len(offered_by(daemon, folder)) == LAYERS
    read_all(session)
    assert drives(daemon)["mirror1"]["errors"] == 0
    session.close()


def test_refusals_of_the_daemon_say_why(serve, store, tmp_path):
    daemon = serve(store.path)
    (tmp_path / "empty").mkdir()
    shutil.copytree(make_store(tmp_path / "o", layers=1, experts=2, top_k=1).path, tmp_path / "other")
    for call, words in [
        (add_mirror(daemon.address, tmp_path / "empty", 1.0), "holds no copy of a shard"),
        (add_mirror(daemon.address, tmp_path / "other", 1.0), "is of another store"),
        (add_mirror(daemon.address, Path("relative"), 1.0), "give the whole path"),
        (remove_mirror(daemon.address, "nvme"), "there is no mirror nvme"),
        (remove_mirror(daemon.address, "mirror7"), "there is no mirror mirror7"),
    ]:
        with pytest.raises(LimitExceeded, match=words) as caught:
            on_loop(call)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "unix:/x", "/m=0"), "weight must be a positive number"),
        (("add", "127.0.0.1:1", "/m"), "over a Unix socket only"),
        (("remove", "127.0.0.1:1", "/m"), "over a Unix socket only"),
        (("add", "nonsense", "/m"), "HOST:PORT"),
    ],
)
def test_wrong_use_is_refused_before_anybody_is_asked(arguments, words):
    app = typer.Typer()
    mirror_commands.register(app)
    result = CliRunner().invoke(app, ["mirror", *arguments])
    assert isinstance(result.exception, UsageError)
    assert words in str(result.exception)


def test_a_daemon_that_is_not_there_is_said_to_be_not_there(tmp_path):
    with pytest.raises(DaemonUnavailable, match=f"no answer from unix:{tmp_path}/none.sock"):
        on_loop(add_mirror(Address(path=tmp_path / "none.sock"), tmp_path, 1.0))
