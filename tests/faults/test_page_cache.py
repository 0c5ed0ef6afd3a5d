"""What is served takes no memory from the page cache, and nobody asks the kernel for advice where sessions wait."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from rigs import Rig, cached_pages, copy_of, drop_cached_pages, make_toy

from tierd.store.store import ExpertStore

SLOTS = 6
TIMES = 3
"""Each of 64 experts so often: thirty times what the arena holds."""


@pytest.fixture
def store(tmp_path):
    """A store of which the page cache holds nothing but what opening it needs."""
    make_toy(tmp_path / "made")
    path = copy_of(ExpertStore.open(tmp_path / "made"), tmp_path / "store")
    store = ExpertStore.open(path)
    for shard in store.shard_paths:
        drop_cached_pages(shard)
    return store


def open_buffered_only(monkeypatch):
    """A filesystem that refuses to open files for direct reads."""
    real = os.open

    def refusing(path, flags, *args, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", refusing)


@pytest.mark.parametrize("direct", [True, False])
async def test_serving_many_times_the_arena_leaves_nothing_in_the_page_cache(store, monkeypatch, direct):
    if not direct:
        open_buffered_only(monkeypatch)
    async with Rig(store, slots=SLOTS) as rig:
        before = sum(map(cached_pages, store.shard_paths))
        assert await rig.fetch_all(times=TIMES, at_once=4) == []
        assert rig.stats().direct is direct
        assert rig.stats().bytes > 10 * SLOTS * store.geometry.slot_bytes
        assert sum(map(cached_pages, store.shard_paths)) <= before


async def test_advice_is_given_in_the_drives_threads_only(store, monkeypatch):
    open_buffered_only(monkeypatch)
    real, callers = os.posix_fadvise, []

    def watched(*arguments):
        callers.append(threading.current_thread().name)
        return real(*arguments)

    async with Rig(store, slots=SLOTS) as rig:
        monkeypatch.setattr(os, "posix_fadvise", watched)
        assert await rig.fetch_all() == []
        assert len(callers) >= rig.stats().reads
        assert {name.rpartition("-")[0] for name in callers} == {"tierd-nvme"}
