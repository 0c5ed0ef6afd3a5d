"""Reads that ended are reported on the broker's thread: many by one call, each whatever becomes of the others."""

from __future__ import annotations

import mmap
import time

import pytest
import xxhash

from tierd.devices.device import RecordRead
from tierd.devices.files import FileDevice

RECORDS, SIZE = 6, 4096


class Loop:
    """The broker's side, which runs what it was asked to when it gets round to it."""

    def __init__(self):
        self.calls = []

    def turn(self):
        calls, self.calls[:] = list(self.calls), []
        for call in calls:
            call()


class Pages:
    """Memory by slot."""

    def __init__(self):
        self.memory = mmap.mmap(-1, RECORDS * SIZE)

    def view(self, slot, nbytes):
        return memoryview(self.memory)[slot * SIZE : slot * SIZE + nbytes]


@pytest.fixture
def reading(tmp_path):
    """A device over one file, the broker's side, and a way to have all records read with nobody told yet."""
    path = tmp_path / "experts-0.safetensors"
    path.write_bytes(b"".join(bytes([n]) * SIZE for n in range(RECORDS)))
    loop, pages = Loop(), Pages()
    device = FileDevice("nvme", [path], loop.calls.append, threads=2)

    def read_all(done):
        for n in range(RECORDS):
            check = xxhash.xxh3_64_intdigest(bytes([n]) * SIZE)
            device.submit(RecordRead(n, 0, n, 0, n * SIZE, SIZE, check), n, pages, done)
        ends = time.monotonic() + 30
        while len(device._ended) < RECORDS:
            assert time.monotonic() < ends
            time.sleep(0.001)

    yield device, loop, read_all
    device.close()


def test_all_that_ended_while_the_broker_was_busy_is_reported_by_one_call(reading):
    device, loop, read_all = reading
    landed = []
    read_all(lambda error, slot: landed.append((error, slot)))
    assert len(loop.calls) == 1
    assert not landed
    loop.turn()
    assert sorted(landed, key=lambda one: one[1]) == [(None, n) for n in range(RECORDS)]
    assert device.stats.reads == RECORDS
    assert device.stats.in_flight == 0
    read_all(lambda error, slot: landed.append((error, slot)))
    loop.turn()
    assert len(landed) == 2 * RECORDS, "the next ones call again"


def test_a_report_that_fails_takes_no_other_with_it(reading):
    device, loop, read_all = reading
    landed = []

    def done(error, slot):
        landed.append((error, slot))
        if len(landed) == 2:
            raise LookupError("a fault of whoever was told")

    read_all(done)
    with pytest.raises(LookupError):
        loop.turn()
    loop.turn()
    assert sorted(slot for _, slot in landed) == list(range(RECORDS))
    assert device.stats.in_flight == 0
