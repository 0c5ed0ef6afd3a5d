"""What a daemon remembers of earlier runs, and what can be wrong with the file."""

from __future__ import annotations

import errno
import json
import os

import aiofiles.os
import numpy as np
import pytest
from structlog.testing import capture_logs

from tierd.errors import UsageError
from tierd.mirror.history import read_uses
from tierd.policy.decayed_frequency import DecayedFrequency
from tierd.policy.lru import Lru
from tierd.policy.pins import PinnedPolicy
from tierd.policy.policy import EvictionPolicy
from tierd.policy.usage import Recalls, RecordedPolicy, UsageCounts
from tierd.service.history import HistoryFile, history_path

FINGERPRINT = "f" * 64
VALUES = np.array([0.0, 3.5, 1e9, 0.25])


@pytest.fixture
def history(tmp_path):
    return HistoryFile(tmp_path / "state" / "history.json", FINGERPRINT, len(VALUES))


def of(history):
    return HistoryFile(history.path, FINGERPRINT, len(VALUES))


async def test_what_was_saved_is_loaded(history):
    assert await history.load() is None
    assert await history.save(VALUES)
    assert np.array_equal(await of(history).load(), VALUES)
    assert [path.name for path in history.path.parent.iterdir()] == ["history.json"]
    assert np.array_equal(read_uses(history.path, FINGERPRINT), VALUES), "mirror plans read it, too"


@pytest.mark.parametrize("length", [0, 1, 20, 100, -1])
async def test_a_cut_file_counts_as_none_and_is_replaced(history, length):
    await history.save(VALUES)
    whole = history.path.read_bytes()
    history.path.write_bytes(whole[:length])
    after = of(history)
    with capture_logs() as logs:
        assert await after.load() is None
    assert [log["log_level"] for log in logs] == ["warning"]
    assert await after.save(VALUES)
    assert history.path.read_bytes() == whole


@pytest.mark.parametrize(
    "raw",
    [b"\xff\x00junk", b"[]", b"3", b"{}", b"[" * 100_000, b'{"format": 1}', b'{"format": "x", "fingerprint": 1}'],
)
async def test_junk_counts_as_none(history, raw):
    await history.save(VALUES)
    history.path.write_bytes(raw)
    assert await of(history).load() is None


@pytest.mark.parametrize("change", [{"counts": [1, 2, 3, 4]}, {"counts": [1, 2]}, {"xxh3": ""}, {"counts": "abcd"}])
async def test_a_changed_value_shows(history, change):
    await history.save(VALUES)
    history.path.write_text(json.dumps(json.loads(history.path.read_bytes()) | change))
    assert await of(history).load() is None


@pytest.mark.parametrize("values", [[1.0, 2.0], [1.0, -2.0, 0.0, 0.0], [1.0, float("nan"), 0.0, 0.0]])
async def test_values_that_cannot_be_count_as_none(history, values):
    await HistoryFile(history.path, FINGERPRINT, len(values)).save(np.array(values))
    assert await history.load() is None


@pytest.mark.parametrize("change", [{"format": 2}, {"fingerprint": "another"}])
async def test_a_file_of_a_newer_version_or_another_store_is_left_alone(history, change):
    await history.save(VALUES)
    history.path.write_text(json.dumps(json.loads(history.path.read_bytes()) | change))
    before = history.path.read_bytes()
    after = of(history)
    assert await after.load() is None
    assert not await after.save(VALUES)
    assert history.path.read_bytes() == before
    assert after.keep


