"""What every device must do: the broker trusts it with memory that it cannot take back.

A device subclasses `DeviceConformance` and says how it is made; the suite is the same for all.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
from pathlib import Path

import pytest
import xxhash

from tierd.devices import pieces
from tierd.devices.device import Device, RecordRead
from tierd.devices.drive import Drive as Member
from tierd.devices.fault_plan import FaultPlan
from tierd.devices.faults import FaultInjector
from tierd.devices.files import FileDevice
from tierd.devices.replicas import ReplicaSet
from tierd.devices.throttle import Throttle
from tierd.devices.transfers import Chain
from tierd.errors import ChecksumMismatch, DataLoss, DriveError

SHARDS, RECORDS = 3, 8
SIZES = (4096, 20480, 69632)


def record_of(expert):
    """Bytes of which each follows from the expert and its place."""
    size = SIZES[expert % len(SIZES)]
    turn = bytes((expert * 7 + n) & 0xFF for n in range(251))
    return (turn * -(-size // len(turn)))[:size]


class OneSlot:
    """Memory of a single attempt, with no spare."""

    def __init__(self, into):
        self.into = into

    def view(self, slot, nbytes):
        del slot, nbytes
        return self.into

    def take_spare(self, expert):
        del expert


class Drive:
    """Shard files whose every byte follows from its expert, a device over them, and the broker's side of its calls."""

    def __init__(self, directory, make):
        self.paths = [directory / f"experts-{n}.safetensors" for n in range(SHARDS)]
        self.reads: list[RecordRead] = []
        self.content: list[bytes] = []
        for shard, path in enumerate(self.paths):
            with path.open("wb") as file:
                file.write(b"header".ljust(4096))
                for index in range(RECORDS):
                    expert = shard * RECORDS + index
                    data = record_of(expert)
                    self.reads.append(
                        RecordRead(expert, shard, index, shard, file.tell(), len(data), xxhash.xxh3_64_intdigest(data))
                    )
                    self.content.append(data)
                    file.write(data)
                os.fsync(file.fileno())
        self.thread = threading.get_ident()
        self.calls: list[int] = []
        self.slots = 0
        self.device: Device = make(self.paths, asyncio.get_running_loop().call_soon_threadsafe)

    def memory(self, nbytes):
        """Page-aligned memory filled with a pattern that no record has."""
        block = mmap.mmap(-1, max(nbytes, 4096))
        block.write(b"\xaa" * len(block))
        return memoryview(block)[:nbytes]

    def submit(self, read, into, *, ahead=False):
        """A future of the error that `done` brings; it fails if `done` comes twice, or on another thread."""
        future = asyncio.get_running_loop().create_future()

        slot = self.slots = self.slots + 1

        def done(error, landed):
            assert threading.get_ident() == self.thread
            assert landed == slot
            self.calls.append(read.expert)
            future.set_result(error)

        self.device.submit(read, slot, OneSlot(into), done, ahead=ahead)
        return future

    async def read(self, read, into=None):
        into = self.memory(read.nbytes) if into is None else into
        return await asyncio.wait_for(self.submit(read, into), 60), into

    async def reads_right(self, read):
        error, into = await self.read(read)
        assert error is None
        return into == self.content[read.expert]


