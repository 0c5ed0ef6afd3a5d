"""A daemon's memory: within its budget under load, smaller and larger while it serves, one copy for all nodes."""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import grpc.aio
import pytest
import xxhash
from daemons import command, eventually, on_loop
from sessions import RawSession

from compute_node.bench.arena_share import arena_share
from tierd.api import store_pb2, store_pb2_grpc
from tierd.client.arena_source import ArenaSource
from tierd.client.daemon_control import set_ram
from tierd.client.source import Phase
from tierd.errors import LimitExceeded
from tierd.rpc import CHANNEL_OPTIONS, read_safely
from tierd.service.budget import TRANSFERS, DaemonFacts, fixed_items
from tierd.store.synthetic import make_store

LAYERS, EXPERTS, RECORD = 4, 16, 1 << 20
ALL = LAYERS * EXPERTS
SESSIONS = 8
FEW = ("--max-sessions", SESSIONS)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """64 experts of 1 MiB, every byte of which follows from layer and expert."""
    return make_store(
        tmp_path_factory.mktemp("ram") / "store", layers=LAYERS, experts=EXPERTS, top_k=2, record_bytes=RECORD,
        fill="pattern",
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole_daemon(serve_module, store):
    return serve_module(store.path, "--arena", "100%", *FEW)


@pytest.fixture
def whole(whole_daemon):
    """A daemon that all experts fit, at first."""
    yield whole_daemon
    resize(whole_daemon, ALL)


class Node:
    """A node of this process that checks every byte."""

    def __init__(self, daemon, store):
        self.store = store
        self.lines = []
        self.source = ArenaSource(
            daemon.address, store, name="test", numerics="exact", kernel_path="none", tell=self.lines.append
        )
        self.step = 0

    def visit(self, layer, experts=range(EXPERTS)):
        right = {}

        def use(expert, address):
            place = self.store.location(layer, expert)
            content = (ctypes.c_char * place.nbytes).from_address(address)
            right[expert] = xxhash.xxh3_64_intdigest(content) == place.xxh3

        self.step += 1
        self.source.visit(layer, list(experts), use, step=self.step, phase=Phase.DECODE)
        assert right == dict.fromkeys(experts, True)

    def visit_all(self, rounds=1):
        for _ in range(rounds):
            for layer in range(LAYERS):
                self.visit(layer)


@pytest.fixture
def node(store):
    opened = []

    def attach(daemon):
        opened.append(Node(daemon, store))
        return opened[-1]

    yield attach
    for one in opened:
        one.source.close()


class Working:
    """Nodes that visit everything in turn, in threads, until the block ends."""

    def __init__(self, *nodes):
        self.rounds = 0
        self.errors = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(node,)) for node in nodes]

    def _work(self, node):
        try:
            while not self._stop.is_set():
                node.visit_all()
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001, shown by the test's own thread
            self.errors.append(error)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def go_on(self, rounds=2):
        """Wait for some more rounds."""
        wanted = self.rounds + rounds
        eventually(lambda: self.errors or self.rounds >= wanted, 60)
        assert not self.errors, self.errors

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert not self.errors, self.errors


def ram_for(slots, spares):
    """The budget that gives exactly so many slots."""
    return sum(item.nbytes for item in fixed_items(DaemonFacts(ALL, RECORD, 2, spares, SESSIONS))) + slots * RECORD


def resize(daemon, slots):
    ram = ram_for(slots, daemon.stats()["arena"]["spare_slots"])
    answer = on_loop(set_ram(daemon.address, f"{ram}"), 60)
    assert (answer["slots"], answer["settled"]) == (slots, True)
    return ram


def held(session, layer, experts):
    """Words of experts that the session holds now."""
    number = session.acquire(layer, experts)
    words = []
    while len(words) < len(experts):
        notice = session.read().notice
        words += [ready.word for ready in notice.ready if notice.acquire_id == number]
    return words


def arena_of(daemon, slots):
    arena = daemon.stats()["arena"]
    spares = arena["spare_slots"]
    assert arena["slots"] == slots
    states = ("slots_free", "slots_filling", "slots_ready", "slots_abandoned", "slots_withdrawn")
    free_spares = arena["most_slots"] + spares - sum(arena[name] for name in states)
    assert 0 <= free_spares <= spares
    assert arena["slots_ready"] + arena["slots_filling"] <= slots + spares - free_spares
    assert arena["slots_withdrawn"] == ALL - slots
    return arena