async def test_a_full_disk_costs_one_warning_and_keeps_the_old_file(history, monkeypatch):
    await history.save(VALUES)
    before = history.path.read_bytes()

    def full(_fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(os, "fsync", full)
        assert not await history.save(VALUES * 2)
        assert not await history.save(VALUES * 2)
    assert len(logs) == 1
    assert history.path.read_bytes() == before
    assert len(list(history.path.parent.iterdir())) == 1, "no partial file stays"
    assert await history.save(VALUES * 2)
    assert np.array_equal(await of(history).load(), VALUES * 2)


async def test_a_directory_that_cannot_be_written_costs_one_warning(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    history = HistoryFile(tmp_path / "file" / "history.json", FINGERPRINT, 4)
    with capture_logs() as logs:
        assert await history.load() is None
        assert not await history.save(VALUES)
        assert not await history.save(VALUES)
    assert len([log for log in logs if "not saved" in log["event"]]) == 1


async def test_a_file_that_is_far_too_long_is_not_read(history, monkeypatch):
    await history.save(VALUES)
    monkeypatch.setattr("tierd.service.history._MAX_BYTES", 10)
    assert await history.load() is None
    assert (await aiofiles.os.stat(history.path)).st_size > 10


def test_it_lies_beside_the_store_where_that_can_be_written(tmp_path, monkeypatch):
    store = tmp_path / "qwen"
    assert history_path(store, FINGERPRINT, None) == tmp_path / "qwen.state" / f"history-{'f' * 16}.json"
    assert history_path(store, FINGERPRINT, tmp_path / "x").parent == tmp_path / "x"
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert str(history_path(store, FINGERPRINT, None).parent) == "/state/tierd"


def test_old_uses_give_way_to_what_a_new_text_uses():
    counts = UsageCounts(40)
    for _ in range(1_000_000 // 20):
        counts.step()
        for expert in range(20):
            counts.used(expert)
    for _ in range(200 * 16):
        counts.step()
        for expert in range(20, 40):
            counts.used(expert)
    assert set(counts.hottest(20)) == set(range(20, 40))
    assert np.all(np.isfinite(counts.values()))


def test_a_steady_use_has_its_rate_and_halves_in_a_half_life():
    counts = UsageCounts(3, half_life=50)
    for _ in range(2000):
        counts.step()
        counts.used(0)
    assert counts.rates()[0] == pytest.approx(1.0, rel=0.02)
    before = counts.values()[0]
    for _ in range(50):
        counts.step()
    assert counts.values()[0] == pytest.approx(before / 2)
    assert counts.hottest(3) == [0], "what was never used is not hot"


def test_decay_goes_on_for_ever_without_overflow():
    counts = UsageCounts(2, half_life=1)
    for _ in range(3000):
        counts.step()
        counts.used(1)
    assert counts.values() == pytest.approx([0, 2])


def test_recalled_counts_are_those_that_were_saved():
    counts = UsageCounts(4)
    for _ in range(10):
        counts.step()
    counts.recall(VALUES)
    assert counts.values() == pytest.approx(VALUES)
    assert counts.hottest(2) == [2, 1]


def test_a_recorded_policy_is_the_policy_and_counts_its_uses():
    counts = UsageCounts(5)
    policy = RecordedPolicy(Lru(), counts)
    assert isinstance(policy, EvictionPolicy)
    assert policy.name == "lru"
    for step, expert in enumerate([1, 2, 1]):
        policy.visit(7, step, 0, prefill=False)
        if step < 2:
            policy.inserted(expert)
        policy.used(expert)
    assert (counts.changes, len(policy), policy.victim(lambda _: True)) == (3, 2, 2)
    assert counts.hottest(9) == [1, 2]
    policy.removed(2)
    policy.ended(7)
    policy.expected(7, np.zeros(5, np.uint8))
    assert "recorded" in repr(policy)


def test_decayed_frequency_begins_with_earlier_rates():
    policy = DecayedFrequency(half_life=64)
    assert isinstance(policy, Recalls)
    assert not isinstance(Lru(), Recalls)
    policy.recall(np.array([0.0, 0.9, 0.2]))
    for expert in (1, 2, 0):
        policy.inserted(expert)
    order = []
    while (victim := policy.victim(lambda _: True)) is not None:
        order.append(victim)
        policy.removed(victim)
    assert order == [0, 2, 1]


def pinned_lru(*residents):
    policy = PinnedPolicy(Lru())
    for expert in residents:
        policy.inserted(expert)
    return policy


def test_a_pinned_expert_leaves_last_and_only_when_nothing_else_may():
    policy = pinned_lru(1, 2, 3)
    policy.pin([1, 9])
    assert isinstance(policy, EvictionPolicy)
    policy.used(1)
    assert policy.victim(lambda _: True) == 2
    assert policy.victim(lambda expert: expert == 1) == 1
    assert len(policy) == 3
    policy.inserted(9)
    policy.removed(2)
    policy.removed(3)
    assert policy.victim(lambda _: True) == 1
    policy.removed(1)
    assert (policy.victim(lambda _: True), len(policy)) == (9, 1)
    assert set(policy.pinned) == {1, 9}


def test_what_is_unpinned_is_the_policys_again():
    policy = pinned_lru(1, 2)
    policy.pin([1, 1])
    policy.unpin([1, 5])
    policy.used(1)
    assert policy.victim(lambda _: True) == 2
    policy.removed(1)
    policy.inserted(1)
    assert len(policy) == 2
    assert "0 pinned" in repr(policy)


def test_errors_of_the_caller_are_still_named():
    policy = pinned_lru(1)
    policy.pin([1])
    with pytest.raises(UsageError, match="expert 1"):
        policy.inserted(1)
