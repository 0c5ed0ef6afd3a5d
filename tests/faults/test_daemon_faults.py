"""Daemons that are killed in the middle of an answer: the node goes on with the next one, or says clearly why not."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tierd.client.arena_source import ArenaSource
from tierd.client.source import Phase
from tierd.errors import SessionRefused


def test_a_node_goes_on_with_a_daemon_that_was_killed_and_started_again(serve, node, embedded_store, reference):
    daemon = serve(embedded_store, "--arena", "10%")
    before = daemon.stats()["boot_id"]
    one = node(daemon, tokens=64).answering(4)
    daemon.kill()
    daemon.start()
    done = one.finish()
    assert done["token_ids"] == reference["token_ids"]
    assert "went away" in one.words
    assert "is back" in one.words
    counted = daemon.stats()
    assert counted["boot_id"] != before
    # What the dead daemon had counted is gone with it; the new one counted the rest once.
    assert 0 < counted["requests"]["requests"] < done["unique_experts"]


def test_a_node_does_not_wait_for_ever_for_a_daemon_that_is_gone(serve, node, embedded_store):
    daemon = serve(embedded_store, "--arena", "10%")
    one = node(daemon, "--patience", "0.5", tokens=4000).answering()
    daemon.kill()
    code, words = one.fail(seconds=20)
    assert code == 1
    assert f"{daemon.name} did not come back within 0.5 s" in words
    assert "tierd serve" in words
    assert "Traceback" not in words


def test_a_node_whose_own_daemon_is_killed_says_so_at_once_and_names_the_signal(node, embedded_store):
    one = node(embedded_store, "--arena", "10%", tokens=4000).answering()
    children = Path(f"/proc/{one.process.pid}/task").glob("*/children")
    (daemon,) = {int(pid) for task in children for pid in task.read_text().split()}
    os.kill(daemon, signal.SIGKILL)
    code, words = one.fail(seconds=20)
    assert code == 1
    assert "killed (signal 9, SIGKILL)" in words
    assert "Traceback" not in words


def test_a_planned_restart_is_waited_for(serve, pattern_store):
    daemon = serve(pattern_store.path)
    lines, seen = [], []
    source = ArenaSource(
        daemon.address, pattern_store, name="test", numerics="exact", kernel_path="none", tell=lines.append
    )

    def visit(layer):
        source.visit(layer, [1, 2], lambda expert, _address: seen.append(expert), step=layer, phase=Phase.DECODE)

    visit(0)
    assert daemon.stop() == 0
    restart = threading.Timer(0.3, daemon.start)
    restart.start()
    visit(1)
    restart.join()
    source.close()
    assert sorted(seen) == [1, 1, 2, 2]
    assert len(lines) == 3
    # The first daemon counted the first visit; the second one counted the second, which had not been asked for before.
    assert daemon.stats()["requests"]["requests"] == 2
    assert source.stats.repeated == 0


def test_a_daemon_of_another_store_in_the_old_one_s_place_is_refused(serve, pattern_store, big_records_store):
    daemon = serve(pattern_store.path)
    source = ArenaSource(daemon.address, pattern_store, name="test", numerics="exact", kernel_path="none")
    source.visit(0, [1], lambda *_: None, step=0, phase=Phase.DECODE)
    daemon.kill()
    daemon.store = big_records_store.path
    daemon.start()
    with pytest.raises(SessionRefused) as refused:
        source.visit(1, [1], lambda *_: None, step=1, phase=Phase.DECODE)
    assert pattern_store.fingerprint[:12] in str(refused.value)
    assert big_records_store.fingerprint[:12] in str(refused.value)
    source.close()