class DeviceConformance:
    """The suite. `make` returns the device under test."""

    def make(self, paths, loop_call) -> Device:
        raise NotImplementedError

    @pytest.fixture
    async def drive(self, tmp_path):
        made = Drive(tmp_path, self.make)
        yield made
        made.device.close()
        await asyncio.sleep(0)

    async def test_it_is_a_device(self, drive):
        assert isinstance(drive.device, Device)
        assert drive.device.name

    async def test_every_record_is_read_right(self, drive):
        for read in drive.reads:
            assert await drive.reads_right(read)

    async def test_submit_returns_before_done(self, drive):
        pending = drive.submit(drive.reads[0], drive.memory(drive.reads[0].nbytes))
        assert not pending.done()
        assert drive.device.stats.in_flight == 1
        assert await pending is None
        assert drive.device.stats.in_flight == 0

    async def test_a_read_is_withdrawn_before_it_begins_or_not_at_all(self, drive):
        wanted = drive.reads * 4
        memory = [drive.memory(read.nbytes) for read in wanted]
        pending = list(map(drive.submit, wanted, memory))
        withdrawn = {slot for slot in range(len(wanted), 0, -1) if drive.device.withdraw(slot)}
        assert not any(drive.device.withdraw(slot) for slot in withdrawn)
        assert drive.device.stats.in_flight == len(wanted) - len(withdrawn)
        for slot, (read, into, future) in enumerate(zip(wanted, memory, pending, strict=True), start=1):
            if slot in withdrawn:
                assert not future.done()
            else:
                assert await future is None
                assert into == drive.content[read.expert]
        assert await drive.reads_right(drive.reads[0])
        assert not any(pending[slot - 1].done() for slot in withdrawn)
        assert all(memory[slot - 1] == b"\xaa" * memory[slot - 1].nbytes for slot in withdrawn)
        assert not drive.device.withdraw(1)

    async def test_reads_ahead_all_end_promoted_or_not_and_promoting_harms_nothing_else(self, drive):
        wanted = drive.reads * 3
        memory = [drive.memory(read.nbytes) for read in wanted]
        aheads = [number % 3 > 0 for number in range(len(wanted))]
        pending = [
            drive.submit(read, into, ahead=ahead) for read, into, ahead in zip(wanted, memory, aheads, strict=True)
        ]
        for slot in range(len(wanted) + 1, -1, -2):
            drive.device.promote(slot)
        assert await asyncio.gather(*pending) == [None] * len(wanted)
        assert all(into == drive.content[read.expert] for read, into in zip(wanted, memory, strict=True))
        assert sorted(drive.calls) == sorted(read.expert for read in wanted)
        assert drive.device.stats.in_flight == 0
        drive.device.promote(1)

    async def test_many_reads_at_once_each_get_their_own_bytes_and_one_done(self, drive):
        wanted = [drive.reads[n * 5 % len(drive.reads)] for n in range(200)]
        memory = [drive.memory(read.nbytes) for read in wanted]
        errors = await asyncio.gather(*map(drive.submit, wanted, memory))
        assert errors == [None] * 200
        assert all(into == drive.content[read.expert] for read, into in zip(wanted, memory, strict=True))
        assert sorted(drive.calls) == sorted(read.expert for read in wanted)
        stats = drive.device.stats
        assert (stats.reads, stats.errors, stats.in_flight) == (200, 0, 0)
        assert stats.bytes == sum(read.nbytes for read in wanted)
        assert stats.read_seconds > 0
        assert stats.queue_seconds > 0

    @pytest.mark.parametrize("cut", [1, 4096, 8192 + 100])
    async def test_a_file_cut_after_start_is_a_named_error_and_other_shards_go_on(self, drive, cut):
        last = drive.reads[RECORDS * 2 - 1]
        path = drive.paths[last.shard]
        os.truncate(path, path.stat().st_size - cut)
        missing = min(cut, last.nbytes)
        error, _ = await drive.read(last)
        assert isinstance(error, DriveError)
        assert f"{missing} of {last.nbytes} bytes at offset {last.offset} are missing" in error.message
        assert str(path) in error.message
        assert (error.path, error.offset, error.length) == (str(path), last.offset, last.nbytes)
        assert f"layer {last.layer}, expert {last.index}" in error.message
        assert drive.device.stats.errors == 1
        assert await drive.reads_right(drive.reads[0])

    async def test_a_flipped_byte_is_found(self, drive):
        bad = drive.reads[4]
        with drive.paths[bad.shard].open("r+b") as file:
            file.seek(bad.offset + bad.nbytes - 1)
            file.write(bytes([drive.content[bad.expert][-1] ^ 1]))
            os.fsync(file.fileno())
        error, _ = await drive.read(bad)
        assert isinstance(error, ChecksumMismatch | DataLoss)
        assert (error.path, error.offset, error.length) == (str(drive.paths[bad.shard]), bad.offset, bad.nbytes)
        assert drive.device.stats.checksum_failures == drive.device.stats.errors == 1
        assert await drive.reads_right(drive.reads[3])

    async def test_a_vanished_file_is_served_in_full_or_named(self, drive):
        lost = drive.reads[0]
        drive.paths[0].unlink()
        error, into = await drive.read(lost)
        if error is None:
            assert into == drive.content[lost.expert]
        else:
            assert str(drive.paths[0]) in error.message
        assert await drive.reads_right(drive.reads[-1])

    async def test_a_file_put_in_the_place_of_another_never_gives_its_bytes(self, drive):
        read = drive.reads[2]
        drive.paths[1].rename(drive.paths[0])
        error, into = await drive.read(read)
        assert error is not None or into == drive.content[read.expert]

    async def test_requests_that_make_no_sense_are_errors_in_done_and_harm_nobody(self, drive):
        read = drive.reads[1]
        page = drive.memory(read.nbytes + 4096)
        for wrong, into in [
            (RecordRead(1, 0, 1, SHARDS, read.offset, read.nbytes, read.xxh3), page[: read.nbytes]),
            (RecordRead(1, 0, 1, -1, read.offset, read.nbytes, read.xxh3), page[: read.nbytes]),
            (RecordRead(1, 0, 1, 0, read.offset + 1, read.nbytes, read.xxh3), page[: read.nbytes]),
            (RecordRead(1, 0, 1, 0, read.offset, 100, read.xxh3), page[:100]),
            (read, page[: read.nbytes - 4096]),
            (read, page[1 : read.nbytes + 1]),
            (read, page[: read.nbytes].toreadonly()),
        ]:
            error, _ = await drive.read(wrong, into)
            assert isinstance(error, DriveError)
            assert error.errno == errno.EINVAL
            assert f"layer {wrong.layer}" in error.message
        assert await drive.reads_right(read)
        assert drive.device.stats.direct == self.make_is_direct

    make_is_direct = True

    async def test_memory_is_not_touched_after_done(self, drive):
        os.truncate(drive.paths[0], drive.reads[3].offset)
        memory = [drive.memory(read.nbytes) for read in drive.reads]
        for pending, into in [(drive.submit(read, m), m) for read, m in zip(drive.reads, memory, strict=True)]:
            await pending
            into[:] = b"\x55" * into.nbytes
        drive.device.close()
        assert all(into == b"\x55" * into.nbytes for into in memory)

    async def test_closing_ends_every_read_in_flight_once(self, drive):
        wanted = drive.reads * 10
        memory = [drive.memory(read.nbytes) for read in wanted]
        pending = list(map(drive.submit, wanted, memory))
        drive.device.close()
        drive.device.close()
        late = drive.submit(drive.reads[0], drive.memory(drive.reads[0].nbytes))
        for read, into, error in zip(wanted, memory, await asyncio.gather(*pending), strict=True):
            if error is None:
                assert into == drive.content[read.expert]
            else:
                assert error.errno == errno.ECANCELED
        assert (await late).errno == errno.ECANCELED
        assert len(drive.calls) == len(wanted) + 1
        assert drive.device.stats.in_flight == 0

    async def test_closing_gives_back_threads_and_descriptors(self, tmp_path):
        # The checksum library and the loop open what they need at their first use.
        first = Drive(tmp_path, self.make)
        await first.reads_right(first.reads[0])
        first.device.close()
        threads, descriptors = threading.active_count(), open_descriptors()
        second = Drive(tmp_path, self.make)
        await second.reads_right(second.reads[0])
        second.device.close()
        assert threading.active_count() == threads
        assert open_descriptors() == descriptors


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


