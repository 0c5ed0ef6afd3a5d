"""Experts of a daemon on another host, fetched as bytes into this node's own RAM."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import Empty

import numpy as np

from tierd.access import Access
from tierd.addresses import Address
from tierd.client.loop_thread import LoopThread
from tierd.client.record_stream import Arrival, RecordStream, Transfer
from tierd.client.remote_store import RemoteStore
from tierd.client.slot_cache import SlotCache
from tierd.client.source import DirectAccess, NothingAhead, Phase, SourceStats, StepMemory, Use
from tierd.client.visit import Visit
from tierd.errors import ChecksumMismatch, DaemonUnavailable, DeadlineExceeded, TierdError
from tierd.policy.policies import DEFAULT_POLICY, make_policy
from tierd.store.checksums import xxh3

__all__ = ["BytesSource"]

LOCAL = "node"
"""Name of the tier that is this node's own RAM, before those of the daemon."""

_GRACE_SECONDS = 5.0
_RETRY_SECONDS = 0.1
_MAX_RETRY_SECONDS = 2.0


class BytesSource(NothingAhead):
    """An `ExpertSource` that fetches what its own RAM lacks.

    Every record is checked against the store's index, which hangs on the fingerprint: neither the link nor the daemon
    can pass wrong bytes. A daemon that goes away is waited for; it must come back with the same store.

    Args:
        address: the daemon.
        store: the same daemon's store.
        access: how to reach it.
        budget: most bytes of records in RAM; None keeps all that come.
        policy: who leaves RAM.
        deadline: seconds that the experts of a layer may take.
        patience: seconds to wait for a daemon that went away.
        lanes: calls at a time.
        loop: the process's gRPC loop.
        tell: takes a line for people.

    Raises:
        UsageError: a budget below one record, or an unknown policy.
    """

    def __init__(
        self,
        address: Address,
        store: RemoteStore,
        *,
        access: Access,
        budget: int | None = None,
        policy: str = DEFAULT_POLICY,
        deadline: float = 60.0,
        patience: float = 60.0,
        lanes: int = 4,
        loop: LoopThread,
        tell: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.store = store
        self.stats = SourceStats(LOCAL)
        self.address = address
        self.bytes_received = 0
        self._geometry = store.manifest.geometry
        self._cache = SlotCache(self._geometry, budget=budget, policy=make_policy(policy))
        self._stream = RecordStream(address, access, fingerprint=store.fingerprint, loop=loop, lanes=lanes)
        self._deadline = deadline
        self._patience = patience
        self._tell = tell

    def __repr__(self) -> str:
        return f"<BytesSource {self.address}, {self.stats.requested} experts asked for>"

    @property
    def slots(self) -> int:
        """Records that fit into RAM."""
        return self._cache.slots

    @property
    def direct(self) -> DirectAccess:
        """How native code reads what is in this node's RAM."""
        return self._cache.direct

    @property
    def step_memory(self) -> StepMemory:
        """Where the node says what it expects, for its own RAM's policy."""
        return self._cache.step_memory

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
        """See `ExpertSource.visit`: what is in this node's RAM first, then the others as they come."""
        first, cache = self._geometry.layer_start(layer), self._cache
        for expert in experts:
            self._geometry.flat(layer, expert)
        self.stats.ask(len(experts))
        cache.visit(layer, step=step, phase=phase)
        missing = [expert for expert in experts if first + expert not in cache]
        visit = Visit(layer, first, use, step, phase, meanwhile, missing)
        transfer = self._ask(visit, missing, repeated=False) if missing else None
        try:
            for expert in experts:
                if first + expert in cache:
                    use(expert, cache.use(first + expert, step=step))
            self._count(LOCAL, "hit", len(experts) - len(missing))
            if transfer is not None:
                visit.spend_free_time()
                until = self._latest()
                while visit.fresh:
                    following = self._take(visit, transfer, until)
                    if following is not transfer:  # a daemon that was away has all of its time again
                        transfer, until = following, self._latest()
        finally:
            if transfer is not None:
                self._stream.give_up(transfer)

    def close(self) -> None:
        """End the connection and give the memory back."""
        self._stream.close()

    def _ask(self, visit: Visit, experts: Sequence[int], *, repeated: bool) -> Transfer:
        self.stats.messages += 1
        nbytes = self._geometry.layout(visit.layer).record_bytes
        return self._stream.ask(
            visit.layer, experts, nbytes, phase=visit.phase, seconds=self._deadline, repeated=repeated
        )

    def _latest(self) -> float:
        """When what is asked for now must have come."""
        return time.monotonic() + self._deadline + _GRACE_SECONDS

    def _take(self, visit: Visit, transfer: Transfer, until: float) -> Transfer:
        """Use the next record that comes; returns the transfer that brings the others.

        Raises:
            TierdError: they will not come.
        """
        begun = time.monotonic()
        try:
            arrival = transfer.arrivals.get(timeout=max(0.0, until - begun))
        except Empty:
            message = f"{self.address} did not send {len(visit.fresh)} experts within {self._deadline:g} s"
            raise DeadlineExceeded(message, hint="Look at the link, and at the daemon with `tierd stats`.") from None
        waited = time.monotonic() - begun
        self.stats.wait_seconds += waited
        if isinstance(arrival, DaemonUnavailable):
            self._stream.give_up(transfer)
            return self._again(visit, arrival)
        if isinstance(arrival, TierdError):
            raise arrival
        self.stats.wait_by_outcome[arrival.outcome] += waited
        self._use(visit, arrival)
        return transfer

    def _use(self, visit: Visit, arrival: Arrival) -> None:
        flat = visit.first + arrival.expert
        record = np.frombuffer(arrival.record, np.uint8)
        self.bytes_received += record.nbytes
        if xxh3(record) != self.store.checksum(flat):
            raise ChecksumMismatch(
                f"layer {visit.layer} expert {arrival.expert} came damaged from {self.address}",
                length=record.nbytes,
                hint="The daemon checks what it reads, so look at its memory and at the link; `tierd doctor` helps.",
            )
        self._cache.put(flat, record)
        visit.use(arrival.expert, self._cache.use(flat, step=visit.step))
        visit.drop([arrival.expert])
        # The daemon's tiers are counted under its own names.
        self._count(self.store.tiers[min(arrival.tier, len(self.store.tiers) - 1)], arrival.outcome, 1)

    def _again(self, visit: Visit, lost: DaemonUnavailable) -> Transfer:
        """The daemon went away: ask again for what has not come, as soon as one answers."""
        self._tell(f"tierd at {self.address} went away: {lost.message}")
        self._tell(f"waiting up to {self._patience:g} s for it to come back; the answer will go on where it stopped")
        begun, pause, why = time.monotonic(), _RETRY_SECONDS, lost
        while time.monotonic() - begun + pause <= self._patience:
            time.sleep(pause)
            pause = min(2 * pause, _MAX_RETRY_SECONDS)
            try:
                self.store.check_still_there()
            except DaemonUnavailable as error:
                why = error
            else:
                self._tell(f"tierd at {self.address} is back; going on")
                self.stats.repeated += len(visit.fresh)
                return self._ask(visit, visit.fresh, repeated=True)
        raise DaemonUnavailable(
            f"tierd at {self.address} did not come back within {self._patience:g} s: {why.message}",
            hint="Start it again with `tierd serve`; a longer wait can be set with --patience.",
        ) from why

    def _count(self, tier: str, outcome: str, experts: int) -> None:
        if experts:
            self.stats.count(tier, outcome, experts)
