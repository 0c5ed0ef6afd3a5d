"""How much of the waiting prefetch hides, on virtual time: a node that walks through layers, a drive, the real broker.

The machine's load does not matter here, and neither does luck: the same numbers every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from simulation.clock import VirtualClock
from simulation.memory import PlainSessions, plain_arena
from simulation.records import RECORD_BYTES, VirtualStore

from compute_node.bench.drawn_hints import DrawnHints
from tierd.arena.table import ABSENT
from tierd.broker.broker import Broker
from tierd.broker.reading_ahead import PrefetchOptions
from tierd.devices.device import AttemptMemory, DeviceStats, ReadDone, RecordRead
from tierd.policy.expected_frequency import ExpectedFrequency
from tierd.prefetch.hint import Hint
from tierd.prefetch.throttle import Throttle
from tierd.requests import AcquireRequest, Granted, Phase, Refused

__all__ = ["Pace", "QueueingDrive", "Walk"]

_SESSION = 1
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Pace:
    """Virtual seconds: of OLMoE-1B-7B's sizes on one core, and of what a node does besides.

    Attributes:
        dense: of a layer without its experts.
        expert: of one expert.
        head: of the LM head.
        message: until the other side has one.
        stop: of a node's own work where a layer lacks something.
        look: of looking ahead from a layer.
        read: of one record, while the drive does nothing else.
    """

    dense: float = 0.0012
    expert: float = 0.00026
    head: float = 0.005
    message: float = 0.0004
    stop: float = 0.0003
    look: float = 0.00015
    read: float = 0.0005


class QueueingDrive:
    """A drive that delivers one record after the other, in the order in which its threads began them."""

    def __init__(self, store: VirtualStore, clock: VirtualClock, seconds: float) -> None:
        self.name = "queueing"
        self.stats = DeviceStats()
        self._store = store
        self._clock = clock
        self._seconds = seconds
        self._free_at = 0.0
        self._idle = _THREADS
        self._waiting: deque[tuple[RecordRead, int, AttemptMemory, ReadDone]] = deque()
        self._ahead: deque[tuple[RecordRead, int, AttemptMemory, ReadDone]] = deque()

    def submit(
        self, read: RecordRead, slot: int, memory: AttemptMemory, done: ReadDone, *, ahead: bool = False
    ) -> None:
        """See `Device.submit`."""
        (self._ahead if ahead else self._waiting).append((read, slot, memory, done))
        self._go_on()

    def promote(self, slot: int) -> None:
        """See `Device.promote`."""
        for job in self._ahead:
            if job[1] == slot:
                self._ahead.remove(job)
                self._waiting.append(job)
                self._go_on()
                return

    def withdraw(self, slot: int) -> bool:
        """See `Device.withdraw`: what a thread has begun stays."""
        for waiting in (self._waiting, self._ahead):
            for job in waiting:
                if job[1] == slot:
                    waiting.remove(job)
                    return True
        return False

    def close(self) -> None:
        """Nothing to give back."""

    def _go_on(self) -> None:
        while self._idle and (self._waiting or (self._ahead and self._idle == _THREADS)):
            self._idle -= 1
            job, now = (self._waiting or self._ahead).popleft(), self._clock.time()
            self._free_at = max(now, self._free_at) + self._seconds
            self._clock.call_later(self._free_at - now, partial(self._land, *job))

    def _land(self, read: RecordRead, slot: int, memory: AttemptMemory, done: ReadDone) -> None:
        memory.view(slot, RECORD_BYTES)[:] = self._store.content[read.expert]
        self._idle += 1
        done(None, slot)
        self._go_on()


class Walk:
    """Decodes along given routes, as a node does: residents first, then what lands; hints in each layer.

    Args:
        routes: int32 [tokens, layers, k].
        experts: of a layer.
        slots: of the arena.
        pace: how long everything takes.
        throttle: the daemon's.

    Attributes:
        missed: experts that were not in RAM when they were wanted.
        waited: virtual seconds in which there was nothing to compute on.
        hinted: hints sent.
    """

    def __init__(
        self, routes: NDArray[np.int32], experts: int, slots: int, pace: Pace, throttle: Throttle | None = None
    ) -> None:
        layers, chosen = routes.shape[1:]
        self.clock = VirtualClock()
        self.missed, self.waited, self.hinted = 0, 0.0, 0
        self._routes, self._experts, self._pace = routes, experts, pace
        store = VirtualStore(layers, experts)
        arena, _payload, self._table = plain_arena(slots=slots, slot_bytes=RECORD_BYTES, experts=len(store))
        self._uses = PlainSessions(len(store))
        self._broker = Broker(
            catalogue=store,
            memory=arena,
            policy=ExpectedFrequency(),
            device=QueueingDrive(store, self.clock, pace.read),
            clock=self.clock,
            max_experts_per_acquire=2 * chosen,
            sessions=self._uses,
            prefetch=PrefetchOptions(depth=lambda: _THREADS, most_per_hint=2 * chosen, throttle=throttle),
        )
        self._broker.open_session(_SESSION, self)
        self._landed: deque[int] = deque()
        self._step = self._acquires = 0

    def answered(self, acquire_id: int, granted: list[Granted], refused: list[Refused]) -> None:
        """See `Listener.answered`; it takes a message until the node knows."""
        del acquire_id
        assert not refused
        for grant in granted:
            self.clock.call_later(self._pace.message, partial(self._landed.append, grant.expert))

    def absent(self, layer: int) -> NDArray[np.bool_]:
        """See `ExpertSource.absent`."""
        words = self._table.words[layer * self._experts : (layer + 1) * self._experts]
        absent: NDArray[np.bool_] = np.asarray(words) == ABSENT
        return absent

    def hint(
        self, layer: int, experts: Sequence[int], probabilities: Sequence[float], *, step: int, lead_seconds: float
    ) -> None:
        """See `ExpertSource.hint`."""
        self.hinted += 1
        said = Hint(step, layer, tuple(experts), tuple(probabilities), lead_seconds)
        self.clock.call_later(self._pace.message, lambda: self._broker.hint(_SESSION, said))

    def run(self, hints: DrawnHints | None) -> float:
        """The whole text once; returns virtual seconds per token."""
        begun = self.clock.time()
        if hints is not None:
            hints.restart()
        for position in range(len(self._routes)):
            started = self.clock.time()
            self._step += 1
            if hints is not None:
                hints.begin([0], step=self._step, decode=True)
            for layer in range(self._routes.shape[1]):
                self.clock.advance(self._pace.dense)
                self._layer(layer, self._routes[position, layer].tolist(), hints)
            self.clock.advance(self._pace.head)
            if hints is not None:
                hints.end(self.clock.time() - started)
        return (self.clock.time() - begun) / len(self._routes)

    def _layer(self, layer: int, wanted: list[int], hints: DrawnHints | None) -> None:
        pace, absent = self._pace, self.absent(layer)
        there = [expert for expert in wanted if not absent[expert]]
        missing = [expert for expert in wanted if absent[expert]]
        hinted = self.hinted
        if hints is not None and hints.active:
            hints.passing(layer, np.array([wanted], np.int32))
            self.clock.advance(pace.look if self.hinted > hinted else 0.0)
        if missing:
            self.clock.advance(pace.stop)
            self._acquires += 1
            request = AcquireRequest(
                self._acquires, layer, tuple(missing), Phase.DECODE, 60.0, False, tuple(there), self._step
            )
            self.clock.call_later(pace.message, lambda: self._broker.acquire(_SESSION, request))
        for expert in there:
            self._uses.note_use(_SESSION, layer * self._experts + expert, self._step)
        self.clock.advance(pace.expert * len(there))
        if not missing:
            return
        if hints is not None and hints.active:
            self.clock.advance(pace.look)
            hints.meanwhile(layer, np.zeros((1, 1), np.float32))
        self.missed += len(missing)
        for _ in missing:
            since = self.clock.time()
            while not self._landed:
                assert self.clock.step()
            self.waited += self.clock.time() - since
            self._landed.popleft()
            self.clock.advance(pace.expert)
