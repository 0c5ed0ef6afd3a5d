"""Readers of a tiny arena among evictions, pauses and kills: no wrong byte is ever kept, and nothing is left over."""

from __future__ import annotations

import gc
import json
import random
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest
from daemons import eventually, on_loop
from sessions import RawSession

from tierd.api import session_pb2 as pb
from tierd.client.daemon_control import set_ram
from tierd.store.synthetic import make_store

LAYERS, EXPERTS, SLOTS = 4, 16, 20
READERS = 3
SECONDS = 3.0

READER = """
import ctypes, json, random, signal, sys, time
from tierd.addresses import parse_address
from tierd.arena.session_block import SessionBlock
from tierd.client.arena_source import ArenaSource
from tierd.client.source import Phase
from tierd.store.store import ExpertStore
from tierd.store.synthetic import expected_record

careless = sys.argv[4] == "careless"
if careless:
    # It does not say what it uses, and takes its time: what it uses leaves under its eyes.
    SessionBlock.begin_use = lambda *_: None
store, rng = ExpertStore.open(sys.argv[2]), random.Random(sys.argv[3])
layers, experts = 4, 16
records = {(l, e): expected_record(store.manifest, l, e) for l in range(layers) for e in range(experts)}
weights = [1 / (1 + e) for e in range(experts)]
source = ArenaSource(parse_address(sys.argv[1], option="x"), store, name="r", numerics="exact", kernel_path="none")
going = True

def stop(*_):
    global going
    going = False

signal.signal(signal.SIGTERM, stop)
step = 0
while going:
    step += 1
    for layer in range(layers):
        # Experts of low numbers are wanted often, and others by other layers.
        wanted = list(dict.fromkeys((e + 5 * layer) % experts for e in rng.choices(range(experts), weights, k=4)))
        right = {}

        def use(expert, address, layer=layer, right=right):
            record = records[layer, expert]
            half = len(record) // 2
            read = ctypes.string_at(address, half)
            if careless:
                time.sleep(0.002)
            # The last use counts: earlier ones were thrown away.
            right[expert] = read + ctypes.string_at(address + half, len(record) - half) == record

        source.visit(layer, wanted, use, step=step, phase=Phase.PREFILL if step % 7 == 0 else Phase.DECODE)
        if right != dict.fromkeys(wanted, True):
            sys.exit(f"wrong bytes were kept in layer {layer}: {right}")
    if step == 3:
        print("reads", flush=True)
source.close()
stats = source.stats
print(json.dumps({"requested": stats.requested, "discarded": stats.discarded, "hits": stats.outcomes["hit"]}))
"""


class Readers:
    """Processes that read until they are told to stop. Those that were killed are replaced, and remembered."""

    def __init__(self, daemon, store, manner):
        self.arguments = [sys.executable, "-c", READER, daemon.name, str(store.path)]
        self.manner = manner
        self.started = 0
        self.alive = []
        self.reading = set()
        self.killed = 0
        for _ in range(READERS):
            self.start()
        self.wait_until_reading()

    def start(self):
        self.started += 1
        self.alive.append(
            subprocess.Popen(
                [*self.arguments, str(self.started), self.manner],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def wait_until_reading(self):
        for process in self.alive:
            if process not in self.reading:
                line = process.stdout.readline()
                assert line == "reads\n", (line, process.stderr.read())
                self.reading.add(process)

    def pause(self, rng):
        process = rng.choice(self.alive)
        process.send_signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0.01, 0.2))
        process.send_signal(signal.SIGCONT)

    def kill(self, rng):
        # One lives on to tell what it saw.
        process = self.alive.pop(rng.randrange(1, len(self.alive)))
        process.kill()
        process.communicate()
        self.killed += 1

    def stop(self):
        """Their own counts. Each found every byte right."""
        self.wait_until_reading()
        for process in self.alive:
            process.send_signal(signal.SIGTERM)
        counts = []
        for process in self.alive:
            out, err = process.communicate(timeout=30)
            assert process.returncode == 0, err
            counts.append(json.loads(out.splitlines()[-1]))
        return counts

    def end(self):
        for process in self.alive:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("stress") / "store"
    return make_store(path, layers=LAYERS, experts=EXPERTS, top_k=4, fill="pattern", record_bytes=256 << 10)


@pytest.fixture
def readers(store):
    started = []

    def start(daemon, manner):
        started.append(Readers(daemon, store, manner))
        return started[-1]

    yield start
    for one in started:
        one.end()


def disturb(daemon, rng, stopped, failures):
    """Evict at random, from a session that hints, changes its mind and lets go."""
    try:
        while not stopped.is_set():
            disturb_once(daemon, rng, stopped)
    except Exception as error:  # noqa: BLE001, reported by the main thread
        failures.append(error)