class TestDirectFileDevice(DeviceConformance):
    def make(self, paths, loop_call):
        return FileDevice("nvme", paths, loop_call, threads=3)

    async def test_reads_bypass_the_page_cache(self, drive):
        assert drive.device.stats.direct


class TestBufferedFileDevice(DeviceConformance):
    make_is_direct = False

    def make(self, paths, loop_call):
        return FileDevice("nas", paths, loop_call, threads=3, direct=False)


@pytest.mark.parametrize("threads", [1, 3])
class TestFileDeviceThatReadsInPieces(DeviceConformance):
    @pytest.fixture(autouse=True)
    def large_records(self, monkeypatch, threads):
        self.threads = threads
        monkeypatch.setattr(pieces, "PIECE_BYTES", 8192)

    def make(self, paths, loop_call):
        return FileDevice("slow", paths, loop_call, threads=self.threads)


class TestThrottledAndWatchedDevice(DeviceConformance):
    def make(self, paths, loop_call):
        self.injector = FaultInjector(FaultPlan(()), "nvme")
        throttle = Throttle(bytes_per_second=1e9, latency=1e-4)
        return FileDevice("nvme", paths, loop_call, threads=3, wrapper=Chain([self.injector, throttle]))

    async def test_the_wrapper_saw_the_bytes_that_the_device_counts(self, drive):
        for read in drive.reads:
            await drive.read(read)
        os.truncate(drive.paths[0], drive.reads[1].offset + 8192)
        await drive.read(drive.reads[1])
        assert drive.device.stats.bytes == self.injector.bytes > sum(read.nbytes for read in drive.reads)


class TestReplicaSetOfOne(DeviceConformance):
    def make(self, paths, loop_call):
        device = FileDevice("nvme", paths, loop_call, threads=3)
        return ReplicaSet(asyncio.get_running_loop(), [Member(device, range(SHARDS))])


class TestReplicaSetOfASplitStore(DeviceConformance):
    """Every shard lies on one drive only, so that each failure is seen as it is."""

    def make(self, paths, loop_call):
        first = FileDevice("nvme", [paths[0], None, paths[2]], loop_call, threads=3)
        second = FileDevice("also1", [None, paths[1], None], loop_call, threads=3)
        return ReplicaSet(asyncio.get_running_loop(), [Member(first, {0, 2}), Member(second, {1})])
