"""How settings are tried and who wins; what is kept of it; and what a machine is limited by."""

from __future__ import annotations

import json
from random import Random

import pytest

from tierd.commands.tune import choices_of
from tierd.profiles import NodeTuned, Profile, ServeTuned, load_profile, profile_path, save_profile
from tierd.tuning.journal import Journal
from tierd.tuning.limit import ADVICE, limit_of
from tierd.tuning.sweep import Choice, Outcome, noise, sweep

FACTS = {"threads": 4, "drive_threads": 4, "slots": 25, "direct": True}


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def outcome(settings=(), seconds=(1.0, 1.01, 0.99), **facts):
    return Outcome(dict(settings), tuple(seconds), "same", FACTS | facts)


def machine(cost, *, jitter=0.0, drift=0.0):
    """A machine whose trials cost what `cost(settings)` says, and which gets slower from trial to trial."""
    rng, made = Random(3), []

    def measure(settings):
        slow = 1 + drift * len(made)
        runs = tuple(cost(settings) * slow * (1 + jitter * rng.uniform(-1, 1)) for _ in range(5))
        made.append(dict(settings))
        return outcome(settings, runs)

    return measure, made


CHOICES = (Choice("a", ({"node.a": 1}, {"node.a": 2})), Choice("b", ({"serve.b": 1},)))


def test_what_is_faster_by_more_than_the_noise_is_taken_one_choice_after_the_other():
    measure, made = machine(lambda s: 1.0 - 0.2 * (s.get("node.a") == 2) - 0.1 * ("serve.b" in s), jitter=0.01)
    result = sweep({}, lambda _first: CHOICES, measure)
    assert result.settings == {"node.a": 2, "serve.b": 1}
    assert result.outcome.median < 0.75
    assert result.default.median > 0.95
    assert made == [
        {}, {"node.a": 1}, {"node.a": 2}, {}, {"node.a": 2},
        {"node.a": 2, "serve.b": 1}, {"node.a": 2}, {"node.a": 2, "serve.b": 1},
    ]  # fmt: skip
    assert ["taken" in step for step in result.steps] == [True, True]


@pytest.mark.parametrize(("gain", "jitter"), [(0.01, 0.0), (0.05, 0.2)])
def test_what_lies_within_the_noise_changes_nothing(gain, jitter):
    measure, _ = machine(lambda s: 1.0 - gain * len(s), jitter=jitter)
    result = sweep({}, lambda _first: CHOICES, measure)
    assert result.settings == {}
    assert all("not more than the noise" in step for step in result.steps)


def test_a_drift_of_the_machine_makes_no_winner():
    measure, _ = machine(lambda _s: 1.0, drift=-0.02, jitter=0.005)
    assert sweep({}, lambda _first: CHOICES, measure).settings == {}


def test_noise_is_never_taken_as_less_than_three_percent():
    assert noise(outcome(seconds=(1.0, 1.0, 1.0))) == 0.03
    assert noise(outcome(seconds=(1.0, 2.0)), outcome(seconds=(1.0, 2.0))) == pytest.approx(2 / 3)
    assert noise(outcome(seconds=(1.0,))) == 0.03


def test_choices_are_what_the_machine_leaves_open():
    found = {choice.name: list(choice.candidates) for choice in choices_of(outcome(), 100)}
    assert found["threads"] == [{"node.threads": 2}, {"node.threads": 3}]
    assert found["drive reads at a time"] == [{"serve.drive_threads": 2}, {"serve.drive_threads": 8}]
    assert found["direct or buffered"] == [{"serve.direct": False}]
    assert found["arena"] == [{"serve.arena": "22.5%"}, {"serve.arena": "18.75%"}]
    small = {choice.name: list(choice.candidates) for choice in choices_of(outcome(threads=1, direct=False), 100)}
    assert "threads" not in small
    assert "direct or buffered" not in small
    assert {"serve.drive_threads": 128} not in [
        c for choice in choices_of(outcome(drive_threads=64), 100) for c in choice.candidates
    ]


