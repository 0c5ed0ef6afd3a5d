"""Drives that do what a script says, on a virtual clock, behind a replica set and before an arena."""

from __future__ import annotations

import errno
from collections import deque
from functools import partial

from simulation.clock import VirtualClock
from simulation.memory import plain_arena

from tierd.devices.device import DeviceStats, RecordRead
from tierd.devices.drive import Drive
from tierd.devices.replicas import ReplicaSet
from tierd.errors import DriveError

__all__ = ["NBYTES", "SECONDS", "Hang", "ScriptedDrive", "World", "fails_first", "io_error"]

NBYTES = 64
SLOTS, EXPERTS, SPARES = 8, 400, 5
SECONDS = 0.01
"""What a read takes on a sound drive."""


def read_of(expert):
    return RecordRead(expert, 0, expert, expert % 4, 4096 * expert, NBYTES, 0)


def io_error(number=errno.EIO):
    return DriveError("drive: input/output error", path="/x/shard", errno=number)


class Hang:
    """A read that returns only when the test says so."""


class ScriptedDrive:
    """A drive that does with each read what its script says: seconds, or an error after them, or a hang."""

    def __init__(self, name, clock, *, workers=4, script=None):
        self.name = name
        self.stats = DeviceStats()
        self.clock = clock
        self.script = script or (lambda _read, _number: SECONDS)
        self.begun = []
        self.promoted = []
        self.hung = []
        self.waiting = deque()
        self.free_workers = workers
        self.closed = False

    def submit(self, read, slot, memory, done, *, ahead=False):
        del ahead
        self.stats.in_flight += 1
        self.waiting.append((read, slot, memory.view(slot, NBYTES), done))
        self.start()

    def promote(self, slot):
        self.promoted.append(slot)

    def withdraw(self, slot):
        for job in self.waiting:
            if job[1] == slot:
                self.waiting.remove(job)
                self.stats.in_flight -= 1
                return True
        return False

    def start(self):
        while self.waiting and self.free_workers:
            self.free_workers -= 1
            job = self.waiting.popleft()
            fate = self.script(job[0], len(self.begun))
            self.begun.append(job[0].expert)
            if isinstance(fate, Hang):
                self.hung.append(job)
            else:
                error = fate if isinstance(fate, DriveError) else None
                self.clock.call_later(SECONDS if error else fate, lambda job=job, error=error: self.end(job, error))

    def end(self, job, error=None):
        read, slot, into, done = job
        into[:] = bytes([read.expert % 251]) * NBYTES
        self.free_workers += 1
        self.stats.in_flight -= 1
        self.stats.reads += error is None
        self.stats.errors += error is not None
        done(error, slot)
        self.start()

    def release(self):
        while self.hung:
            self.end(self.hung.pop())

    def close(self):
        self.closed = True


class World:
    """Drives, an arena, and what came of each read."""

    def __init__(self, *names, spares=SPARES, remeasure=False, **scripts):
        self.clock = VirtualClock()
        self.devices = {name: ScriptedDrive(name, self.clock, script=scripts.get(name)) for name in names}
        self.drives = {
            name: Drive(device, range(4), bandwidth=NBYTES / SECONDS, remeasure=remeasure)
            for name, device in self.devices.items()
        }
        self.set = ReplicaSet(self.clock, list(self.drives.values()))
        self.arena, self.payload, _ = plain_arena(slots=SLOTS, slot_bytes=NBYTES, experts=EXPERTS, spares=spares)
        self.results = {}

    def submit(self, expert, *, ahead=False):
        slot = self.arena.take()
        assert slot is not None, "the set kept a slot"
        self.arena.fill(slot, expert)
        landed = partial(self.landed, expert)
        self.set.submit(read_of(expert), slot, self.arena, landed, ahead=ahead)

    def landed(self, expert, error, slot):
        assert expert not in self.results
        self.results[expert] = error
        if error is None:
            self.arena.publish(slot)
            assert self.payload.view(slot * NBYTES, NBYTES) == bytes([expert % 251]) * NBYTES
            self.arena.unpublish([slot])
            # Back on the free list, as after an eviction.
            self.arena.fill(slot, expert)
        self.arena.give_back(slot)

    def fetch(self, *experts, within=1.0):
        """Read these at once; the errors or None in their order, which must come in time."""
        for expert in experts:
            self.submit(expert)
        self.clock.advance(within)
        return [self.results.pop(expert) for expert in experts]

    def train(self, count=80):
        """Let the set learn how fast its drives are."""
        for expert in range(300, 300 + count // 2):
            assert self.fetch(expert, expert - 100) == [None, None]

    def stats(self, name):
        return self.devices[name].stats

    def at_rest(self):
        counts = self.arena.counts()
        assert counts.free == SLOTS + self.arena.spares, counts
        assert self.arena._spares_in_use == 0
        assert not self.set._flights
        assert not self.set._by_slot
        assert all(drive.speed.queued_bytes == 0 and drive.hanging == 0 for drive in self.drives.values())
        assert all(device.stats.in_flight == 0 for device in self.devices.values())


def fails_first(count, error):
    return lambda _read, number: error if number < count else SECONDS
