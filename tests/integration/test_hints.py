"""Hints of a node's client to a real daemon: read ahead of the request, and nothing is sent where all is resident."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
from daemons import eventually
from sessions import RawSession

from tierd.client.arena_source import ArenaSource
from tierd.client.source import Phase
from tierd.store.synthetic import expected_record

EXPERTS = 16


@pytest.fixture
def daemon(serve, pattern_store):
    return serve(pattern_store.path, "--arena", "50%", "--prefetch", "on", "--policy", "lru", "--history", "off")


@pytest.fixture
def source(daemon, pattern_store):
    opened = ArenaSource(daemon.address, pattern_store, name="test", numerics="exact", kernel_path="none")
    yield opened
    opened.close()


def visit(source, store, layer, experts, *, step=1, meanwhile=None):
    """Use the experts, every byte compared."""
    right = {}

    def use(expert, address):
        expected = expected_record(store.manifest, layer, expert)
        right[expert] = ctypes.string_at(address, len(expected)) == expected

    source.visit(layer, experts, use, step=step, phase=Phase.DECODE, meanwhile=meanwhile)
    assert right == dict.fromkeys(experts, True)


def landed(daemon, experts):
    return eventually(lambda: daemon.stats()["arena"]["slots_ready"] >= experts)


def test_hinted_experts_are_hits_without_a_message(daemon, source, pattern_store):
    source.hint(1, [3, 5], [0.9, 0.8], step=1, lead_seconds=0.0)
    landed(daemon, 2)
    visit(source, pattern_store, 1, [5, 3])
    assert (source.stats.messages, source.stats.hints, source.stats.outcomes["hit"]) == (0, 1, 2)
    visit(source, pattern_store, 2, [7])
    prefetch = daemon.stats()["prefetch"]
    assert (prefetch["issued"]["experts"], prefetch["used"]["experts"]) == (2, 2)
    assert prefetch["used"]["bytes"] == prefetch["issued"]["bytes"] > 0


def test_nothing_is_sent_for_what_is_resident(source, pattern_store):
    visit(source, pattern_store, 1, [3, 5])
    assert source.absent(1).tolist() == [expert not in (3, 5) for expert in range(EXPERTS)]
    source.hint(1, [3, 5], [1.0, 1.0], step=2, lead_seconds=0.1)
    assert source.stats.hints == 0


def test_the_time_until_the_first_missing_expert_comes_is_the_callers(source, pattern_store):
    called = []
    visit(source, pattern_store, 0, [1, 2], meanwhile=lambda: called.append("missing"))
    visit(source, pattern_store, 0, [1, 2], step=2, meanwhile=lambda: called.append("resident"))
    assert called == ["missing"]


def test_absurd_hints_end_no_session_and_every_expert_is_accounted_for(daemon):
    with contextlib.closing(RawSession(daemon.address)) as session:
        session.hello()
        session.send(hint={"layer": 99, "experts": [1, 2, 3]})
        session.send(hint={"layer": 1, "experts": [1, 1, 1 << 31], "probabilities": [float("nan"), 7.0, -1.0]})
        session.send(hint={"layer": 1, "experts": list(range(EXPERTS)) * 500})
        session.acquire(0, [1])
        session.answers(1)
        counts = daemon.stats()["prefetch"]
    assert counts["hinted"] == 6 + 4096 == counts["cut"] + counts["known"] + counts["issued"]["experts"]


def test_a_daemon_told_so_reads_nothing_ahead(serve, pattern_store):
    daemon = serve(pattern_store.path, "--prefetch", "off", "--history", "off")
    with contextlib.closing(RawSession(daemon.address)) as session:
        session.hello()
        session.send(hint={"layer": 1, "experts": [1, 2]})
        session.acquire(0, [1])
        session.answers(1)
        stats = daemon.stats()
    assert stats["prefetch"]["dropped"]["throttled"]["experts"] == 2
    assert stats["drives"][0]["reads"] == 1


def test_a_daemon_guesses_for_a_session_that_says_its_tokens_and_sends_no_hints(serve, pattern_store):
    daemon = serve(pattern_store.path, "--guess", "on", "--arena", "50%", "--policy", "lru", "--history", "off")
    with contextlib.closing(RawSession(daemon.address)) as session:
        session.hello()
        for step in range(40):
            token = step % 7
            session.send(step={"step": step, "tokens": [token]})
            for layer in range(4):
                session.acquire(layer, [2 * token, 2 * token + 1], step=step)
                session.answers(2)
        counts = daemon.stats()["prefetch"]
    daemon.check_sums()
    assert counts["guessed"] == counts["hinted"] > 0
    assert counts["guess_level"] == 3
    ended = sum(counts[name]["experts"] for name in ("used", "late", "wasted", "cancelled", "pending"))
    assert ended + sum(tally["experts"] for tally in counts["dropped"].values()) == counts["issued"]["experts"] > 0


def test_a_daemon_guesses_nothing_unless_it_is_told_to(daemon):
    with contextlib.closing(RawSession(daemon.address)) as session:
        session.hello()
        for step in range(10):
            session.send(step={"step": step, "tokens": [step % 2, 1 << 31]})
            session.acquire(0, [step], step=step)
            session.answers(1)
        assert daemon.stats()["prefetch"]["hinted"] == 0
