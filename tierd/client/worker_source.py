"""Experts computed by workers beside their store: activations go there, one row per chosen expert comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty

import numpy as np
from numpy.typing import NDArray

from tierd.access import Access
from tierd.addresses import Address
from tierd.api import worker_pb2 as pb
from tierd.client.bytes_source import BytesSource
from tierd.client.loop_thread import LoopThread
from tierd.client.rendezvous import rank_workers
from tierd.client.source import NothingAhead, Phase, SourceStats, StepMemory, Use
from tierd.client.worker_link import Answers, WorkerLink
from tierd.errors import DaemonUnavailable, TierdError, UsageError
from tierd.rpc import PROTOCOL

__all__ = ["WorkerSource"]

WORKER = "worker"
"""Name of the tier of experts that a worker computed with."""

_START_SECONDS = 15.0
_CLOSE_SECONDS = 10.0
_FIRST_REST = 1.0
_LONGEST_REST = 30.0
# Activations of one request; its message must not be larger than one may be.
_MAX_INPUT_BYTES = 3 << 20
_ROW = np.dtype("<f4")

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@dataclass(slots=True)
class _Pairs:
    """(row, rank, expert) of results that are wanted, row by row; three int arrays of one length."""

    rows: NDArray[np.intp]
    ranks: NDArray[np.intp]
    experts: I32

    def where(self, chosen: NDArray[np.bool_]) -> _Pairs:
        return _Pairs(self.rows[chosen], self.ranks[chosen], self.experts[chosen])


@dataclass(frozen=True, slots=True)
class _Work:
    """One layer of one step: what `RowSource.compute` was called with."""

    layer: int
    experts: I32
    inputs: F32
    outputs: F32
    step: int
    phase: Phase


@dataclass(slots=True)
class _Ask:
    """A request that is unanswered.

    Attributes:
        worker: who was asked.
        pairs: for what.
        tried: workers that were asked for it, this one included.
        until: when others are asked instead, on the monotonic clock.
        received: result rows that came.
    """

    worker: int
    pairs: _Pairs
    tried: frozenset[int]
    until: float
    received: int = 0


@dataclass(slots=True)
class _Rest:
    """A worker that did not answer in time is left alone for a while."""

    until: float = 0.0
    pause: float = _FIRST_REST


class WorkerSource(NothingAhead):
    """An `ExpertSource` whose experts are computed elsewhere, as far as workers do it; the rest comes as bytes.

    Each worker has a share of the experts, the same on every node. All of a layer's workers are asked before any
    answer is read. What one does not deliver in time, others are asked for, and after them the daemon, for the bytes:
    the node computes with these itself. All of them have the same numerics, so that no bit depends on who computed.

    Args:
        workers: address and weight of each.
        by_bytes: what brings experts that no worker computed with.
        access: how to reach the workers.
        name: of this node, for operators.
        numerics: of the node's kernels; workers with others are refused.
        kernel_path: the same.
        patience: seconds after which another one is asked for what a worker was asked for.
        loop: the process's gRPC loop.
        tell: takes a line for people.

    Raises:
        SessionRefused: a worker computes with another store or in another way; both sides are named.
        AccessDenied: a worker wants another token.
        DaemonUnavailable: no worker answers.
    """

    def __init__(
        self,
        workers: Sequence[tuple[Address, float]],
        by_bytes: BytesSource,
        *,
        access: Access,
        name: str,
        numerics: str,
        kernel_path: str,
        patience: float = 2.0,
        loop: LoopThread,
        tell: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.store = by_bytes.store
        self.by_bytes = by_bytes
        self.stats = by_bytes.stats  # of both ways together
        self.bytes_sent = self.bytes_received = 0
        geometry = self.store.manifest.geometry
        self._geometry = geometry
        self._ranks = rank_workers([(address.name, weight) for address, weight in workers], geometry.experts_total)
        self._patience = patience
        self._loop = loop
        self._tell = tell
        self._ids = 0
        self._asks: dict[int, _Ask] = {}
        self._rests = [_Rest() for _ in workers]
        self._answers: Answers = Answers()
        hello = pb.ComputeHello(
            protocol=PROTOCOL,
            fingerprint=self.store.fingerprint,
            numerics=numerics,
            kernel_path=kernel_path,
            name=name,
        )
        self._links = [
            WorkerLink(number, address, hello, access, self._answers) for number, (address, _) in enumerate(workers)
        ]
        try:
            for link in self._links:
                self._loop.run(link.start(), seconds=_START_SECONDS, what=f"connecting to the worker at {link.address}")
            self._check_start()
        except BaseException:
            self._close_links()
            raise

    def __repr__(self) -> str:
        return f"<WorkerSource {self._links}>"

    @property
    def direct(self) -> None:
        """None: the experts are elsewhere, so that each layer comes to `compute`."""

    @property
    def step_memory(self) -> StepMemory | None:
        """None: nobody listens."""

    def visit(
        self,
        layer: int,
        experts: Sequence[int],
        use: Use,
        *,
        step: int,
        phase: Phase,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """See `ExpertSource.visit`: the bytes, for the node to compute with."""
        self.by_bytes.visit(layer, experts, use, step=step, phase=phase, meanwhile=meanwhile)

    def compute(self, layer: int, experts: I32, inputs: F32, outputs: F32, *, step: int, phase: Phase) -> list[int]:
        """See `RowSource.compute`."""
        begun = time.monotonic()
        for expert in np.unique(experts[experts >= 0]).tolist():
            self._geometry.flat(layer, expert)
        left: set[int] = set()
        self._clear_answers()
        try:
            # As many rows at a time as a worker takes: one message for each.
            most = max(1, min([link.welcome.max_rows for link in self._links if link.welcome is not None] or [1]))
            for first in range(0, len(experts), most):
                part = slice(first, first + most)
                work = _Work(layer, experts[part], inputs[part], outputs[part], step, phase)
                rows, ranks = np.nonzero(work.experts >= 0)
                left |= self._send(work, _Pairs(rows, ranks, work.experts[rows, ranks]), frozenset())
                while self._asks:
                    for pairs, tried in self._take(work):
                        left |= self._send(work, pairs, tried)
        finally:
            self._asks.clear()  # what still comes of them is nobody's
            self.stats.wait_seconds += time.monotonic() - begun
        self.stats.ask(0, visits=int(not left))
        return [expert for expert in dict.fromkeys(experts.T.ravel().tolist()) if expert in left]

    def forget_counts(self) -> None:
        """Count from 0 again."""
        self.stats = self.by_bytes.stats = SourceStats()

    def leave_workers(self) -> None:
        """End the workers' streams; the source of bytes goes on."""
        self._close_links()

    def close(self) -> None:
        """End all streams."""
        self._close_links()
        self.by_bytes.close()

    # Asking.

    def _send(self, work: _Work, pairs: _Pairs, tried: frozenset[int]) -> set[int]:
        """Ask the first worker of each expert that can be asked; returns the experts that nobody can be asked for."""
        owners = np.full(int(pairs.experts.max(initial=-1)) + 1, -1, np.intp)
        now = time.monotonic()
        usable = [
            number not in tried and link.welcome is not None and rest.until <= now
            for number, (link, rest) in enumerate(zip(self._links, self._rests, strict=True))
        ]
        start = self._geometry.layer_start(work.layer)
        for expert in np.unique(pairs.experts).tolist():
            ranking = self._ranks[start + expert].tolist()
            owners[expert] = next((worker for worker in ranking if usable[worker]), -1)
        owner = owners[pairs.experts]
        for worker in np.unique(owner[owner >= 0]).tolist():
            self._ask(work, worker, pairs.where(owner == worker), tried)
        return set(pairs.experts[owner < 0].tolist())

    def _ask(self, work: _Work, worker: int, pairs: _Pairs, tried: frozenset[int]) -> None:
        link, welcome = self._links[worker], self._links[worker].welcome
        most = max(1, min(welcome.max_rows if welcome is not None else 1, _MAX_INPUT_BYTES // work.inputs.strides[0]))
        rows = np.unique(pairs.rows)
        for first in range(0, len(rows), most):
            part = rows[first : first + most]
            mine = pairs.where(np.isin(pairs.rows, part))
            chosen = np.full((len(part), work.experts.shape[1]), -1, "<i4")
            chosen[np.searchsorted(part, mine.rows), mine.ranks] = mine.experts
            self._ids += 1
            self._asks[self._ids] = _Ask(worker, mine, tried | {worker}, time.monotonic() + self._patience)
            message = pb.Rows(
                id=self._ids,
                step=work.step,
                layer=work.layer,
                prefill=work.phase is Phase.PREFILL,
                deadline_ms=max(1, int(self._patience * 1000)),
                rows=len(part),
                inputs=work.inputs[part].astype(_ROW, copy=False).tobytes(),
                experts=chosen.tobytes(),
            )
            self.bytes_sent += len(message.inputs) + len(message.experts)
            self.stats.messages += 1
            self._loop.call(link.send, pb.ComputeRequest(rows=message))

    # Answers.

    def _clear_answers(self) -> None:
        """What came between two layers answers no request; a stream that ended then must not end the next requests."""
        for _ in range(self._answers.qsize()):
            _, answer = self._answers.get_nowait()
            if isinstance(answer, TierdError):
                self._tell_of_loss(answer)

    def _take(self, work: _Work) -> list[tuple[_Pairs, frozenset[int]]]:
        """Wait for what comes next; returns what has to be asked for elsewhere."""
        now = time.monotonic()
        until = min(ask.until for ask in self._asks.values())
        try:
            worker, answer = self._answers.get(timeout=max(0.0, until - now))
        except Empty:
            return self._too_late(time.monotonic())
        if isinstance(answer, TierdError):
            self._tell_of_loss(answer)
            return self._lost([number for number, ask in self._asks.items() if ask.worker == worker])
        kind = answer.WhichOneof("message")
        if kind == "computed":
            return self._computed(work, worker, answer.computed)
        if kind == "not_computed":
            told = answer.not_computed
            if told.id in self._asks:
                self._tell(f"the worker at {self._links[worker].address} could not compute: {told.detail}")
            return self._lost([told.id])
        return []

    def _computed(self, work: _Work, worker: int, answer: pb.Computed) -> list[tuple[_Pairs, frozenset[int]]]:
        ask = self._asks.get(answer.id)
        if ask is None or ask.worker != worker:
            return []  # too late: somebody else did it
        hidden = work.outputs.shape[-1]
        count, rest = divmod(len(answer.outputs), hidden * _ROW.itemsize)
        end = answer.first + count
        whole = len(ask.pairs.rows)
        if rest or answer.first != ask.received or end > whole or answer.last != (end == whole):
            self._tell(f"the worker at {self._links[worker].address} sent {len(answer.outputs)} bytes that do not fit")
            self._rest(worker)
            return self._lost([answer.id])
        self.bytes_received += len(answer.outputs)
        part = slice(answer.first, end)
        arrived = np.frombuffer(answer.outputs, _ROW).reshape(-1, hidden)
        work.outputs[ask.pairs.rows[part], ask.pairs.ranks[part]] = arrived
        ask.received = end
        if answer.last:
            del self._asks[answer.id]
            self._rests[worker] = _Rest()
            self._count(len(np.unique(ask.pairs.experts)), answer)
        return []

    def _count(self, experts: int, answer: pb.Computed) -> None:
        stats = self.stats
        stats.ask(experts, visits=0)
        misses = min(answer.misses, experts)
        joined = min(answer.joined, experts - misses)
        for outcome, count in (("miss", misses), ("joined", joined), ("hit", experts - misses - joined)):
            stats.count(WORKER, outcome, count)

    def _too_late(self, now: float) -> list[tuple[_Pairs, frozenset[int]]]:
        late = [number for number, ask in self._asks.items() if ask.until <= now]
        for worker in {self._asks[number].worker for number in late}:
            address = self._links[worker].address
            self._tell(f"the worker at {address} did not answer within {self._patience:g} s; others do its work")
            self._rest(worker)
        return self._lost(late)

    def _lost(self, numbers: Sequence[int]) -> list[tuple[_Pairs, frozenset[int]]]:
        asks = [self._asks.pop(number) for number in numbers if number in self._asks]
        return [(ask.pairs, ask.tried) for ask in asks]

    def _tell_of_loss(self, trouble: TierdError) -> None:
        self._tell(f"{trouble.message}; others do its work")

    def _rest(self, worker: int) -> None:
        rest = self._rests[worker]
        self._rests[worker] = _Rest(time.monotonic() + rest.pause, min(2 * rest.pause, _LONGEST_REST))

    # Beginning and end.

    def _check_start(self) -> None:
        troubles = [link.trouble for link in self._links if link.welcome is None and link.trouble is not None]
        for trouble in troubles:
            if isinstance(trouble, UsageError):
                raise trouble
        if len(troubles) == len(self._links):
            raise DaemonUnavailable(
                f"no worker answers: {troubles[0].message}", hint="Start one with `compute-node worker`."
            )
        for trouble in troubles:
            self._tell(f"{trouble.message}; others do its work until it answers")

    def _close_links(self) -> None:
        for link in self._links:
            self._loop.run(link.close(), seconds=_CLOSE_SECONDS, what=f"leaving the worker at {link.address}")
