"""A daemon that begins where the last one ended: history, warm start, pins."""

from __future__ import annotations

import json
import re

import httpx
import numpy as np
import pytest
from daemons import command, eventually, on_loop

from tierd.client.arena_source import ArenaSource
from tierd.client.daemon_control import set_pins
from tierd.client.source import Phase
from tierd.errors import LimitExceeded, UsageError
from tierd.service.history import HistoryFile, history_path
from tierd.service.remembering import read_pins
from tierd.store.synthetic import make_store

LAYERS, EXPERTS = 4, 16
HOT = {layer: [layer, layer + 4, layer + 8] for layer in range(LAYERS)}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(
        tmp_path_factory.mktemp("warm") / "store", layers=LAYERS, experts=EXPERTS, top_k=2, fill="pattern"
    )


@pytest.fixture
def node(store):
    opened = []

    class Node:
        def __init__(self, daemon):
            self.step = 0
            self.source = ArenaSource(daemon.address, store, name="t", numerics="exact", kernel_path="none")
            opened.append(self)

        def visit(self, experts_of, rounds=1):
            for _ in range(rounds):
                self.step += 1
                for layer, experts in experts_of.items():
                    self.source.visit(layer, experts, lambda *_: None, step=self.step, phase=Phase.DECODE)

    yield Node
    for one in opened:
        one.source.close()


def started(serve, store, folder, *options):
    return serve(store.path, "--arena", "25%", "--state-dir", folder / "state", *(options or ("--history", "on")))


def warmed(daemon):
    """Wait for the warm start to end; what was read."""

    def ended():
        stats = daemon.stats()
        return stats["history"]["warm_left"] == stats["arena"]["slots_filling"] == 0 and stats["history"]

    return eventually(ended)


def test_a_restarted_daemon_has_in_ram_what_was_hot(serve, store, folder, node):
    first = started(serve, store, folder)
    assert first.stats()["history"]["warm_wanted"] == 0
    one = node(first)
    one.visit({layer: list(range(EXPERTS)) for layer in range(LAYERS)})
    one.visit(HOT, rounds=20)
    one.source.close()
    assert first.stop() == 0
    again = started(serve, store, folder)
    history = warmed(again)
    assert history["warm_wanted"] == history["warm_read"] == EXPERTS
    two = node(again)
    two.visit(HOT, rounds=3)
    requests = again.stats()["requests"]
    assert (requests["hits"], requests["misses"]) == (3 * 12, 0)
    assert "warm start" in again.log


def test_a_policy_that_recalls_nothing_keeps_the_hottest_of_a_warm_start_longest(serve, store, folder, node):
    history = HistoryFile(history_path(store.path, store.fingerprint, folder / "state"), store.fingerprint, 64)
    on_loop(history.save(np.arange(100.0, 100.0 - LAYERS * EXPERTS, -1.0)))
    daemon = started(serve, store, folder, "--history", "on", "--policy", "lru")
    assert warmed(daemon)["warm_read"] == EXPERTS
    eventually(lambda: "warm start ended" in daemon.log)
    one = node(daemon)
    one.visit({1: [0, 1, 2, 3], 2: [0, 1, 2, 3]})
    before = daemon.stats()["requests"]["misses"]
    one.visit({0: list(range(8))})
    assert daemon.stats()["requests"]["misses"] == before


def test_a_bad_history_costs_nothing_but_the_warmth(serve, store, folder, node):
    path = history_path(store.path, store.fingerprint, folder / "state")
    path.parent.mkdir()
    path.write_bytes(b"junk")
    daemon = started(serve, store, folder)
    assert daemon.stats()["history"]["warm_wanted"] == 0
    node(daemon).visit(HOT)
    daemon.stop()
    assert "usage history not used" in daemon.log
    assert len(json.loads(path.read_bytes())["counts"]) == LAYERS * EXPERTS


def test_a_state_directory_that_cannot_be_written_is_one_warning(serve, store, folder, node):
    (folder / "state").write_text("a file where the directory should be")
    daemon = started(serve, store, folder)
    node(daemon).visit(HOT)
    assert daemon.stop() == 0
    assert daemon.log.count("usage history not saved") == 1


def test_a_kill_and_reading_only_leave_the_file_byte_for_byte(serve, store, folder, node):
    history = HistoryFile(history_path(store.path, store.fingerprint, folder / "state"), store.fingerprint, 64)
    on_loop(history.save(np.arange(64.0) % 3))
    before = history.path.read_bytes()
    killed = started(serve, store, folder)
    node(killed).visit({0: [15]}, rounds=3)
    killed.kill()
    assert history.path.read_bytes() == before
    reading = started(serve, store, folder, "--history", "read")
    assert warmed(reading)["warm_read"] == EXPERTS
    node(reading).visit({1: [15]}, rounds=3)
    reading.stop()
    assert history.path.read_bytes() == before


