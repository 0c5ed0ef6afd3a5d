"""The daemon's memory: how large the arena is at first, and how it is changed while nodes use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from tierd.arena.arena import Arena
from tierd.broker.broker import Broker
from tierd.memory_limits import HostMemory, group_limits, host_memory, private_bytes
from tierd.policy.waves import wave_size
from tierd.service.budget import AUTO, Budget, DaemonFacts, RamChoice, choose_ram, fixed_items, plan_budget
from tierd.settings import ServeSettings
from tierd.sizes import format_bytes, parse_share
from tierd.store.store import ExpertStore

__all__ = ["ArenaSize", "RamKeeper", "Resized", "arena_size", "facts_of"]

_LOOK_SECONDS = 0.5
_SETTLE_SECONDS = 30.0
_STEP_SECONDS = 2.0
_POLL_SECONDS = 0.01

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """How large an arena is to be.

    Attributes:
        slots: experts that fit.
        ram: bytes of the whole daemon.
        lines: how that came about, for people.
    """

    slots: int
    ram: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resized:
    """What came of a change.

    Attributes:
        size: the new size.
        slots_before: the old one.
        settled: nothing is left in slots that were lost. If not, that goes on by itself.
        excess_bytes: memory not given back yet.
    """

    size: ArenaSize
    slots_before: int
    settled: bool
    excess_bytes: int


def facts_of(store: ExpertStore, settings: ServeSettings, spares: int) -> DaemonFacts:
    """What the budget wants to know of a store and its daemon."""
    geometry = store.geometry
    return DaemonFacts(
        experts=geometry.experts_total,
        slot_bytes=geometry.slot_bytes,
        top_k=geometry.top_k,
        spares=spares,
        max_sessions=settings.max_sessions,
    )


def arena_size(settings: ServeSettings, facts: DaemonFacts, dense_bytes: int) -> ArenaSize:
    """The size of the arena by `--ram` and `--arena`; where both are given, the smaller one.

    With neither, `--arena 25%`, or what `--ram auto` finds where that is less.

    Raises:
        UsageError: an option is wrong, or the budget is below the minimum; the message says what is needed.
    """
    given = "arena" in settings.model_fields_set
    whole = facts.experts * facts.slot_bytes
    by_arena = min(parse_share(settings.arena, whole=whole, option="--arena") // facts.slot_bytes, facts.experts)
    fixed = sum(item.nbytes for item in fixed_items(facts))
    if not settings.ram:
        line = f"--arena {settings.arena}: {by_arena:,} of {facts.experts:,} experts"
        if not given:
            auto = choose_ram(AUTO, host_memory(), group_limits(), dense_bytes=dense_bytes)
            most = (auto.nbytes - fixed) // facts.slot_bytes
            if facts.top_k <= most < by_arena:
                return ArenaSize(most, auto.nbytes, (*auto.lines, f"{most:,} experts fit, fewer than {settings.arena}"))
        return ArenaSize(by_arena, fixed + by_arena * facts.slot_bytes, (line,))
    choice = choose_ram(settings.ram, host_memory(), group_limits(), dense_bytes=dense_bytes)
    budget = plan_budget(choice.nbytes, facts)
    if given and by_arena < budget.slots:
        line = f"--arena {settings.arena} asks for fewer: {by_arena:,} experts"
        return ArenaSize(by_arena, choice.nbytes, (*choice.lines, line))
    return ArenaSize(budget.slots, choice.nbytes, (*choice.lines, *_sum(budget)))


def _sum(budget: Budget) -> tuple[str, ...]:
    return tuple(f"{format_bytes(item.nbytes)} {item.name}" for item in budget.items)


class RamKeeper:
    """Changes the arena's size, and sees to it that a smaller one stays smaller.

    Args:
        store: being served.
        facts: of the daemon.
        size: of the arena at first.
        arena: the arena.
        broker: who uses it.
        end_sessions: ends sessions by number, with a reason; their nodes come back.
        steps: the step of each attached session, as its node says.

    Attributes:
        size: as it is now.
        slot_bytes: of the arena.
        punched: how often memory was given back, strays included.
    """

    def __init__(
        self,
        *,
        store: ExpertStore,
        facts: DaemonFacts,
        size: ArenaSize,
        arena: Arena,
        broker: Broker,
        end_sessions: Callable[[Sequence[int], str], None],
        steps: Callable[[], dict[int, int]],
    ) -> None:
        self.size = size
        self.slot_bytes = facts.slot_bytes
        self.punched = 0
        self._facts = facts
        self._dense_bytes = store.manifest.dense_bytes
        self._arena = arena
        self._broker = broker
        self._end_sessions = end_sessions
        self._steps = steps
        self._changing = asyncio.Lock()

    @property
    def used_bytes(self) -> int:
        """Memory of the daemon now: its private pages, and the arena's blocks."""
        return private_bytes() + self._arena.used_bytes + self._arena.excess_bytes

    async def watch(self) -> None:
        """Look now and then whether a reader touched memory that was given back, and give it back again.

        A daemon that needs more than its budget says so once: the sum that it was planned by is wrong then.
        """
        told = False
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if not told and self.used_bytes > self.size.ram:
                told = True
                _log.warning(
                    "the daemon needs more memory than its budget",
                    ram=self.size.ram,
                    used=self.used_bytes,
                    advice="Give --ram some more, and report what it did.",
                )
            if self._arena.excess_bytes and not self._changing.locked():
                async with self._changing:
                    await self._give_back()

    async def set_ram(self, text: str) -> Resized:
        """Give the daemon another amount of memory: `32GiB`, a share of the host, or `auto`.

        Returns when everything is as it was asked for, or after some seconds while sessions still hold experts.

        Raises:
            UsageError: it cannot be; nothing was changed.
            ArenaError: there is not so much memory.
        """
        async with self._changing:
            choice = self._choose(text)
            budget = plan_budget(choice.nbytes, self._facts)
            slots = min(budget.slots, self._arena.most_slots)
            before = self._arena.slots
            if slots > before:
                await asyncio.to_thread(self._arena.reserve, slots)
            self._arena.resize(slots)
            ended = self._broker.resized(wave_size(slots, self._facts.top_k))
            self._end_sessions(ended, "the arena became smaller; attach again")
            self.size = ArenaSize(slots, choice.nbytes, (*choice.lines, *_sum(budget)))
            _log.info("arena resized", slots=slots, before=before, ram=choice.nbytes)
            settled = await self._settled()
            if settled and slots < before:
                await self._later_steps()
                await self._give_back()
            return Resized(self.size, before, settled, self._arena.excess_bytes)

    def _choose(self, text: str) -> RamChoice:
        """The bytes meant, where the arena's present memory counts as available."""
        own = self._arena.used_bytes
        host = host_memory()
        groups = [replace(group, used=max(0, group.used - own)) for group in group_limits()]
        host = HostMemory(host.total, min(host.total, host.available + own))
        return choose_ram(text, host, groups, dense_bytes=self._dense_bytes)

    async def _settled(self) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SETTLE_SECONDS
        while not self._broker.settled and loop.time() < deadline:  # noqa: ASYNC110, the broker knows no asyncio
            await asyncio.sleep(_POLL_SECONDS)
        return self._broker.settled

    async def _later_steps(self) -> None:
        """Wait, within a bound, until each node has passed to a later step: it reads no slot by an old word then.

        A read of memory that was given back is harmless, since its word has changed; but it costs memory again.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _STEP_SECONDS
        old = self._steps()
        while old and loop.time() < deadline:
            now = self._steps()
            old = {session: step for session, step in old.items() if now.get(session) == step}
            await asyncio.sleep(_POLL_SECONDS)

    async def _give_back(self) -> None:
        if self._broker.settled and self._arena.excess_bytes:
            await asyncio.to_thread(self._arena.give_back_memory)
            self.punched += 1
