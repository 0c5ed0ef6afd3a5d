"""Readers in other processes use slots that are evicted and refilled all the time, and never keep a wrong byte."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque

import pytest
import xxhash

from tierd.arena.attach_server import AttachServer
from tierd.arena.attach_wire import ArenaOffer
from tierd.arena.fence import WriterFence
from tierd.arena.memory import SharedPayload
from tierd.arena.session_block import SessionBlockReader
from tierd.arena.slots import SlotTable
from tierd.arena.table import ABSENT, ResidencyTable
from tierd.devices.device import RecordRead
from tierd.devices.files import FileDevice
from tierd.service.message_socket import MessageSocket

EXPERTS, SLOTS, IN_FLIGHT = 12, 4, 2
NBYTES = 128 << 10
KEPT = 400

NODE = f"""
import sys
from tierd.arena.attach import attach
node = attach(sys.argv[1], bytes.fromhex(sys.argv[2]), 20)
wanted = int(sys.argv[3])
right = [bytes([e]) * {NBYTES} for e in range({EXPERTS})]
kept = discarded = expert = 0
while kept < wanted:
    expert = (expert + 5) % {EXPERTS}
    word = node.table.load(expert)
    if word == 0:
        continue
    slot = (word & 0xffffff) - 1
    result = bytes(node.payload.view(slot * {NBYTES}, {NBYTES}))
    if not node.table.unchanged(expert, word):
        discarded += 1
        continue
    assert result == right[expert], (expert, hex(word), result[0], result[-1])
    kept += 1
    node.block.note_use(expert, kept)
    if kept == wanted // 4:
        print('busy', flush=True)
print(kept, discarded, flush=True)
sys.stdin.readline()
"""


class Churn:
    """A daemon that does nothing but replace experts, in the order that readers without locks rely on."""

    def __init__(self, path):
        self.payload = SharedPayload.create(SLOTS * NBYTES)
        self.payload.start_prefault()
        self.table = ResidencyTable.create(os.urandom(16), slot_bytes=NBYTES, slots=SLOTS, entries=EXPERTS)
        self.slots = SlotTable(SLOTS)
        self.fence = WriterFence()
        self.device = FileDevice("nvme", [path], asyncio.get_running_loop().call_soon_threadsafe, threads=IN_FLIGHT)
        self.resident: deque[int] = deque()
        self.next = 0
        self.fills = self.awaited = 0
        self.reached = asyncio.Event()
        self.stopped = False

    def replace_one(self):
        if self.stopped:
            return
        slot = self.slots.take_free()
        if slot is None:
            slot = self.resident.popleft()
            self.table.store(self.slots.expert(slot), ABSENT)
            self.fence()
            self.slots.retire(slot)
            self.slots.free(slot)
            assert self.slots.take_free() == slot
        expert = self.next
        self.next = (self.next + 1) % EXPERTS
        self.slots.fill(slot, expert)
        checksum = xxhash.xxh3_64_intdigest(bytes([expert]) * NBYTES)
        self.device.submit(
            RecordRead(expert, 0, expert, 0, expert * NBYTES, NBYTES, checksum),
            slot,
            self,
            lambda error, slot: self.landed(slot, expert, error),
        )

    def view(self, slot, nbytes):
        return self.payload.view(slot * NBYTES, nbytes)

    async def replaced_all(self):
        """Wait until every slot was refilled several times."""
        self.awaited = self.fills + 2 * EXPERTS
        self.reached.clear()
        await self.reached.wait()

    def landed(self, slot, expert, error):
        if self.stopped:
            return
        assert error is None
        word = self.slots.landed(slot)
        self.fence()
        self.table.store(expert, word)
        self.resident.append(slot)
        self.fills += 1
        if self.fills == self.awaited:
            self.reached.set()
        self.replace_one()

    def close(self):
        self.stopped = True
        self.device.close()
        self.table.close()
        self.payload.close()


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "experts"
    path.write_bytes(b"".join(bytes([expert]) * NBYTES for expert in range(EXPERTS)))
    return path


class Nodes:
    """An attach server and the reader processes behind it; all of it ends with the test, whatever happens."""

    def __init__(self, churn, directory, wanted):
        self.wanted = wanted
        self.patience = 60 + wanted / 1000
        self.path = directory / "run" / "attach.sock"
        self.gone: asyncio.Queue[int] = asyncio.Queue()
        self.blocks: list[SessionBlockReader] = []
        self.processes: list[asyncio.subprocess.Process] = []
        self.messages = MessageSocket()
        offer = ArenaOffer(
            payload_fd=churn.payload.reader_fd(),
            payload_bytes=churn.payload.nbytes,
            table_fd=churn.table.reader_fd(),
            boot_id=churn.table.header.boot_id,
            slot_bytes=NBYTES,
            slots=SLOTS,
            entries=EXPERTS,
        )
        # On a machine that is busy a node may need longer to start than tokens live.
        self.server = AttachServer(self.path, offer, self.gone.put_nowait, clock=lambda: 0.0)

    async def start(self):
        block = SessionBlockReader.create(EXPERTS)
        token = self.server.offer(len(self.blocks), block_fd=block.fd, message_fd=self.messages.node_fd)
        self.blocks.append(block)
        pipe = asyncio.subprocess.PIPE
        self.processes.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", NODE, str(self.path), token.hex(), str(self.wanted), stdin=pipe, stdout=pipe
            )
        )

    async def line(self, number):
        return await asyncio.wait_for(self.processes[number].stdout.readline(), self.patience)

    async def __aenter__(self):
        await self.server.start()
        return self

    async def __aexit__(self, *_):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await self.server.close()
        for block in self.blocks:
            block.close()
        self.messages.close()


async def test_readers_keep_only_right_bytes_through_churn_a_pause_and_a_kill(tmp_path, shard, soak):
    for number in soak.rounds(1):
        (folder := tmp_path / str(number)).mkdir(mode=0o700)
        await read_among_churn(folder, shard)


async def read_among_churn(folder, shard):
    churn = Churn(shard)
    with contextlib.closing(churn):
        async with Nodes(churn, folder, KEPT) as nodes:
            for _ in range(3):
                await nodes.start()
            for _ in range(IN_FLIGHT):
                churn.replace_one()
            assert [await nodes.line(n) for n in range(3)] == [b"busy\n"] * 3

            # A node paused in the middle of a computation wakes to other bytes, and must notice.
            nodes.processes[0].send_signal(signal.SIGSTOP)
            nodes.processes[1].kill()
            assert await asyncio.wait_for(nodes.gone.get(), 60) == 1
            await asyncio.wait_for(churn.replaced_all(), 60)
            nodes.processes[0].send_signal(signal.SIGCONT)

            for n in (0, 2):
                assert (await nodes.line(n)).split()[0] == str(KEPT).encode()
                uses = nodes.blocks[n].take_uses()
                assert sum(use.decode for use in uses) == KEPT, "the daemon counts what the node counted"
                nodes.processes[n].stdin.write(b"\n")
                assert await nodes.processes[n].wait() == 0
            assert {await asyncio.wait_for(nodes.gone.get(), 60) for _ in range(2)} == {0, 2}
