"""Sessions with a real daemon: many clients in a tiny arena, counting, and going on after a loss."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter

import pytest
from daemons import eventually
from sessions import RawSession

from tierd.api import session_pb2 as pb
from tierd.client.arena_source import ArenaSource
from tierd.client.source import Phase
from tierd.store.synthetic import expected_record


@pytest.fixture
def session():
    opened = []

    def open_session(daemon, **hello):
        raw = RawSession(daemon.address)
        opened.append(raw)
        raw.welcome = raw.hello(**hello)
        return raw

    yield open_session
    for raw in opened:
        raw.close()


@pytest.fixture(scope="module")
def daemon(serve_module, pattern_store):
    """For tests that leave no session behind and look at differences."""
    return serve_module(pattern_store.path, "--arena", 2 * pattern_store.geometry.slot_bytes)


def source_of(daemon, store, name="test", **options):
    return ArenaSource(daemon.address, store, name=name, numerics="exact", kernel_path="none", **options)


class Checker:
    """Visits layers and compares every byte of every expert that it is given."""

    def __init__(self, source, store):
        self.source = source
        self.manifest = store.manifest
        self.wrong = Counter()
        self.seen = Counter()
        self.step = 0

    def visit(self, layer, experts):
        def use(expert, address):
            expected = expected_record(self.manifest, layer, expert)
            right = ctypes.string_at(address, len(expected)) == expected
            self.wrong[layer, expert] = not right  # the last use counts: earlier ones were discarded
            self.seen[layer, expert] += 1

        self.step += 1
        self.source.visit(layer, experts, use, step=self.step, phase=Phase.DECODE)


@pytest.mark.parametrize("arena", ["2 slots", "25%", "100%"])
def test_four_clients_asking_for_whole_layers_all_finish_with_every_byte_right(serve, pattern_store, arena):
    geometry = pattern_store.geometry
    daemon = serve(pattern_store.path, "--arena", 2 * geometry.slot_bytes if arena == "2 slots" else arena)
    checkers, failures = [], []

    def run(checker, start):
        try:
            for layer in range(4):
                order = [(start + 5 * number) % 16 for number in range(16)]
                checker.visit((layer + start) % 4, order)
        except Exception as error:  # noqa: BLE001, reported by the main thread
            failures.append(error)

    threads = []
    for number in range(4):
        checkers.append(Checker(source_of(daemon, pattern_store, f"client {number}"), pattern_store))
        threads.append(threading.Thread(target=run, args=(checkers[-1], number)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    for checker in checkers:
        assert len(checker.seen) == 64
        assert not any(checker.wrong.values())
        assert checker.source.stats.requested == 64
        checker.source.close()
    counted = eventually(lambda: (s := daemon.stats())["requests"]["pending"] == 0 and s)
    asked, drive = counted["requests"], counted["drives"][0]
    assert asked["requests"] == 4 * 64
    assert asked["requests"] == asked["hits"] + asked["misses"] + asked["joined"]
    assert drive["bytes"] == drive["reads"] * geometry.slot_bytes
    assert counted["arena"]["slots_granted"] == 0
    if arena == "100%":
        assert drive["reads"] == 64


def test_a_cold_expert_wanted_by_two_nodes_is_read_once(serve, pattern_store, session):
    daemon = serve(pattern_store.path, "--arena", "100%")
    one, two = session(daemon), session(daemon)
    for layer in range(4):
        one.acquire(layer, list(range(16)))
        two.acquire(layer, list(range(15, -1, -1)))
        first, _ = one.answers(16)
        second, _ = two.answers(16)
        assert {e: r.word for e, r in first.items()} == {e: r.word for e, r in second.items()}
    counted = daemon.stats()
    assert counted["drives"][0]["reads"] == 64
    assert counted["requests"]["misses"] == 64
    assert counted["requests"]["joined"] + counted["requests"]["hits"] == 64


def test_an_acquire_ends_the_grants_of_the_one_before_and_release_ends_the_last(daemon, session):
    eventually(lambda: not daemon.stats()["sessions"])
    raw = session(daemon)
    raw.acquire(0, [1, 2])
    raw.answers(2)
    assert daemon.stats()["sessions"][0]["grants"] == 2
    last = raw.acquire(1, [3])
    raw.answers(1)
    assert daemon.stats()["sessions"][0]["grants"] == 1
    raw.send(release=pb.Release(acquire_id=last - 1))  # ended already: changes nothing
    raw.send(release=pb.Release(acquire_id=last))
    eventually(lambda: daemon.stats()["sessions"][0]["grants"] == 0)


def test_a_waiting_acquire_can_be_cancelled_and_runs_into_its_deadline(daemon, session):
    eventually(lambda: not daemon.stats()["sessions"])
    before = daemon.stats()["requests"]
    holder, waiter = session(daemon), session(daemon)
    holder.acquire(0, [0, 1])
    holder.answers(2)
    waiting = waiter.acquire(0, [2, 3])
    waiter.send(cancel=pb.Cancel(acquire_id=waiting))
    _, failed = waiter.answers(2)
    assert {f.reason for f in failed.values()} == {pb.REASON_CANCELLED}
    waiter.acquire(0, [2, 3], deadline_ms=50)
    _, failed = waiter.answers(2)
    assert {f.reason for f in failed.values()} == {pb.REASON_DEADLINE_EXCEEDED}
    assert "room in the arena" in failed[2].detail
    asked = {name: count - before[name] for name, count in daemon.stats()["requests"].items()}
    assert (asked["requests"], asked["hits"] + asked["misses"]) == (6, 2)
    assert (asked["cancelled"], asked["failed"]) == (2, 2)


def test_a_session_that_goes_on_learns_which_acquire_was_counted_last(daemon, session):
    first = session(daemon)
    assert first.welcome.last_acquire_id == 0
    first.acquire(0, [1])
    first.answers(1)
    first.acquire(0, [2])
    first.answers(1)
    second = session(daemon, resumes=first.welcome.attach_token)
    assert second.welcome.last_acquire_id == 2
    code, detail = first.status()
    assert code.name == "UNAVAILABLE"
    assert "another session" in detail
    second.close()
    eventually(lambda: not daemon.stats()["sessions"])
    assert session(daemon, resumes=second.welcome.attach_token).welcome.last_acquire_id == 0
    assert session(daemon, resumes=first.welcome.attach_token).welcome.last_acquire_id == 2
    assert session(daemon, resumes=b"nobody's").welcome.last_acquire_id == 0


def test_an_acquire_lost_with_its_session_is_counted_once(daemon, pattern_store):
    eventually(lambda: not daemon.stats()["sessions"])
    before = daemon.stats()["requests"]
    lines = []
    source = source_of(daemon, pattern_store, tell=lines.append)
    checker = Checker(source, pattern_store)
    checker.visit(0, [0, 1])
    # The stream ends between two layers, as after a pause of the node: the next acquire was never sent.
    source._loop.run(source._attached.link.close(), seconds=60, what="closing")
    checker.visit(1, [0, 1, 2])
    # It ends while an acquire waits for room: that one was counted.
    holder = RawSession(daemon.address)
    holder.hello()
    holder.acquire(3, [0, 1])
    holder.answers(2)
    link = source._attached.link
    thread = threading.Thread(target=checker.visit, args=(2, [4, 5]))
    thread.start()
    eventually(lambda: daemon.stats()["requests"]["pending"] == 2)
    source._loop.run(link.close(), seconds=60, what="closing")
    holder.close()
    thread.join(60)
    assert not thread.is_alive()
    source.close()
    assert not any(checker.wrong.values())
    asked = {name: count - before[name] for name, count in daemon.stats()["requests"].items()}
    assert source.stats.requested == 7
    assert asked["requests"] == 7 + 2
    assert asked["repeated"] == source.stats.repeated == 2
    assert asked["cancelled"] == 2
    assert sum("went away" in line for line in lines) == 2
    assert sum("is back" in line for line in lines) == 2
