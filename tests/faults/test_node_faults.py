"""Nodes that die, stall or are interrupted in the middle of an answer, and what is left of them: nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from daemons import eventually
from sessions import RawSession

from tierd.client.arena_source import ArenaSource
from tierd.client.source import Phase
from tierd.store.store import ExpertStore


def test_a_killed_node_is_forgotten_at_once_and_the_other_goes_on(serve, node, embedded_store, reference):
    daemon = serve(embedded_store, "--arena", "10%")
    victim, other = node(daemon, tokens=4000), node(daemon, tokens=64)
    victim.answering()
    other.answering()
    assert len(daemon.stats()["sessions"]) == daemon.session_blocks() == 2
    victim.process.kill()
    eventually(lambda: len(daemon.stats()["sessions"]) == 1 and daemon.session_blocks() == 1)
    assert other.finish()["token_ids"] == reference["token_ids"]
    eventually(lambda: daemon.session_blocks() == 0)
    counted = daemon.stats()
    asked = counted["requests"]
    assert counted["arena"]["slots_granted"] == asked["pending"] == 0
    answered = sum(asked[name] for name in ("hits", "misses", "joined", "cancelled", "failed"))
    assert asked["requests"] == answered


HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from sessions import RawSession
from tierd.addresses import parse_address
held = RawSession(parse_address(sys.argv[2], option='address'))
held.hello(name='holder')
held.acquire(0, [0, 1])
held.answers(2)
print('holds', flush=True)
time.sleep(600)
"""


def test_a_killed_holder_of_the_whole_arena_makes_room_for_those_who_wait(serve, pattern_store):
    """The holder never releases: only its death can."""
    daemon = serve(pattern_store.path, "--arena", 2 * pattern_store.geometry.slot_bytes)
    command = [sys.executable, "-c", HOLDER, str(Path(__file__).parents[1]), daemon.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "holds\n"
            waiter = RawSession(daemon.address)
            waiter.hello(name="waiter")
            waiter.acquire(1, [0, 1])
            eventually(lambda: daemon.stats()["requests"]["pending"] == 2)
            assert {s["name"]: s["grants"] for s in daemon.stats()["sessions"]} == {"holder": 2, "waiter": 0}
        finally:
            holder.kill()
    ready, failed = waiter.answers(2)
    assert set(ready) == {0, 1}
    assert not failed
    waiter.close()


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_node_that_is_asked_to_end_does_so_at_once_and_leaves_nothing(serve, node, embedded_store, number, expected):
    daemon = serve(embedded_store, "--arena", "10%")
    one = node(daemon, tokens=4000).answering()
    one.process.send_signal(number)
    # It would write for minutes.
    assert one.process.wait(30) == expected
    assert "Traceback" not in one.words
    eventually(lambda: not daemon.stats()["sessions"] and daemon.session_blocks() == 0)
    assert daemon.stats()["arena"]["slots_granted"] == 0


def test_a_node_paused_beyond_keepalive_loses_its_grants_and_wakes_to_the_right_tokens(
    serve, node, embedded_store, reference
):
    daemon = serve(embedded_store, "--arena", "10%", "--keepalive-seconds", "1.5")
    paused = node(daemon, tokens=64).answering(4)
    paused.process.send_signal(signal.SIGSTOP)
    eventually(lambda: not daemon.stats()["sessions"])
    assert daemon.stats()["arena"]["slots_granted"] == 0
    # Only the end of the process may free the block: it may wake and write to it.
    assert daemon.session_blocks() == 1
    # Meanwhile another one turns over the whole arena.
    store = ExpertStore.open(embedded_store)
    churn = ArenaSource(daemon.address, store, name="churn", numerics="exact", kernel_path="none")
    for layer in range(8):
        churn.visit(layer, range(32), lambda *_: None, step=layer, phase=Phase.DECODE)
    churn.close()
    paused.process.send_signal(signal.SIGCONT)
    done = paused.finish()
    assert done["token_ids"] == reference["token_ids"]
    assert "went away" in paused.words
    assert "is back" in paused.words
    asked = daemon.stats()["requests"]
    assert asked["requests"] == done["unique_experts"] + 256
    assert asked["repeated"] == done["repeated"]
    eventually(lambda: daemon.session_blocks() == 0)