@pytest.mark.parametrize(
    ("limit", "facts"),
    [
        ("drive", {"compute_seconds": 1.0, "wait_seconds": 3.0, "message_seconds": 0.1, "memory_seconds": 0.9}),
        ("messages", {"compute_seconds": 1.0, "wait_seconds": 3.0, "message_seconds": 2.0, "memory_seconds": 0.9}),
        ("memory", {"compute_seconds": 1.0, "wait_seconds": 0.5, "message_seconds": 0.1, "memory_seconds": 0.7}),
        ("compute", {"compute_seconds": 1.0, "wait_seconds": 0.5, "message_seconds": 0.1, "memory_seconds": 0.2}),
    ],
)
def test_the_limit_is_where_the_time_goes(limit, facts):
    assert limit_of(facts) == limit
    assert limit in ADVICE


def test_a_sweep_that_was_stopped_makes_no_trial_twice(tmp_path):
    path, sweep_facts = tmp_path / "j" / "s.json", {"store": "x", "tokens": 3}
    measure, made = machine(lambda s: 1.0 - 0.2 * (s.get("node.a") == 2))

    def run(most):
        journal = Journal(path, sweep_facts)

        def measured(settings):
            found = journal.recall(settings)
            if found is None:
                if len(made) >= most:
                    raise InterruptedError
                found = measure(settings)
                journal.add(found)
            return found

        return sweep({}, lambda _first: CHOICES, measured), journal

    for most in (1, 3):
        with pytest.raises(InterruptedError):
            run(most)
    result, journal = run(99)
    assert len(made) == len(journal) == 7
    assert result.settings == {"node.a": 2}
    assert result.outcome.facts == FACTS
    journal.forget()
    assert not path.exists()


@pytest.mark.parametrize("damage", ["junk", "another sweep", "missing part"])
def test_trials_of_another_sweep_and_damaged_ones_count_as_none(tmp_path, damage):
    path = tmp_path / "s.json"
    journal = Journal(path, {"store": "x"})
    journal.add(outcome({"node.a": 1}))
    assert len(Journal(path, {"store": "x"})) == 1
    if damage == "junk":
        path.write_bytes(b"{]")
    elif damage == "missing part":
        content = json.loads(path.read_text())
        del content["trials"][0]["digest"]
        path.write_text(json.dumps(content))
    assert len(Journal(path, {"store": "y" if damage == "another sweep" else "x"})) == 0


def test_trials_behind_one_that_was_not_asked_for_again_are_dropped(tmp_path):
    journal = Journal(tmp_path / "s.json", {})
    journal.add(outcome({"node.a": 1}))
    journal.add(outcome({"node.a": 2}))
    again = Journal(tmp_path / "s.json", {})
    assert again.recall({"node.a": 1}) is not None
    assert again.recall({"node.a": 3}) is None
    assert len(again) == 1


# Profiles.


def profile(**changes):
    facts = {
        "fingerprint": "f" * 64, "serve": ServeTuned(drive_threads=3), "node": NodeTuned(threads=2), "limit": "drive",
        "tokens_per_second": {"tuned": 2.0, "default": 1.0}, "made": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return Profile(**facts | changes)


def test_a_profile_comes_back_for_its_store_alone():
    save_profile(profile())
    assert load_profile("f" * 64) == (profile(), "")
    assert load_profile("e" * 64) == (None, "")
    profile_path("f" * 64).rename(profile_path("e" * 64))
    found, problem = load_profile("e" * 64)
    assert found is None
    assert "another store" in problem


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"format": 9}', profile().model_dump_json().replace('"drive_threads":3', '"drive_threads":0')],
)
def test_a_damaged_profile_is_told_and_not_used(content):
    save_profile(profile())
    profile_path("f" * 64).write_text(content)
    found, problem = load_profile("f" * 64)
    assert found is None
    assert "tierd tune" in problem
