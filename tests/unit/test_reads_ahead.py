"""Reads that nobody waits for: a drive begins them when it has nothing else to do, a few at a time."""

from __future__ import annotations

import mmap
import os
import queue
import threading
from pathlib import Path

import pytest
import xxhash

from tierd.devices.device import RecordRead
from tierd.devices.files import FileDevice

LARGE, SMALL = 768 << 10, 64 << 10
RECORDS = 20


class Gate:
    """A `TransferWrapper` that lets each read through when the test says so."""

    def __init__(self):
        self.begun: list[int] = []
        self.changed = threading.Condition()
        self.open: set[int] = set()
        self.closed = False
        self.broken: set[int] = set()

    def wrap(self, read, transfer):
        def gated(fd, buffers, offset):
            with self.changed:
                self.begun.append(read.expert)
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: self.closed or read.expert in self.open, 60)
            if read.expert in self.broken:
                raise OSError(5, os.strerror(5))
            return transfer(fd, buffers, offset)

        return gated

    def close(self):
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def let(self, expert):
        with self.changed:
            self.open.add(expert)
            self.changed.notify_all()

    def has_begun(self, *experts):
        """Wait until these have begun, in any order, and nothing else has."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= len(experts), 60)
            return sorted(self.begun) == sorted(experts)


class Rig:
    """A device over one file of two sizes of records: even ones are large, odd ones small."""

    def __init__(self, folder: Path, threads: int):
        path = folder / "experts-0.safetensors"
        self.sizes = [SMALL if number % 2 else LARGE for number in range(RECORDS)]
        path.write_bytes(b"".join(bytes([number]) * size for number, size in enumerate(self.sizes)))
        self.gate = Gate()
        self.memory = mmap.mmap(-1, RECORDS * LARGE)
        self.calls: list[object] = []
        self.device = FileDevice("nvme", [path], self.calls.append, threads=threads, wrapper=self.gate)
        self.landed: dict[int, object] = {}

    def view(self, slot, nbytes):
        return memoryview(self.memory)[slot * LARGE : slot * LARGE + nbytes]

    def submit(self, number, *, ahead=False):
        nbytes, offset = self.sizes[number], sum(self.sizes[:number])
        read = RecordRead(number, 0, number, 0, offset, nbytes, xxhash.xxh3_64_intdigest(bytes([number]) * nbytes))
        self.device.submit(read, number, self, lambda error, slot: self.landed.update({slot: error}), ahead=ahead)


@pytest.fixture
def make(tmp_path):
    made = []

    def make_rig(threads=4):
        made.append(Rig(tmp_path, threads))
        return made[-1]

    yield make_rig
    for rig in made:
        rig.gate.close()
        rig.device.close()


def test_a_read_ahead_begins_at_once_where_nothing_else_is_at_work(make):
    rig = make()
    rig.submit(0, ahead=True)
    assert rig.gate.has_begun(0)


@pytest.mark.parametrize("fate", ["ends well", "fails"])
def test_a_read_ahead_waits_until_the_last_byte_of_what_is_wanted_has_come(make, fate):
    rig = make()
    rig.submit(0)
    rig.submit(2)
    rig.submit(4, ahead=True)
    assert rig.gate.has_begun(0, 2)
    rig.gate.let(0)
    if fate == "fails":
        rig.gate.broken.add(2)
    rig.gate.let(2)
    assert rig.gate.has_begun(0, 2, 4)


def test_what_is_wanted_begins_beside_a_read_ahead_and_the_next_one_ahead_waits_for_it(make):
    rig = make()
    rig.submit(0, ahead=True)
    rig.submit(2, ahead=True)
    assert rig.gate.has_begun(0)
    rig.submit(4)
    assert rig.gate.has_begun(0, 4)
    rig.gate.let(0)
    rig.gate.let(4)
    assert rig.gate.has_begun(0, 2, 4)


def test_one_large_read_ahead_is_at_work_at_a_time_or_several_small_ones(make):
    rig = make(threads=8)
    for number in (0, 2, 1, 3):
        rig.submit(number, ahead=True)
    assert rig.gate.has_begun(0)
    rig.gate.let(0)
    assert rig.gate.has_begun(0, 2, 1, 3)


def test_a_read_ahead_that_was_taken_back_never_begins_and_those_behind_it_do(make):
    rig = make()
    rig.submit(0)
    rig.submit(2, ahead=True)
    rig.submit(4, ahead=True)
    assert rig.gate.has_begun(0)
    assert rig.device.withdraw(2)
    rig.gate.let(0)
    assert rig.gate.has_begun(0, 4)
    assert not rig.device.withdraw(4)


def test_a_promoted_read_begins_before_those_ahead_and_beside_what_is_wanted(make):
    rig = make()
    rig.submit(0)
    for number in (2, 4, 6):
        rig.submit(number, ahead=True)
    assert rig.gate.has_begun(0)
    rig.device.promote(4)
    assert rig.gate.has_begun(0, 4)
    rig.gate.let(0)
    rig.device.promote(4)
    rig.gate.let(4)
    assert rig.gate.has_begun(0, 2, 4)
    rig.gate.let(2)
    assert rig.gate.has_begun(0, 2, 4, 6)


def test_a_promoted_read_waits_behind_what_was_wanted_before_and_can_be_taken_back(make):
    rig = make(threads=1)
    rig.submit(0)
    assert rig.gate.has_begun(0)
    rig.submit(2, ahead=True)
    rig.submit(4)
    rig.submit(6, ahead=True)
    rig.device.promote(2)
    rig.device.promote(6)
    assert rig.device.withdraw(6)
    rig.submit(8, ahead=True)
    for number in (0, 4, 2, 8):
        rig.gate.let(number)
    assert rig.gate.has_begun(0, 4, 2, 8)
    assert rig.gate.begun == [0, 4, 2, 8]


def test_no_read_ahead_begins_beside_one_that_was_promoted_while_it_ran(make):
    rig = make(threads=8)
    rig.submit(1, ahead=True)
    assert rig.gate.has_begun(1)
    rig.device.promote(1)
    rig.submit(3, ahead=True)
    rig.submit(5)
    assert rig.gate.has_begun(1, 5)
    rig.gate.let(5)
    rig.gate.let(1)
    assert rig.gate.has_begun(1, 5, 3)


def test_the_thread_of_a_read_ahead_is_at_the_next_one_while_another_checks_it(make):
    rig, ended = make(threads=1), queue.SimpleQueue()
    rig.device._loop_call = ended.put
    rig.submit(0, ahead=True)
    rig.submit(2, ahead=True)
    rig.gate.let(0)
    ended.get(timeout=60)()
    assert rig.landed == {0: None}
    assert rig.gate.has_begun(0, 2)


def test_a_wanted_read_that_is_taken_back_is_waited_for_no_longer(make):
    rig = make(threads=1)
    rig.submit(0)
    assert rig.gate.has_begun(0)
    rig.submit(2)
    rig.submit(4, ahead=True)
    assert rig.device.withdraw(2)
    rig.gate.let(0)
    assert rig.gate.has_begun(0, 4)


def test_a_drive_that_is_closed_answers_for_the_reads_ahead_that_it_never_began(make):
    rig = make()
    rig.submit(0)
    rig.submit(2, ahead=True)
    rig.submit(4, ahead=True)
    assert rig.gate.has_begun(0)
    rig.gate.let(0)
    rig.gate.close()
    rig.device.close()
    rig.device.promote(2)
    for call in list(rig.calls):
        call()
    assert rig.landed.keys() == {0, 2, 4}
