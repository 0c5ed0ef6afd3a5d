"""Calls that are cancelled, dropped or abandoned must cost neither side memory: some releases of gRPC leak here."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from pathlib import Path

import grpc.aio
import pytest
from daemons import eventually, on_loop

from tierd.api import store_pb2 as pb
from tierd.api import store_pb2_grpc
from tierd.rpc import CHANNEL_OPTIONS, read_safely

ROUNDS = 400  # with the warm-up 500
# Allocators keep what the first calls needed; a leak of one call in three would grow by tens of MB in every attempt.
WARM_UP = 100
ATTEMPTS = 3
MAX_GROWTH = 5 << 20
REQUEST = pb.ReadExpertsRequest(layer=1, experts=[0, 1, 2, 3])


def rss_bytes():
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


async def cancelled_after_the_first_chunk(stub):
    call = stub.ReadExperts(REQUEST)
    assert (await read_safely(call)).data
    call.cancel()


async def reading_task_cancelled(stub):
    call = stub.ReadExperts(REQUEST)
    await read_safely(call)
    reading = asyncio.ensure_future(read_safely(call))
    await asyncio.sleep(0)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading


async def dropped_unread(stub):
    call = stub.ReadExperts(REQUEST)
    await read_safely(call)
    del call


@pytest.fixture(scope="module")
def daemon(serve_module, big_records_store):
    return serve_module(big_records_store.path, "--arena", "100%")


@pytest.mark.soak
def test_20_000_streams_that_end_early_leak_on_neither_side(daemon):
    streams_leak_nothing(daemon, 20_000)


def test_500_streams_that_end_early_leak_on_neither_side(daemon):
    streams_leak_nothing(daemon, ROUNDS)


def streams_leak_nothing(daemon, rounds):
    ways = (cancelled_after_the_first_chunk, reading_task_cancelled, dropped_unread)

    async def run(times):
        async with grpc.aio.insecure_channel(daemon.address.target, options=CHANNEL_OPTIONS) as channel:
            stub = store_pb2_grpc.StoreServiceStub(channel)
            for number in range(times):
                await ways[number % len(ways)](stub)

    on_loop(run(WARM_UP), seconds=60)
    grown = MAX_GROWTH
    for _ in range(ATTEMPTS):
        gc.collect()
        here, there = rss_bytes(), daemon.rss_bytes()
        on_loop(run(rounds), seconds=1200)
        gc.collect()
        growths = (rss_bytes() - here, daemon.rss_bytes() - there)
        print(f"{rounds} streams: grown by {growths[0]} bytes here and {growths[1]} bytes in the daemon")
        grown = max(growths)
        if grown < MAX_GROWTH:
            break
    assert grown < MAX_GROWTH
    eventually(lambda: daemon.stats()["arena"]["slots_granted"] == 0)
    assert daemon.stats()["requests"]["pending"] == 0