def private_bytes(daemon):
    text = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) << 10


def test_a_daemon_shrinks_and_grows_under_load_and_stays_as_it_was_told(whole, node):
    nodes = node(whole), node(whole)
    with Working(*nodes) as working:
        working.go_on()
        assert arena_of(whole, ALL)["slots_ready"] == ALL
        for slots in (24, 6, 40, 6):
            ram = resize(whole, slots)
            working.go_on()
            arena = arena_of(whole, slots)
            assert arena["slots_ready"] <= slots
            assert arena["ram_bytes"] == ram
            assert arena["used_bytes"] <= (slots + arena["spare_slots"] + 2) * RECORD
            eventually(lambda: whole.stats()["arena"]["excess_bytes"] == 0)
        resize(whole, ALL)
        working.go_on(3)
    arena = arena_of(whole, ALL)
    assert arena["slots_ready"] == ALL
    misses = whole.stats()["requests"]["misses"]
    for one in nodes:
        one.visit_all()
    assert whole.stats()["requests"]["misses"] == misses, "everything fits again"
    for one in nodes:
        assert sum("went away" in line for line in one.lines) <= 3, (
            f"a node attaches again at a shrink only: {one.lines}"
        )


def test_memory_that_a_stray_reader_touched_is_given_back_again(whole, node):
    reader, stray = node(whole), node(whole)
    reader.visit_all()
    resize(whole, 6)
    before = whole.stats()["arena"]
    assert before["excess_bytes"] == 0
    assert before["punched"] >= 1
    stray.visit(0, [1])
    memory = stray.source._attached.memory
    assert ctypes.string_at(memory.slot_address(ALL - 2), RECORD) == bytes(RECORD), "a hole reads as zeros"
    eventually(lambda: whole.stats()["arena"]["punched"] > before["punched"])
    eventually(lambda: whole.stats()["arena"]["excess_bytes"] == 0)
    reader.visit_all()


async def read_from_afar(address, layer):
    """A layer as bytes, as a node without shared memory has it."""
    async with grpc.aio.insecure_channel(address.target, options=CHANNEL_OPTIONS) as channel:
        request = store_pb2.ReadExpertsRequest(layer=layer, experts=list(range(EXPERTS)))
        call = store_pb2_grpc.StoreServiceStub(channel).ReadExperts(request)
        while await read_safely(call) is not grpc.aio.EOF:
            pass


async def all_from_afar(address):
    """Twice as many readers as are served at a time."""
    await asyncio.gather(*(read_from_afar(address, n % LAYERS) for n in range(2 * TRANSFERS)))


def shares_of(arenas, private, budgets):
    """Of each budget, by slots: what the arena took of it, and private memory at its peak."""
    return {slots: (arenas[slots] + max(private)) / ram for slots, ram in budgets.items()}


def test_private_memory_and_arena_stay_within_any_budget_under_load_and_within_ten_percent_of_it(serve, store, node):
    budgets = {slots: ram_for(slots, 3) for slots in (64, 56, 48, 40, 32)}
    arenas = {}
    daemon = serve(store.path, "--ram", budgets[64], "--drive-threads", 2, *FEW)
    private, ended = [], threading.Event()

    def watch():
        while not ended.wait(0.005):
            private.append(private_bytes(daemon))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with Working(*(node(daemon) for _ in range(4))) as working:
            for slots, ram in budgets.items():
                assert resize(daemon, slots) == ram
                on_loop(all_from_afar(daemon.address), 60)
                working.go_on(1)
                arena = arena_of(daemon, slots)
                arenas[slots] = arena["used_bytes"] + arena["excess_bytes"]
            # Readers need the most where they happen to meet: they get some more occasions.
            for _ in range(8):
                if min(shares_of(arenas, private, budgets).values()) > 0.9:
                    break
                on_loop(all_from_afar(daemon.address), 60)
                working.go_on(1)
    finally:
        ended.set()
        watching.join()
    shares = shares_of(arenas, private, budgets)
    print(f"private memory {max(private):,} bytes; of each budget are used: {shares}")
    assert all(0.9 < share <= 1 for share in shares.values()), shares


