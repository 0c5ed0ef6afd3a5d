"""Experts from a daemon on the same host, computed on where they lie in the shared arena.

Residents cost no message: see `Residents`. The others are asked for over gRPC, and read while the residents are used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty

from tierd.access import LOCAL_ACCESS, Access
from tierd.addresses import Address
from tierd.api import session_pb2 as pb
from tierd.arena.attach import Attachment, attach
from tierd.arena.table import ABSENT, unpack
from tierd.client.hints import Absent, absent_experts, hint_message
from tierd.client.loop_thread import LoopThread
from tierd.client.refusals import refusal_error
from tierd.client.residents import Residents
from tierd.client.session_link import SessionLink, SessionLost
from tierd.client.session_messages import Messages, PacketMessages, StreamMessages
from tierd.client.source import DirectAccess, Phase, SourceStats, StepMemory, StoreView, Use
from tierd.client.visit import Visit
from tierd.errors import DaemonUnavailable, DeadlineExceeded, LimitExceeded, TierdError
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
    messages: Messages
    memory: Attachment
    residents: Residents


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
        messages: ask for residents, too, instead of using them without a message.
        access: how to reach the daemon.

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
        messages: bool = False,
        access: Access = LOCAL_ACCESS,
    ) -> None:
        self.store = store
        self.stats = SourceStats()
        self.boot_id = ""
        self.address = address
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
        self._messages = messages
        self.access = access
        self._acquires = 0
        self._epoch = 0
        self._geometry = store.manifest.geometry
        self._attached: _Attached | None = self._attach()

    def __repr__(self) -> str:
        return f"<ArenaSource {self.address}, {self.stats.requested} experts asked for>"

    @property
    def messages_sent(self) -> int:
        """Messages of any kind that went from the present session since its hello."""
        return self._attached.messages.sent if self._attached is not None else 0

    @property
    def direct(self) -> DirectAccess | None:
        """How native code may read resident experts itself; None while there is no session."""
        attached = self._attached
        if attached is None or attached.link.lost is not None:
            return None
        return attached.residents.direct

    @property
    def step_memory(self) -> StepMemory | None:
        """See `ExpertSource.step_memory`; None while there is no session."""
        attached = self._attached
        if attached is None or attached.link.lost is not None:
            return None
        block = attached.memory.block
        return StepMemory(block.expect, block.last_step)

    def absent(self, layer: int) -> Absent | None:
        """See `ExpertSource.absent`; None while there is no session."""
        attached = self._attached
        if attached is None or attached.link.lost is not None:
            return None
        return absent_experts(attached.memory, self._geometry.layer_start(layer), self._geometry.experts_in(layer))

    def hint(
        self, layer: int, experts: Sequence[int], probabilities: Sequence[float], *, step: int, lead_seconds: float
    ) -> None:
        """See `ExpertSource.hint`."""
        attached = self._attached
        if attached is None or attached.link.lost is not None:
            return
        words, first = attached.memory.table.words, self._geometry.layer_start(layer)
        # A few words one by one: this is said behind kernels that have swept the caches.
        if any(words[first + expert] == ABSENT for expert in experts):
            message = hint_message(layer, experts, probabilities, step=step, lead_seconds=lead_seconds)
            self.stats.hints += 1
            attached.messages.mention(message)

    def say_tokens(self, tokens: Sequence[int], *, step: int) -> None:
        """See `ExpertSource.say_tokens`."""
        attached = self._attached
        if attached is not None and attached.link.lost is None:
            message = pb.OpenSessionRequest(step=pb.Step(step=step, tokens=tokens))
            attached.messages.mention(message)

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
        """See `ExpertSource.visit`."""
        self.stats.ask(len(experts))
        visit = Visit(layer, self._geometry.layer_start(layer), use, step, phase, meanwhile, list(experts))
        repeats = 0
        while visit.fresh or visit.torn or visit.again:
            attached = self._attached if self._attached is not None else self._reattach()
            try:
                whole = self._round(attached, visit)
            except SessionLost as lost:
                whole = False
                if self._counted(lost) and not visit.again:
                    self._repeat(visit, lost.wave)
            repeats = _bounded(repeats + (not whole), layer)

    def close(self) -> None:
        """End the session and unmap the arena."""
        attached, self._attached = self._attached, None
        if attached is not None:
            self._detach(attached)

    # One round: the residents, and one wave of the others.

    def _round(self, attached: _Attached, visit: Visit) -> bool:
        """Ask for experts that are not resident, use those that are meanwhile, then what comes.

        Returns:
            Whether everything that was used is certain.

        Raises:
            SessionLost: the stream ended; nothing that was asked for is certain.
        """
        link, residents = attached.link, attached.residents
        if link.lost is not None:
            raise SessionLost(link.lost)
        residents.begin_step(visit.step)
        most = link.welcome.max_experts_per_acquire
        found = {} if visit.again else residents.find(visit.first, visit.fresh)
        absent = [expert for expert in visit.fresh if expert not in found]
        # Only so many that the residents of this round can stay; else these are used first.
        wave = (visit.again or visit.torn + absent)[: max(0, most - len(found))]
        if wave:
            self._ask(attached.messages, visit, wave, list(found))
        try:
            torn = residents.use(visit.first, found, visit.use, step=visit.step, phase=visit.phase)
            visit.drop(found.keys() - torn)
            self.stats.count_unasked(len(found) - len(torn), len(torn))
            if wave:
                visit.spend_free_time()
            redo = self._take(attached, visit, wave) if wave else []
        finally:
            if wave:
                attached.messages.release_when_idle(self._acquires)
        repeated = bool(visit.again)
        visit.drop([*wave, *torn])
        visit.torn += torn
        if redo and repeated:
            self.stats.repeated += len(redo)
            visit.again += redo
        elif redo:
            self._repeat(visit, redo)
        return not torn and not redo

    def _ask(self, messages: Messages, visit: Visit, wave: list[int], resident: list[int]) -> None:
        self._acquires += 1
        self.stats.messages += 1
        acquire = pb.Acquire(
            id=self._acquires,
            step=visit.step,
            layer=visit.layer,
            experts=wave,
            phase=_PHASES[visit.phase],
            deadline_ms=max(1, int(self._deadline * 1000)),
            repeated=bool(visit.again),
            resident=resident,
        )
        messages.send(pb.OpenSessionRequest(acquire=acquire))

    def _take(self, attached: _Attached, visit: Visit, wave: list[int]) -> list[int]:
        """Use the experts of a wave as they come; returns those whose use is not certain."""
        link, memory = attached.link, attached.memory
        missing = set(wave)
        used: dict[int, int] = {}
        until = time.monotonic() + self._deadline + _GRACE_SECONDS
        while missing:
            answer = self._next(attached, until)
            if isinstance(answer, TierdError):
                raise SessionLost(answer, self._acquires, wave)
            if answer.acquire_id != self._acquires:
                continue  # the end of an acquire that was given up
            for ready in answer.ready:
                _, slot = unpack(ready.word)
                visit.use(ready.expert, memory.slot_address(slot))
                missing.discard(ready.expert)
                used[ready.expert] = ready.word
                if not visit.again:
                    self._count(link, ready)
            if answer.failed:
                raise refusal_error(visit.layer, answer.failed[0])
        redo = attached.residents.settle(visit.first, used, step=visit.step)
        self.stats.count_unasked(0, len(redo))
        return redo

    def _repeat(self, visit: Visit, experts: Sequence[int]) -> None:
        """The daemon counted these; they must be asked for again."""
        visit.drop(experts)
        visit.again += experts
        self.stats.repeated += len(experts)

    def _next(self, attached: _Attached, until: float) -> pb.Notice | TierdError:
        """The next answer; the time without one is time without work.

        Raises:
            DeadlineExceeded: the daemon is there and does not answer.
        """
        begun = time.monotonic()
        try:
            answer = attached.messages.take(until - begun)
        except Empty:
            message = f"{self.address} did not answer within {self._deadline + _GRACE_SECONDS:g} s"
            raise DeadlineExceeded(message, hint="`tierd stats` shows what it is busy with.") from None
        waited = time.monotonic() - begun
        self.stats.wait_seconds += waited
        if isinstance(answer, pb.Notice):
            outcomes = {_OUTCOMES[ready.outcome] for ready in answer.ready}
            slowest = next((o for o in ("miss", "joined", "hit") if o in outcomes), None)
            if slowest is not None:
                self.stats.wait_by_outcome[slowest] += waited
        return answer

    def _count(self, link: SessionLink, ready: pb.Ready) -> None:
        outcome, tier = _OUTCOMES[ready.outcome], link.welcome.tiers[ready.tier]
        self.stats.count(tier, outcome, 1)

    # Losing the daemon and finding it again.

    def _counted(self, lost: SessionLost) -> bool:
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
        self._tell(f"tierd at {self.address} went away: {lost.why.message}")
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
                        f"tierd at {self.address} did not come back within {self._patience:g} s: {error.message}",
                        hint="Start it again with `tierd serve`; a longer wait can be set with --patience.",
                    ) from error
            else:
                self._tell(f"tierd at {self.address} is back; going on")
                return self._attached
            if not announced:
                announced = True
                self._tell(
                    f"waiting up to {self._patience:g} s for it to come back; the answer will go on where it stopped"
                )
            time.sleep(pause)
            pause = min(2 * pause, _MAX_RETRY_SECONDS)

    def _attach(self) -> _Attached:
        opening = SessionLink.open(self.address, self._hello, seconds=_CONNECT_SECONDS, access=self.access)
        try:
            link = self._loop.run(opening, seconds=2 * _CONNECT_SECONDS, what=f"connecting to {self.address}")
        except DeadlineExceeded as error:
            raise DaemonUnavailable(error.message) from error
        try:
            memory = attach(link.welcome.attach_path, link.welcome.attach_token, timeout=_CONNECT_SECONDS)
        except BaseException:
            self._loop.run(link.close(), seconds=_CONNECT_SECONDS, what="closing a session")
            raise
        self.boot_id = link.welcome.boot_id
        self.stats.direct_tier = link.welcome.tiers[0]
        self._epoch += 1
        unasked = link.welcome.unasked_reads and not self._messages
        messages: Messages = StreamMessages(link, self._loop)
        if link.welcome.packet_messages:
            messages = PacketMessages(link, self._loop, memory.take_message_fd())
        return _Attached(link, messages, memory, Residents(memory, unasked=unasked, epoch=self._epoch))

    def _detach(self, attached: _Attached) -> None:
        try:
            self._loop.run(attached.link.close(), seconds=_CONNECT_SECONDS, what="closing a session")
        finally:
            attached.messages.close()
            attached.memory.close()


def _bounded(repeats: int, layer: int) -> int:
    if repeats > _MAX_REPEATS:
        raise DeadlineExceeded(f"layer {layer} had to be asked for {repeats} times and never came whole")
    return repeats
