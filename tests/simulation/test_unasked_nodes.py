"""Nodes that use residents without a message, in simulated histories: what they reach, and bugs that show in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from simulation.unasked_node import UnaskedNode
from simulation.world import SimulationFailure, simulate

from tierd.arena.arena import Arena
from tierd.arena.slots import SlotState, SlotTable
from tierd.arena.table import pack
from tierd.broker.broker import Broker
from tierd.broker.unasked import UnaskedUses

HISTORIES = 120


def test_histories_reach_what_they_are_meant_to_reach() -> None:
    reached: Counter[str] = Counter()
    for seed in range(HISTORIES):
        world = simulate("unasked", seed)
        for actor in world.actors:
            if isinstance(actor, UnaskedNode):
                reached["kept"] += actor.kept
                reached["discarded"] += actor.discarded
        reached["died"] += sum(event[1] == "close" and event[-1] == "died" for event in world.events)
        reached["evictions"] += world.table.unpublished
        reached["beside a request"] += sum(event[1] == "acquire" and bool(event[-1]) for event in world.events)
    assert {name for name, count in reached.items() if count < 30} == set(), reached


def _keep_the_generation(self: SlotTable, slot: int) -> int:
    self._generations[slot] = max(1, self._generations[slot])
    self._move(slot, SlotState.READY)
    return pack(self._generations[slot], slot)


def _count_what_is_told(self: UnaskedUses, session_id: int, flats: Any) -> None:
    _told(self, session_id, flats)
    self._stats.unasked += len(flats)


def _hold_what_is_used_for_ever(self: Broker, acquire: Any) -> None:
    _begin(self, acquire)
    for resident in acquire.granted:
        self._memory.grant(resident.slot)


def _tell_of_what_has_left(self: UnaskedUses, present: Callable[[int], bool]) -> None:
    del present
    _tell(self, lambda _flat: True)


def _empty_the_table_late(self: Arena, slots: Any) -> None:
    words = {self._states.expert(slot): self._states.word(slot) for slot in slots}
    _unpublish(self, slots)
    for flat, word in words.items():
        self._table._used.discard(word)  # type: ignore[attr-defined]
        self._table.store(flat, word)  # type: ignore[arg-type]


_told, _tell, _begin, _unpublish = UnaskedUses.told, UnaskedUses.tell, Broker._begin, Arena.unpublish

MUTANTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a slot keeps its generation": (SlotTable, "landed", _keep_the_generation),
    "uses are counted by the request, too": (UnaskedUses, "told", _count_what_is_told),
    "what is used beside a request is held for ever": (Broker, "_begin", _hold_what_is_used_for_ever),
    "the policy is told of experts that have left": (UnaskedUses, "tell", _tell_of_what_has_left),
    "an evicted expert is still published": (Arena, "unpublish", _empty_the_table_late),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])

    def all_histories() -> None:
        for seed in range(HISTORIES):
            simulate("unasked", seed)

    with pytest.raises(SimulationFailure):
        all_histories()
