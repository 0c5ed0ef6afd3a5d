from __future__ import annotations

import asyncio
import os

from tierd.requests import Granted, Outcome
from tierd.rpc import CHUNK_BYTES
from tierd.service.record_reader import RecordReader

RECORD = os.urandom(4 * CHUNK_BYTES + 5)


class Granting:
    """A broker that grants at once what is asked for."""

    def __init__(self):
        self.sessions, self.released = {}, []

    def open_session(self, number, session):
        self.sessions[number] = session

    def close_session(self, number):
        del self.sessions[number]

    def acquire(self, number, request):
        granted = Granted(request.experts[0], 7, Outcome.HIT)
        self.sessions[number].answered(request.id, [granted], [])

    def release(self, number, acquire_id):
        self.released.append((number, acquire_id))


async def test_others_have_their_turn_while_a_large_record_is_copied():
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    broker = Granting()
    working = asyncio.ensure_future(others())
    with RecordReader(broker, lambda *_: memoryview(RECORD)).session() as session:
        before = turns
        record, outcome = await session.read(0, 3, asyncio.get_running_loop().time() + 5)
    working.cancel()
    assert (record, outcome) == (RECORD, Outcome.HIT)
    assert turns - before >= 4
    assert len(broker.released) == 1
    assert not broker.sessions
