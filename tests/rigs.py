"""A daemon's inside without its sockets: real files, drives, arena and broker on the test's own event loop."""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import shutil
from pathlib import Path

from tierd.arena.arena import Arena
from tierd.broker.broker import Broker
from tierd.devices.probe_cache import ProbeCache
from tierd.policy.lru import Lru
from tierd.service.catalogue import StoreCatalogue
from tierd.service.drives import Drives
from tierd.service.record_reader import RecordReader
from tierd.settings import ServeSettings
from tierd.store.store import ExpertStore
from tierd.store.synthetic import expected_record, make_store

__all__ = [
    "RECORD", "Rig", "cached_pages", "copy_of", "drop_cached_pages", "make_toy", "open_descriptors", "plan_file",
]  # fmt: skip

LAYERS, EXPERTS, RECORD = 4, 16, 64 << 10


def make_toy(path):
    """4 layers of 16 experts of 64 KiB in 4 shards; every byte follows from layer and expert."""
    return make_store(
        path, layers=LAYERS, experts=EXPERTS, top_k=2, record_bytes=RECORD, fill="pattern",
        shard_bytes=17 * RECORD,
    )  # fmt: skip


def copy_of(store, path, shards=None):
    """A hand-made copy: everything, or only the expert shards of these numbers."""
    if shards is None:
        shutil.copytree(store.path, path)
    else:
        path.mkdir()
        for number in shards:
            shutil.copy(store.shard_paths[number], path)
    return path


def plan_file(path, *faults, seed=1, throttles=()):
    """A fault plan on disk."""
    path.write_text(json.dumps({"seed": seed, "fault": list(faults), "throttle": list(throttles)}))
    return path


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def cached_pages(path):
    """How many pages of the file are in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        pages = -(-len(mapping) // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapping)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapping)), flags) == 0
        del first
        return sum(flag & 1 for flag in flags)


def drop_cached_pages(path):
    """Let the page cache forget the file."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class Rig:
    """Everything between a request and a drive. Use with `async with`."""

    def __init__(self, store, *, slots=12, **settings):
        self.store = store if isinstance(store, ExpertStore) else ExpertStore.open(store)
        self.drives = Drives(self.store, ServeSettings(**settings), ProbeCache(self.store.path.parent / "probes"))
        self.slots = slots

    async def __aenter__(self):
        await self.drives.measure()
        slot_bytes = self.store.geometry.slot_bytes
        self.arena = Arena.create(
            arena_bytes=self.slots * slot_bytes, slot_bytes=slot_bytes, experts=self.store.geometry.experts_total,
            boot_id=os.urandom(16), spares=self.drives.spares,
        )  # fmt: skip
        for slot in range(self.slots + self.drives.spares):
            self.arena.view(slot, slot_bytes)[:] = b"\xaa" * slot_bytes
        self.broker = Broker(
            catalogue=StoreCatalogue(self.store), memory=self.arena, policy=Lru(), device=self.drives.open(),
            clock=asyncio.get_running_loop(), max_experts_per_acquire=self.slots,
        )  # fmt: skip
        self.reader = RecordReader(self.broker, self._view)
        return self

    def _view(self, word, layer, expert):
        return self.arena.record(word, self.store.location(layer, expert).nbytes)

    async def __aexit__(self, *_):
        await self.drives.close()
        counts = self.arena.counts()
        self.arena.close()
        assert counts.filling == counts.abandoned == 0, counts

    async def fetch(self, layer, expert, seconds=30.0):
        """The record's bytes, which must be right; raises what a caller would be told."""
        deadline = asyncio.get_running_loop().time() + seconds
        with self.reader.session() as session:
            record, _ = await session.read(layer, expert, deadline)
        assert record == expected_record(self.store.manifest, layer, expert)
        return record

    async def fetch_all(self, times=1, seconds=30.0, *, at_once=8):
        """Every expert, many at a time; the exceptions of those that did not come."""
        wanted = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)] * times
        gate = asyncio.Semaphore(at_once)

        async def one(layer, expert):
            async with gate:
                await self.fetch(layer, expert, seconds)

        results = await asyncio.gather(*(one(*w) for w in wanted), return_exceptions=True)
        errors = [error for error in results if error is not None]
        assert not any(isinstance(error, AssertionError) for error in errors), errors
        return errors

    def stats(self, name="nvme"):
        return next(d for d in self.drives.replicas.drives if d.name == name).device.stats

    def member(self, name):
        return next(d for d in self.drives.replicas.drives if d.name == name)

    def counts_agree(self):
        """Bytes by drive are what the fault wrapper saw, and good reads are whole records."""
        for info in self.drives.info.values():
            if info.injector is not None:
                assert self.stats(info.name).bytes == info.injector.bytes
        return True
