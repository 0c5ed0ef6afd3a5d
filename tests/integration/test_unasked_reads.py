"""Residents used without a message, with real daemons: counted exactly, never wrong, given up where they must be."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from daemons import Daemon, eventually
from sessions import RawSession

from tierd.client.arena_source import ArenaSource
from tierd.client.session_link import SessionLink
from tierd.client.source import Phase
from tierd.store.synthetic import expected_record

LAYERS, EXPERTS = 4, 16


class Reader:
    """A source whose uses compare every byte, and may do something meanwhile."""

    def __init__(self, daemon, store, **options):
        self.store = store
        self.source = ArenaSource(daemon.address, store, name="test", numerics="exact", kernel_path="none", **options)
        self.stats = self.source.stats
        self.step = 0
        self.order = []
        self.right = {}

    def visit(self, layer, experts, phase=Phase.DECODE, meanwhile=lambda _expert: None):
        self.order, self.right = [], {}

        def use(expert, address):
            self.order.append(expert)
            expected = expected_record(self.store.manifest, layer, expert)
            half = len(expected) // 2
            read = ctypes.string_at(address, half)
            meanwhile(expert)
            # The last use counts: earlier ones were thrown away.
            self.right[expert] = read + ctypes.string_at(address + half, len(expected) - half) == expected

        self.step += 1
        self.source.visit(layer, experts, use, step=self.step, phase=phase)
        assert self.right == dict.fromkeys(experts, True)

    def visit_all(self, phase=Phase.DECODE):
        for layer in range(LAYERS):
            self.visit(layer, list(range(EXPERTS)), phase)


@pytest.fixture
def reader(pattern_store):
    opened = []

    def open_reader(daemon, **options):
        opened.append(Reader(daemon, pattern_store, **options))
        return opened[-1]

    yield open_reader
    for one in opened:
        one.source.close()


@pytest.fixture(scope="module")
def whole(serve_module, pattern_store):
    """A daemon that holds everything, and shows its metrics."""
    daemon = serve_module(pattern_store.path, "--arena", "100%", http="127.0.0.1:0")
    one = Reader(daemon, pattern_store)
    one.visit_all()
    one.source.close()
    eventually(lambda: not daemon.stats()["sessions"])
    return daemon


def evict(daemon, layer, experts):
    """Turn out whatever nobody holds, by asking for as many others."""
    raw = RawSession(daemon.address)
    raw.hello()
    raw.acquire(layer, experts)
    raw.answers(len(experts))
    raw.close()


def metric(daemon, name):
    with urllib.request.urlopen(f"{daemon.http}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, flags=re.MULTILINE)[1])


def test_a_daemon_that_takes_no_packets_is_asked_by_the_stream(serve, pattern_store, reader, monkeypatch):
    """Which is what older ones are."""
    opened = []

    async def open_older(*arguments, **options):
        link = await open_now(*arguments, **options)
        link.welcome.packet_messages = False
        opened.append(link)
        return link

    open_now = SessionLink.open
    monkeypatch.setattr(SessionLink, "open", open_older)
    daemon = serve(pattern_store.path, "--arena", "131072")
    one = reader(daemon)
    one.visit(0, [1, 2, 3])
    eventually(lambda: daemon.stats()["arena"]["slots_granted"] == 0)
    assert one.source.messages_sent == opened[0].sent == 2


def test_residents_cost_no_message_and_are_counted_by_phase(whole, reader):
    phases = {phase: f'tierd_answers_total{{outcome="hits",phase="{phase.value}"}}' for phase in Phase}
    before = {phase: metric(whole, name) for phase, name in phases.items()}
    unasked = metric(whole, "tierd_unasked_hits_total")
    one = reader(whole)
    one.visit_all(Phase.PREFILL)
    one.visit_all()
    one.visit_all()
    assert one.stats.messages == one.stats.discarded == 0
    assert one.stats.outcomes == {"hit": 3 * 64, "miss": 0, "joined": 0}
    assert one.stats.tiers == {"ram": 3 * 64}
    # While the node lives, and without any message of it.
    assert metric(whole, phases[Phase.PREFILL]) == before[Phase.PREFILL] + 64
    assert metric(whole, phases[Phase.DECODE]) == before[Phase.DECODE] + 128
    assert metric(whole, "tierd_unasked_hits_total") == unasked + 192
    counted = whole.stats()
    assert counted["sessions"][0]["requests"] == 192
    asked = counted["requests"]
    assert asked["requests"] == asked["hits"] + asked["misses"] + asked["joined"]
    one.source.close()
    eventually(lambda: whole.session_blocks() == 0)
    assert whole.stats()["requests"] == asked, "its end adds nothing"


def test_the_message_path_stays_and_counts_the_same(whole, reader):
    before = whole.stats()["requests"]
    one = reader(whole, messages=True)
    one.visit_all()
    assert one.source.direct is None
    assert one.stats.messages >= LAYERS
    assert one.stats.outcomes["hit"] == 64
    after = whole.stats()["requests"]
    assert (after["hits"] - before["hits"], after["unasked"]) == (64, before["unasked"])


def test_residents_are_used_first_and_stay_while_the_others_are_read(serve, pattern_store, reader):
    daemon = serve(pattern_store.path, "--arena", 6 * pattern_store.geometry.slot_bytes)
    one = reader(daemon)
    one.visit(0, [3, 4])
    eventually(lambda: daemon.stats()["sessions"][0]["grants"] == 0)

    def held(expert):
        if expert in (3, 4):
            eventually(lambda: daemon.stats()["sessions"][0]["grants"] == 3)

    one.visit(0, [3, 7, 4], meanwhile=held)
    assert one.order == [3, 4, 7]
    assert one.stats.messages == 2
    assert one.stats.outcomes == {"hit": 2, "miss": 3, "joined": 0}
    asked = daemon.stats()["requests"]
    assert (asked["requests"], asked["hits"], asked["misses"], asked["unasked"]) == (5, 2, 3, 2)


def test_bytes_that_change_under_use_are_thrown_away_and_come_again(serve, pattern_store, reader):
    daemon = serve(pattern_store.path, "--arena", 2 * pattern_store.geometry.slot_bytes)
    one = reader(daemon)
    one.visit(0, [1, 2])
    eventually(lambda: daemon.stats()["sessions"][0]["grants"] == 0)
    turned_out = []

    def slowly(expert):
        if expert == 1 and not turned_out:
            turned_out.append(expert)
            evict(daemon, 3, [8, 9])

    one.visit(0, [1, 2], meanwhile=slowly)
    assert one.order[:2] == [1, 2]
    assert sorted(one.order[2:]) == [1, 2], "as they landed"
    assert one.stats.discarded == 2
    assert one.stats.repeated == 0, "the daemon had not counted them"
    assert one.stats.requested == 4
    asked = daemon.stats()["requests"]
    assert asked["requests"] == 4 + 2
    assert asked["misses"] == one.stats.outcomes["miss"] + 2
    assert asked["hits"] == one.stats.outcomes["hit"]
    assert asked["unasked"] == asked["repeated"] == 0


def test_an_unasked_use_is_certain_though_the_session_ends_before_the_rest_comes(serve, pattern_store, reader):
    daemon = serve(pattern_store.path, "--arena", 3 * pattern_store.geometry.slot_bytes)
    lines = []
    one = reader(daemon, tell=lines.append)
    one.visit(0, [2, 1])
    link = one.source._attached.link
    holder = RawSession(daemon.address)
    holder.hello()
    holder.acquire(3, [9, 10])
    holder.answers(2)

    def cut(expert):
        if expert == 1:
            # It is in use and the other slots are held, so expert 3 waits for room.
            eventually(lambda: daemon.stats()["requests"]["pending"] == 1)
            one.source._loop.run(link.close(), seconds=60, what="closing")

    one.visit(0, [1, 3], meanwhile=cut)
    assert one.order == [1, 3]
    assert sum("is back" in line for line in lines) == 1
    one.source.close()
    holder.close()
    eventually(lambda: daemon.session_blocks() == 0)
    asked = daemon.stats()["requests"]
    assert asked["requests"] == one.stats.requested + 2 == 6
    assert (asked["hits"], asked["unasked"], asked["cancelled"]) == (1, 1, 1)


def test_a_failing_use_leaves_no_grant_behind(serve, pattern_store, reader):
    daemon = serve(pattern_store.path, "--arena", "100%")
    one = reader(daemon)
    one.visit(0, [1])

    def fail(_expert):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        one.visit(0, [1, 2, 3], meanwhile=fail)
    eventually(lambda: (s := daemon.stats())["sessions"][0]["grants"] == s["requests"]["pending"] == 0)
    one.visit(0, [1, 2, 3])


def test_native_code_reads_by_addresses_alone(whole, reader, pattern_store):
    one = reader(whole)
    access = one.source.direct
    geometry = pattern_store.geometry
    before = whole.stats()["requests"]
    assert (access.entries, access.slot_bytes) == (geometry.experts_total, geometry.slot_bytes)
    ctypes.c_uint64.from_address(access.step).value = 9
    for expert in (0, 15):
        flat = geometry.layer_start(2) + expert
        word = ctypes.c_uint64.from_address(access.table + 8 * flat).value
        record = access.payload + ((word & 0xFFFFFF) - 1) * access.slot_bytes
        expected = expected_record(pattern_store.manifest, 2, expert)
        assert ctypes.string_at(record, len(expected)) == expected
        ctypes.c_uint32.from_address(access.last_step + 4 * flat).value = 9
        ctypes.c_uint32.from_address(access.decode_uses + 4 * flat).value += 1
        ctypes.c_uint32.from_address(access.prefill_uses + 4 * flat).value += 2
    counts = SimpleNamespace(used=6, layers=1, discarded=1)
    one.source.stats.count_direct(counts)
    then = one.stats.snapshot()
    counts.used = 7
    assert (then.requested, one.stats.requested, one.stats.unasked) == (6, 7, 7)
    counts.used = 6
    assert (one.stats.requested, one.stats.visits, one.stats.discarded) == (6, 1, 1)
    assert one.stats.outcomes["hit"] == one.stats.tiers["ram"] == 6
    after = whole.stats()["requests"]
    assert after["unasked"] - before["unasked"] == after["requests"] - before["requests"] == 6
    # A session that ended is not read by; the next visit gives another mapping.
    one.source._loop.run(one.source._attached.link.close(), seconds=60, what="closing")
    assert one.source.direct is None
    one.visit(0, [1])
    assert one.source.direct.epoch == access.epoch + 1


def test_a_node_that_scribbles_over_its_block_harms_nobody(serve, pattern_store, reader):
    daemon = serve(pattern_store.path, "--arena", "25%")
    other, scribbler = reader(daemon), reader(daemon)
    block = scribbler.source._attached.memory.block
    rng = np.random.default_rng(1)
    for _ in range(5):
        for array in (block.step, block.uses, block.last_step, block.expect, block.in_use):
            array[...] = rng.integers(0, np.iinfo(array.dtype).max, array.shape, array.dtype, endpoint=True)
        other.visit_all()
        asked = daemon.stats()["requests"]
        assert asked["requests"] == asked["hits"] + asked["misses"] + asked["joined"]
    # The scribbler itself is served, too; only what it counted is nonsense.
    scribbler.visit_all()
    assert other.stats.discarded == scribbler.stats.discarded == 0


KILLED = """
import os, signal, sys
from tierd.addresses import parse_address
from tierd.client.arena_source import ArenaSource
from tierd.client.session_link import SessionLink
from tierd.client.source import Phase
from tierd.store.store import ExpertStore
store = ExpertStore.open(sys.argv[2])
source = ArenaSource(parse_address(sys.argv[1], option="x"), store, name="t", numerics="exact", kernel_path="none")
for step in range(50):
    source.visit(step % 4, range(16), lambda expert, address: None, step=step, phase=Phase.DECODE)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_node_is_counted_to_its_last_use_and_leaves_nothing(whole, pattern_store):
    before = whole.stats()["requests"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, whole.name, str(pattern_store.path)], timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    eventually(lambda: whole.session_blocks() == 0)
    counted = whole.stats()
    assert counted["requests"]["unasked"] - before["unasked"] == 50 * 16
    assert counted["requests"]["requests"] - before["requests"] == 50 * 16
    assert counted["arena"]["slots_granted"] == 0
    assert counted["sessions"] == []


REFUSING = """
import ctypes, struct, sys
# A seccomp filter, as containers have one: membarrier fails with EPERM, everything else is allowed.
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 324), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in code))
header = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(program)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, header) == 0, ctypes.get_errno()
from tierd.cli import main
main()
"""


class RefusingDaemon(Daemon):
    """A daemon whose kernel refuses membarrier."""

    def launch(self):
        super().launch(command=[sys.executable, "-c", REFUSING])


def test_where_the_kernel_refuses_the_fence_every_expert_is_asked_for(folder, pattern_store, reader):
    daemon = RefusingDaemon(pattern_store.path, "--arena", "100%", folder=folder, http="127.0.0.1:0").start()
    try:
        one = reader(daemon)
        one.visit(0, [1, 2])
        one.visit(0, [1, 2])
        assert one.source.direct is None
        assert one.stats.messages == 2
        assert one.stats.outcomes == {"hit": 2, "miss": 2, "joined": 0}
        assert metric(daemon, "tierd_membarrier") == 0
        assert metric(daemon, "tierd_unasked_hits_total") == 0
        one.source.close()
        assert daemon.stop() == 0
    finally:
        daemon.kill()
    assert "Traceback" not in Path(daemon.log_path).read_text()
