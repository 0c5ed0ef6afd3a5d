from __future__ import annotations

import asyncio

import pytest

from tierd.addresses import Address
from tierd.api import store_pb2 as pb
from tierd.client import remote_store
from tierd.client.remote_store import RemoteStore
from tierd.errors import DeadlineExceeded


class Stalling:
    """A call that gives some chunks, and then nothing."""

    def __init__(self, chunks):
        self.chunks = chunks
        self.ended = asyncio.Event()

    async def read(self):
        if self.chunks:
            await asyncio.sleep(0.02)
            self.chunks -= 1
            return pb.ReadDenseResponse(total_bytes=100, data=b"ten bytes.")
        await self.ended.wait()
        raise asyncio.CancelledError

    def cancel(self):
        self.ended.set()


async def test_a_daemon_that_stalls_in_the_middle_of_a_tensor_is_given_up_whatever_the_size(monkeypatch):
    monkeypatch.setattr(remote_store, "_SILENT_SECONDS", 0.06)
    store, call = RemoteStore.__new__(RemoteStore), Stalling(chunks=6)
    store._address = Address(host="far", port=1)
    with pytest.raises(DeadlineExceeded, match=r"far:1 sent nothing of x for 0\.06 s, after 60 of 100 bytes"):
        await store._collect(call, "x", 100)
    assert call.ended.is_set()
