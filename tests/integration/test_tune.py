"""`tierd tune` with real daemons and nodes on the embedded model; and who uses what it found."""

from __future__ import annotations

import json

import pytest
from daemons import PROMPT
from inside import commands

from compute_node.commands import generate
from tierd.commands import tune
from tierd.profiles import NodeTuned, Profile, ServeTuned, load_profile, save_profile
from tierd.store.store import ExpertStore
from tierd.tuning.sweep import Choice


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_sweep_on_a_slow_drive_is_resumed_keeps_the_logits_and_says_that_the_drive_is_the_limit(
    embedded_store, tmp_path, monkeypatch
):
    plan = tmp_path / "slow.json"
    plan.write_text(json.dumps({"throttle": [{"bytes_per_second": 30e6}]}))
    monkeypatch.setenv("TIERD_FAULT_PLAN", str(plan))
    # Nothing to choose, so that it is two trials of the same: who wins of several is told in the unit tests.
    monkeypatch.setattr(tune, "choices_of", lambda _first, _experts: [Choice("nothing", ())])
    run = commands(tune)
    options = (embedded_store, "--arena", "20%", "--tokens", 8, "--rounds", 2, "--json")
    first = json.loads(run(*options, "--minutes", 0.01).stdout)
    assert (first["finished"], first["trials"]) == (False, 1)
    found = json.loads(run(*options).stdout)
    assert (found["finished"], found["trials"], found["limit"]) == (True, 2, "drive")
    profile, problem = load_profile(ExpertStore.open(embedded_store).fingerprint)
    assert (profile.serve.arena, problem) == ("20%", "")
    assert len(list((tmp_path / "state" / "tierd" / "tune").glob("*.npz"))) == 1


def keep(store, **serve):
    fingerprint = ExpertStore.open(store).fingerprint
    save_profile(
        Profile(
            fingerprint=fingerprint, serve=ServeTuned(**serve), node=NodeTuned(threads=1), limit="drive",
            tokens_per_second={}, made="now",
        )
    )  # fmt: skip


def test_daemons_use_a_profile_unless_something_else_is_said(serve, embedded_store):
    keep(embedded_store, drive_threads=3, arena="50%", direct=False)
    tuned = serve(embedded_store, "--history", "off").stats()
    assert (tuned["drives"][0]["threads"], tuned["drives"][0]["direct"]) == (3, False)
    assert tuned["arena"]["slots"] == 128
    said = serve(embedded_store, "--drive-threads", 2, "--arena", "25%", "--history", "off").stats()
    assert (said["drives"][0]["threads"], said["drives"][0]["direct"], said["arena"]["slots"]) == (2, False, 64)
    plain = serve(embedded_store, "--profile", "off", "--history", "off").stats()
    assert (plain["drives"][0]["direct"], plain["arena"]["slots"]) == (True, 64)


def test_nodes_use_a_profile_and_write_the_same_tokens(embedded_store, reference):
    keep(embedded_store)
    run = commands(generate)(embedded_store, "--in-process", "-p", PROMPT, "--max-tokens", 8, "--ignore-eos", "--json")
    found = json.loads(run.stdout)
    assert found["threads"] == 1
    assert found["token_ids"] == reference["token_ids"][:8]