def disturb_once(daemon, rng, stopped):
    """Until it is told to stop, or to come back since the arena became smaller."""
    raw = RawSession(daemon.address)
    try:
        raw.hello(name="disturber")
        while not stopped.is_set():
            raw.send(hint=pb.Hint(layer=rng.randrange(LAYERS), experts=rng.sample(range(EXPERTS), 4)))
            wanted = rng.sample(range(EXPERTS), rng.randint(1, 3))
            acquire = raw.acquire(rng.randrange(LAYERS), wanted)
            if rng.random() < 0.3:
                raw.send(release=pb.Release(acquire_id=acquire))
            raw.answers(len(wanted))
    except grpc.RpcError as error:
        # A write that meets the end of the stream: grpcio replaces the daemon's reason by its own words.
        if not any(words in error.details() for words in ("attach again", "Internal error from Core")):
            raise
    finally:
        raw.close()


def resize(daemon, rng, stopped, failures):
    """Give the daemon less memory, and more, and in the end what it had."""
    try:
        # Half of it is ten slots of 256 KiB, so at least one extent of 2 MiB, however many spare slots there are.
        set_slots(daemon, SLOTS // 2)
        eventually(lambda: daemon.stats()["arena"]["punched"] > 0)
        while not stopped.wait(rng.uniform(0.05, 0.4)):
            set_slots(daemon, rng.randrange(8, SLOTS + 1))
        set_slots(daemon, SLOTS)
    except Exception as error:  # noqa: BLE001, reported by the main thread
        failures.append(error)


def set_slots(daemon, slots):
    arena = daemon.stats()["arena"]
    # The same daemon needs the same memory beside its experts, whatever its size.
    ram = arena["ram_bytes"] + (slots - arena["slots"]) * arena["slot_bytes"]
    assert on_loop(set_ram(daemon.address, str(ram)), 60)["slots"] == slots


def check_nothing_is_left(daemon, descriptors):
    counted = eventually(lambda: (s := daemon.stats())["sessions"] == [] and s)
    eventually(lambda: daemon.session_blocks() == 0)
    eventually(lambda: daemon.stats()["arena"]["slots_filling"] == 0)
    eventually(lambda: daemon.stats()["arena"]["excess_bytes"] == 0)
    counted = daemon.stats()
    asked, arena = counted["requests"], counted["arena"]
    assert arena["slots_free"] + arena["slots_ready"] == arena["slots"] == SLOTS
    assert arena["slots_granted"] == arena["slots_abandoned"] == asked["pending"] == 0
    answered = sum(asked[name] for name in ("hits", "misses", "joined", "cancelled", "failed"))
    assert asked["requests"] == answered
    # Connections of this process's own questions end when their channels are collected.
    eventually(lambda: gc.collect() >= 0 and daemon.descriptors() <= descriptors)
    return counted


def test_readers_among_evictions_pauses_and_kills_keep_no_wrong_byte(serve, store, readers, soak):
    rng = random.Random(soak.seed(1))
    daemon = serve(store.path, "--arena", SLOTS * store.geometry.slot_bytes)
    daemon.stats()
    descriptors = daemon.descriptors()
    crowd = readers(daemon, "careless")
    stopped, failures = threading.Event(), []
    disturbers = [
        threading.Thread(target=work, args=(daemon, random.Random(1), stopped, failures)) for work in (disturb, resize)
    ]
    for disturber in disturbers:
        disturber.start()
    try:
        began = time.monotonic()
        kill_at = began + 1.0
        while time.monotonic() < began + max(SECONDS, soak.seconds) or crowd.killed < 2:
            crowd.pause(rng)
            if time.monotonic() > kill_at:
                crowd.kill(rng)
                crowd.start()
                kill_at += 1.0
            time.sleep(rng.uniform(0, 0.1))
        counts = crowd.stop()
    finally:
        stopped.set()
        for disturber in disturbers:
            disturber.join(60)
    assert not failures
    counted = check_nothing_is_left(daemon, descriptors)
    assert counted["arena"]["evictions"] > 100
    assert counted["requests"]["unasked"] > 0
    assert sum(one["discarded"] for one in counts) > 0, "nothing that was worth checking happened"
    assert sum(one["requested"] for one in counts) <= counted["requests"]["requests"]


def test_readers_in_peace_throw_next_to_nothing_away(serve, store, readers):
    daemon = serve(store.path, "--arena", SLOTS * store.geometry.slot_bytes)
    daemon.stats()
    descriptors = daemon.descriptors()
    crowd = readers(daemon, "careful")
    time.sleep(1.5)
    counts = crowd.stop()
    requested = sum(one["requested"] for one in counts)
    counted = check_nothing_is_left(daemon, descriptors)["requests"]
    assert counted["requests"] == requested
    assert counted["hits"] == sum(one["hits"] for one in counts)
    assert counted["unasked"] > 0
    assert sum(one["discarded"] for one in counts) <= requested / 1000
