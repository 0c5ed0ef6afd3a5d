"""A real daemon with real clients for a while, under random faults on both drives, never on both copies of a record.

`make test` does some seconds of it with a fixed seed, `make soak` five minutes with a seed of its own that it prints.
"""

from __future__ import annotations

import ctypes
import gc
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash
from daemons import eventually
from rigs import EXPERTS, LAYERS, RECORD, copy_of, make_toy, plan_file

from tierd.client.arena_source import ArenaSource
from tierd.client.source import Phase

SECONDS, SOAK_TIMES = 10.0, 5
DEADLINE = 15.0
GRACE = 10.0
MAY_GROW = 16 << 20


def random_faults(rng):
    """Each drive is sick for the half of the experts that the other one has sound; a few kinds at a time."""
    every = range(LAYERS * EXPERTS)
    for drive, experts in (("nvme", every[::2]), ("mirror1", every[1::2])):
        for kind in ("eio", "short", "flip", "vanish", "delay", "hang"):
            begin = rng.uniform(0, 3)
            for turn in range(20):
                start = begin + turn * rng.uniform(8, 16)
                yield {
                    "kind": kind, "drive": drive, "experts": list(experts), "probability": rng.uniform(0.05, 0.4),
                    "from_seconds": start, "until_seconds": start + rng.uniform(2, 8),
                    "seconds": rng.uniform(0.001, 0.5),
                    "errno": rng.choice(["EIO", "EAGAIN", "EREMOTEIO", "EACCES"]),
                }  # fmt: skip


class Client:
    """One node: asks, looks at every byte, and notes how long it waited."""

    def __init__(self, daemon, store, rng, stop):
        self.rng = rng
        self.requested = self.visits = 0
        self.slowest = 0.0
        self._address = daemon.address
        self._store = store
        self._stop = stop

    def connect(self):
        return ArenaSource(
            self._address, self._store, name="soak", numerics="none", kernel_path="none", deadline=DEADLINE, patience=0
        )

    def ask(self, source, layer, experts, phase):
        """Visit; what was last seen of each expert must be its record."""
        seen = {}

        def look(expert, address):
            seen[expert] = xxhash.xxh3_64_intdigest((ctypes.c_char * RECORD).from_address(address))

        begun = time.monotonic()
        source.visit(layer, experts, look, step=self.visits, phase=phase)
        self.slowest = max(self.slowest, time.monotonic() - begun)
        self.visits += 1
        wanted = {expert: self._store.location(layer, expert).xxh3 for expert in experts}
        assert seen == wanted, f"wrong bytes in layer {layer}"

    def count(self, source):
        self.requested += source.stats.requested

    def decode(self):
        """Steps through the layers with few experts, some of them hot."""
        source = self.connect()
        while not self._stop.is_set():
            for layer in range(LAYERS):
                hot = {int(self.rng.paretovariate(1.0)) % EXPERTS for _ in range(3)}
                self.ask(source, layer, sorted(hot, key=lambda _: self.rng.random()), Phase.DECODE)
            time.sleep(self.rng.uniform(0, 0.005))
        self.count(source)
        source.close()

    def prefill(self):
        """Whole layers, which do not fit the arena at once."""
        source = self.connect()
        while not self._stop.is_set():
            self.ask(source, self.rng.randrange(LAYERS), list(range(EXPERTS)), Phase.PREFILL)
            time.sleep(self.rng.uniform(0, 0.02))
        self.count(source)
        source.close()

    def come_and_go(self):
        """Sessions of a few requests each."""
        while not self._stop.is_set():
            source = self.connect()
            for _ in range(self.rng.randrange(4)):
                experts = self.rng.sample(range(EXPERTS), self.rng.randrange(1, 7))
                self.ask(source, self.rng.randrange(LAYERS), experts, Phase.DECODE)
            self.count(source)
            source.close()
            time.sleep(self.rng.uniform(0, 0.1))


def own_bytes(pid):
    """Private memory of a process; the arena is shared."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) << 10


def descriptors(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def idle(daemon):
    """The daemon's statistics when nothing is in flight and nobody is there; None before that."""
    stats = daemon.stats()
    busy = stats["requests"]["pending"] or stats["sessions"] or any(drive["in_flight"] for drive in stats["drives"])
    return None if busy else stats


def test_no_wrong_byte_no_hang_and_nothing_left_behind(serve, tmp_path, soak):
    seconds = max(SECONDS, SOAK_TIMES * soak.seconds)
    seed = soak.seed(1)
    rng = random.Random(seed)
    store = make_toy(tmp_path / "store")
    mirror = copy_of(store, tmp_path / "mirror")
    plan = plan_file(tmp_path / "plan.json", *random_faults(rng), seed=seed)
    daemon = serve(store.path, "--mirror", mirror, "--fault-plan", plan, "--arena", 8 * RECORD, "--log-level", "error")
    stop = threading.Event()
    clients = [Client(daemon, store, random.Random(rng.random()), stop) for _ in range(4)]
    work = [clients[0].decode, clients[1].decode, clients[2].prefill, clients[3].come_and_go]
    first = clients[0].connect()
    clients[0].ask(first, 0, [0, 1], Phase.DECODE)
    clients[0].count(first)
    first.close()
    eventually(lambda: idle(daemon))
    gc.collect()
    at_rest = descriptors(daemon.process.pid)
    with ThreadPoolExecutor(len(work)) as pool:
        running = [pool.submit(job) for job in work]
        try:
            early = time.monotonic() + seconds / 4
            while time.monotonic() < early and not any(job.done() for job in running):
                time.sleep(0.05)
            before = own_bytes(daemon.process.pid)
            late = time.monotonic() + seconds * 3 / 4
            while time.monotonic() < late and not any(job.done() for job in running):
                time.sleep(0.05)
            after = own_bytes(daemon.process.pid)
        finally:
            stop.set()
        for job in running:
            job.result(DEADLINE + GRACE)
    assert all(client.visits for client in clients)
    assert max(client.slowest for client in clients) < DEADLINE
    assert after - before < MAY_GROW
    stats = eventually(lambda: idle(daemon))
    gc.collect()  # a closed channel of grpc lets go of its connection when its cycle is collected
    assert eventually(lambda: descriptors(daemon.process.pid) <= at_rest)
    counts = stats["requests"]
    assert counts["requests"] == sum(client.requested for client in clients)
    assert counts["requests"] == counts["hits"] + counts["misses"] + counts["joined"]
    assert counts["failed"] == counts["cancelled"] == 0, "the other copy of every record is sound"
    assert sum(drive["errors"] for drive in stats["drives"]) > 0, "there were faults"
    assert stats["arena"]["slots_granted"] == stats["arena"]["slots_filling"] == stats["arena"]["slots_abandoned"] == 0
