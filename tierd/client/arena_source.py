"""Experts from a daemon on the same host: asked for over gRPC, computed on where they lie in the shared arena."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty

from tierd.addresses import Address
from tierd.api import session_pb2 as pb
from tierd.arena.attach import Attachment, attach
from tierd.arena.table import unpack
from tierd.client.loop_thread import LoopThread
from tierd.client.session_link import SessionLink
from tierd.client.source import DirectAccess, Phase, SourceStats, StoreView, Use
from tierd.errors import (
    DaemonUnavailable,
    DataLoss,
    DeadlineExceeded,
    DriveError,
    LimitExceeded,
    TierdError,
)
from tierd.rpc import PROTOCOL

__all__ = ["ArenaSource"]

_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.1
_MAX_RETRY_SECONDS = 2.0
# The daemon answers at its deadline; later than this beyond it, it does not answer at all.
_GRACE_SECONDS = 5.0
# Bytes that changed under use, or a daemon that comes and goes.
_MAX_REPEATS = 100

_PHASES = {Phase.PREFILL: pb.PHASE_PREFILL, Phase.DECODE: pb.PHASE_DECODE}
_OUTCOMES = {pb.OUTCOME_HIT: "hit", pb.OUTCOME_MISS: "miss", pb.OUTCOME_JOINED: "joined"}


@dataclass(slots=True)
class _Attached:
    """One session with a daemon, and its memory in this process."""

    link: SessionLink
    memory: Attachment
    direct: DirectAccess | None


class _SessionLost(Exception):
    """The session ended under an acquire, or (None) before it was sent."""

    def __init__(self, why: TierdError, *, acquire_id: int | None) -> None:
        super().__init__(why.message)
        self.why = why
        self.acquire_id = acquire_id


class ArenaSource:
    """An `ExpertSource` that maps a daemon's arena.

    Args:
        address: the daemon.
        store: what the node knows of the store; the daemon must serve the same one.
        name: shown to operators, at most 64 characters.
        numerics: of the node's kernels, for the hello.
        kernel_path: of the node's kernels, for the hello.
        deadline: seconds that one wave of experts may take.
        patience: seconds to wait for a daemon that went away; it may come back with another boot id.
        tell: takes a line for people when the daemon went away or came back.
        gone: says why the daemon will not come back (a private daemon that ended), or None.

    Raises:
        DaemonUnavailable, SessionRefused, LimitExceeded, ArenaError: no session could be had.
    """

    def __init__(
        self,
        address: Address,
        store: StoreView,
        *,
        name: str,
        numerics: str,
        kernel_path: str,
        deadline: float = 60.0,
        patience: float = 60.0,
        loop: LoopThread | None = None,
        tell: Callable[[str], None] = lambda _line: None,
        gone: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.store = store
        self.stats = SourceStats()
        self.boot_id = ""
        self._address = address
        self._hello = pb.Hello(
            protocol=PROTOCOL,
            fingerprint=store.fingerprint,
            numerics=numerics,
            kernel_path=kernel_path,
            name=name,
            wants_arena=True,
        )
        self._deadline = deadline
        self._patience = patience
        self._loop = loop if loop is not None else LoopThread.shared()
        self._tell = tell
        self._gone = gone
        self._acquires = 0
        self._geometry = store.manifest.geometry
        self._attached: _Attached | None = self._attach()

    def __repr__(self) -> str:
        return f"<ArenaSource {self._address}, {self.stats.requested} experts asked for>"

    @property
    def direct(self) -> DirectAccess | None:
        """How native code may read resident experts itself; None while there is no session."""
        attached = self._attached
        if attached is None or attached.link.lost is not None:
            return None
        return attached.direct

    def note_direct(self, uses: int, *, layers: int, discarded: int = 0) -> None:
        """See `ExpertSource.note_direct`."""
        attached = self._attached
        assert attached is not None
        tier = attached.link.welcome.tiers[0]
        self.stats.visits += layers
        self.stats.requested += uses
        self.stats.outcomes["hit"] += uses
        self.stats.tiers[tier] = self.stats.tiers.get(tier, 0) + uses
        self.stats.discarded += discarded

    def visit(self, layer: int, experts: Sequence[int], use: Use, *, step: int, phase: Phase) -> None:
        """See `ExpertSource.visit`."""
        self.stats.visits += 1
        self.stats.requested += len(experts)
        first = list(experts)
        again: list[int] = []  # asked for before: counted once
        repeats = 0
        while first or again:
            attached = self._attached if self._attached is not None else self._reattach()
            queue, repeated = (again, True) if again else (first, False)
            wave = queue[: attached.link.welcome.max_experts_per_acquire]
            redo: list[int] = []
            try:
                redo = self._wave(attached, layer, wave, use, step=step, phase=phase, repeated=repeated)
            except _SessionLost as lost:
                repeats = _bounded(repeats + 1, layer)
                if not self._counted(lost) or repeated:
                    continue
                redo = wave
            else:
                repeats = _bounded(repeats + bool(redo), layer)
            del queue[: len(wave)]
            self.stats.repeated += len(redo)
            again += redo

    def close(self) -> None:
        """End the session and unmap the arena."""
        attached, self._attached = self._attached, None
        if attached is not None:
            self._detach(attached)

    # One wave.

    def _wave(
        self, attached: _Attached, layer: int, wave: list[int], use: Use, *, step: int, phase: Phase, repeated: bool
    ) -> list[int]:
        """Ask for the experts of a wave and use them as they come; returns those whose use is not certain.

        Raises:
            _SessionLost: the stream ended; nothing that was used is certain.
        """
        link, memory = attached.link, attached.memory
        if link.lost is not None:
            raise _SessionLost(link.lost, acquire_id=None)
        self._acquires += 1
        acquire = pb.Acquire(
            id=self._acquires,
            step=step,
            layer=layer,
            experts=wave,
            phase=_PHASES[phase],
            deadline_ms=max(1, int(self._deadline * 1000)),
            repeated=repeated,
        )
        self._loop.call(link.send, pb.OpenSessionRequest(acquire=acquire))
        missing = set(wave)
        used: list[tuple[int, int]] = []
        until = time.monotonic() + self._deadline + _GRACE_SECONDS
        while missing:
            answer = self._next(attached, until)
            if isinstance(answer, TierdError):
                raise _SessionLost(answer, acquire_id=self._acquires)
            if answer.acquire_id != self._acquires:
                continue  # the end of an acquire that was given up
            for ready in answer.ready:
                _, slot = unpack(ready.word)
                use(ready.expert, memory.slot_address(slot))
                missing.discard(ready.expert)
                used.append((ready.expert, ready.word))
                self._count(link, ready, repeated=repeated)
            if answer.failed:
                self._loop.call(link.release_when_idle, self._acquires)
                raise _error(layer, answer.failed[0])
        first = self._geometry.layer_start(layer)
        torn = [expert for expert, word in used if not memory.table.unchanged(first + expert, word)]
        self._loop.call(link.release_when_idle, self._acquires)
        return torn

    def _next(self, attached: _Attached, until: float) -> pb.Notice | TierdError:
        """The next answer; the time without one is time without work.

        Raises:
            DeadlineExceeded: the daemon is there and does not answer.
        """
        begun = time.monotonic()
        try:
            answer = attached.link.inbox.get(timeout=max(0.0, until - begun))
        except Empty:
            message = f"{self._address} did not answer within {self._deadline + _GRACE_SECONDS:g} s"
            raise DeadlineExceeded(message, hint="`tierd stats` shows what it is busy with.") from None
        waited = time.monotonic() - begun
        self.stats.wait_seconds += waited
        if isinstance(answer, pb.Notice):
            outcomes = {_OUTCOMES[ready.outcome] for ready in answer.ready}
            slowest = next((o for o in ("miss", "joined", "hit") if o in outcomes), None)
            if slowest is not None:
                self.stats.wait_by_outcome[slowest] += waited
        return answer

    def _count(self, link: SessionLink, ready: pb.Ready, *, repeated: bool) -> None:
        if repeated:
            return
        outcome, tier = _OUTCOMES[ready.outcome], link.welcome.tiers[ready.tier]
        self.stats.outcomes[outcome] += 1
        self.stats.tiers[tier] = self.stats.tiers.get(tier, 0) + 1

    # Losing the daemon and finding it again.

    def _counted(self, lost: _SessionLost) -> bool:
        """Find a daemon again; returns whether the acquire that was lost is in the daemon's counts already.

        The session's memory may be reused by the daemon, so nothing of it is trusted any more.
        """
        if isinstance(lost.why, LimitExceeded):
            raise lost.why
        boot_id = self.boot_id
        attached, self._attached = self._attached, None
        if attached is not None:
            self._hello.resumes = attached.link.welcome.attach_token
            self._detach(attached)
        self._tell(f"tierd at {self._address} went away: {lost.why.message}")
        welcome = self._reattach().link.welcome
        if lost.acquire_id is None:
            return False
        # Whether a daemon that is gone had counted it cannot be known; that it had is likelier.
        return self.boot_id != boot_id or lost.acquire_id <= welcome.last_acquire_id

    def _reattach(self) -> _Attached:
        """Wait for a daemon within the bound of patience."""
        begun, pause = time.monotonic(), _RETRY_SECONDS
        announced = False
        while True:
            gone = self._gone()
            if gone is not None:
                raise DaemonUnavailable(gone)
            try:
                self._attached = self._attach()
            except DaemonUnavailable as error:
                if time.monotonic() - begun + pause > self._patience:
                    raise DaemonUnavailable(
                        f"tierd at {self._address} did not come back within {self._patience:g} s: {error.message}",
                        hint="Start it again with `tierd serve`; a longer wait can be set with --patience.",
                    ) from error
            else:
                self._tell(f"tierd at {self._address} is back; going on")
                return self._attached
            if not announced:
                announced = True
                self._tell(
                    f"waiting up to {self._patience:g} s for it to come back; the answer will go on where it stopped"
                )
            time.sleep(pause)
            pause = min(2 * pause, _MAX_RETRY_SECONDS)

    def _attach(self) -> _Attached:
        opening = SessionLink.open(self._address, self._hello, seconds=_CONNECT_SECONDS)
        try:
            link = self._loop.run(opening, seconds=2 * _CONNECT_SECONDS, what=f"connecting to {self._address}")
        except DeadlineExceeded as error:
            raise DaemonUnavailable(error.message) from error
        try:
            memory = attach(link.welcome.attach_path, link.welcome.attach_token, timeout=_CONNECT_SECONDS)
        except BaseException:
            self._loop.run(link.close(), seconds=_CONNECT_SECONDS, what="closing a session")
            raise
        self.boot_id = link.welcome.boot_id
        return _Attached(link, memory, direct=None)

    def _detach(self, attached: _Attached) -> None:
        try:
            self._loop.run(attached.link.close(), seconds=_CONNECT_SECONDS, what="closing a session")
        finally:
            attached.memory.close()


def _bounded(repeats: int, layer: int) -> int:
    if repeats > _MAX_REPEATS:
        raise DeadlineExceeded(f"layer {layer} had to be asked for {repeats} times and never came whole")
    return repeats


def _error(layer: int, failed: pb.Failed) -> TierdError:
    """What a refused expert means on this side."""
    match failed.reason:
        case pb.REASON_DATA_LOSS:
            return DataLoss(failed.detail)
        case pb.REASON_DEADLINE_EXCEEDED:
            return DeadlineExceeded(failed.detail)
        case pb.REASON_UNAVAILABLE:
            return DriveError(failed.detail)
        case _:
            return DaemonUnavailable(f"layer {layer} expert {failed.expert}: {failed.detail}")