def test_a_session_that_was_told_more_than_fits_is_ended_with_what_it_held(whole):
    holder = RawSession(whole.address)
    assert holder.hello().max_experts_per_acquire == ALL // 2
    assert len(held(holder, 1, range(4))) == 4
    resize(whole, 4)
    assert whole.stats()["arena"]["slots_granted"] == 0
    holder.close()


def test_what_a_session_holds_goes_when_it_lets_go(whole, node):
    node(whole).visit_all()
    spares = whole.stats()["arena"]["spare_slots"]
    holder = RawSession(whole.address)
    holder.hello()
    layer = next(
        layer
        for layer in range(LAYERS)
        if any((word & 0xFFFFFF) - 1 >= 40 + spares for word in held(holder, layer, range(EXPERTS)))
    )
    shrinking = threading.Thread(target=resize, args=(whole, 40))
    shrinking.start()
    eventually(lambda: whole.stats()["arena"]["slots"] == 40)
    arena = whole.stats()["arena"]
    assert arena["slots_granted"] == EXPERTS
    assert arena["slots_withdrawn"] < ALL - 40, "it holds experts beyond the new size"
    held(holder, layer, [0])
    shrinking.join(30)
    assert not shrinking.is_alive()
    arena = arena_of(whole, 40)
    assert (arena["slots_granted"], arena["excess_bytes"]) == (1, 0)
    holder.close()


def test_what_cannot_be_is_refused_and_changes_nothing(whole):
    before = whole.stats()["arena"]
    for ram in ("1MiB", "900TiB", "lots", "0%", ""):
        with pytest.raises(LimitExceeded, match="--ram"):
            on_loop(set_ram(whole.address, ram))
    after = whole.stats()["arena"]
    assert (after["slots"], after["ram_bytes"]) == (before["slots"], before["ram_bytes"])
    run = command("tierd", "ctl", "ram", "2MiB", whole.name)
    assert run.returncode == 2
    assert "at least" in run.stderr


def test_the_smaller_of_ram_and_arena_counts(serve, store):
    ram = ram_for(30, 3)
    daemon = serve(store.path, "--ram", ram, "--arena", "100%", "--drive-threads", 2, *FEW)
    assert daemon.stats()["arena"]["slots"] == 30


def test_the_command_line_resizes_and_says_how(whole):
    ram = ram_for(10, whole.stats()["arena"]["spare_slots"])
    run = command("tierd", "ctl", "ram", ram, whole.name)
    assert run.returncode == 0, run.stderr
    assert "64 → 10 experts" in run.stdout
    run = command("tierd", "ctl", "ram", "auto", whole.name, "--json")
    answer = json.loads(run.stdout)
    assert (answer["slots_before"], answer["slots"]) == (10, ALL)
    assert any("reserve" in line for line in answer["lines"])


READER = """
import ctypes, re, sys
from tierd.addresses import parse_address
from tierd.client.arena_source import ArenaSource
from tierd.client.source import Phase
from tierd.store.store import ExpertStore
store = ExpertStore.open(sys.argv[1])
source = ArenaSource(parse_address(sys.argv[2], option=""), store, name="r", numerics="exact", kernel_path="none")
for layer in range(4):
    source.visit(layer, list(range(16)), lambda _, a: ctypes.string_at(a, 1 << 20), step=layer, phase=Phase.DECODE)
print("ready", flush=True)
sys.stdin.read()
"""


def test_two_nodes_share_one_copy_of_the_experts(serve, store):
    daemon = serve(store.path, "--arena", "100%", *FEW)
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(store.path), daemon.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for one in nodes:
            assert one.stdout.readline() == "ready\n"
        shares = [arena_share(pid) for pid in (daemon.process.pid, *(one.pid for one in nodes))]
    finally:
        for one in nodes:
            one.communicate()
    allocated = daemon.stats()["arena"]["used_bytes"]
    assert all(share["rss_bytes"] >= ALL * RECORD for share in shares), "each of them sees all experts"
    assert sum(share["pss_bytes"] for share in shares) <= 1.02 * allocated, "but there is one copy"
    assert daemon.stats()["requests"]["misses"] == ALL, "and each was read once"