def test_without_a_history_a_state_directory_is_warned_of_and_not_made(serve, store, folder):
    daemon = serve(store.path, "--history", "off", "--state-dir", folder / "state")
    assert daemon.stats()["history"]["path"] == ""
    daemon.stop()
    assert "no effect" in daemon.log
    assert not (folder / "state").exists()


def test_a_store_in_its_place_keeps_its_history_beside_it(serve, store, node):
    daemon = serve(store.path, "--history", "on")
    node(daemon).visit(HOT)
    daemon.stop()
    (file,) = store.path.with_name(f"{store.path.name}.state").iterdir()
    counts = np.array(json.loads(file.read_bytes())["counts"])
    assert sorted(np.flatnonzero(counts).tolist()) == sorted(
        layer * EXPERTS + expert for layer, experts in HOT.items() for expert in experts
    )


def test_uses_of_residents_without_a_message_are_remembered(serve, store, folder, node):
    daemon = serve(store.path, "--arena", "100%", "--history", "on", "--state-dir", folder / "state")
    one = node(daemon)
    one.visit({0: [1, 2]})
    one.visit({0: [2]}, rounds=50)
    one.source.close()
    assert daemon.stats()["requests"]["unasked"] == 50
    daemon.stop()
    counts = json.loads(next((folder / "state").iterdir()).read_bytes())["counts"]
    assert counts[2] > 20 * counts[1] > 0


def test_pins_stay_while_others_come_and_go(serve, store, folder, node):
    pins = folder / "pins"
    pins.write_text("# what we need at once\n0 3 4\n\n2 15 # and this\n")
    daemon = serve(store.path, "--arena", "25%", "--pin", pins)
    assert warmed(daemon)["warm_read"] == 3
    one = node(daemon)
    everything = {layer: list(range(8, EXPERTS - 1)) for layer in range(LAYERS)}
    one.visit(everything, rounds=2)
    before = daemon.stats()["requests"]["misses"]
    one.visit({0: [3, 4], 2: [15]})
    assert daemon.stats()["requests"]["misses"] == before
    assert on_loop(set_pins(daemon.address, 0, [], pinned=False)) == 1
    assert on_loop(set_pins(daemon.address, 3, [1], pinned=True)) == 2
    assert daemon.stats()["history"]["pinned"] == 2
    one.visit(everything, rounds=2)
    before = daemon.stats()["requests"]["misses"]
    one.visit({2: [15]})
    assert daemon.stats()["requests"]["misses"] == before
    one.visit({0: [3, 4]})
    assert daemon.stats()["requests"]["misses"] == before + 2, "unpinned ones leave"


def test_the_command_line_pins_and_names_what_is_not_there_and_metrics_show_it(serve, store):
    daemon = serve(store.path, "--arena", "50%", http="127.0.0.1:0")
    run = command("tierd", "ctl", "pin", daemon.name, 1, 2, 3)
    assert (run.returncode, run.stdout) == (0, "2 experts are pinned\n")
    text = httpx.get(f"{daemon.http}/metrics", timeout=60).text
    values = {name: float(value) for name, value in re.findall(r"^(tierd_[a-z_]+) ([0-9.e+]+)$", text, re.MULTILINE)}
    arena = daemon.stats()["arena"]
    assert (values["tierd_ram_bytes"], values["tierd_arena_excess_bytes"]) == (arena["ram_bytes"], 0)
    assert values["tierd_arena_locked_bytes"] in {0, arena["used_bytes"]}
    assert values["tierd_pinned_experts"] == 2
    assert {"tierd_warm_reads_total", "tierd_warm_left"} <= set(values)
    run = command("tierd", "ctl", "unpin", daemon.name, 1, "--json")
    assert json.loads(run.stdout) == {"pinned": 0}
    with pytest.raises(LimitExceeded, match="layer 9"):
        on_loop(set_pins(daemon.address, 9, [1], pinned=True))
    with pytest.raises(LimitExceeded, match="no expert 16"):
        on_loop(set_pins(daemon.address, 1, [16], pinned=True))


@pytest.mark.parametrize(
    ("text", "what"),
    [("0 x\n", "line 1"), ("\n3\n", "line 2"), ("9 1\n", "layer 9"), (None, "pins"), ("1 -1", "no expert")],
)
def test_a_wrong_file_of_pins_is_refused_by_line(store, tmp_path, text, what):
    if text is not None:
        (tmp_path / "pins").write_text(text)
    with pytest.raises(UsageError, match=what):
        read_pins(store, tmp_path / "pins")
