"""How `--ram` and `--arena` come to slots, and the keeper that watches over them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from tierd.errors import UsageError
from tierd.memory_limits import HostMemory
from tierd.service import ram
from tierd.service.budget import DaemonFacts, fixed_items
from tierd.service.ram import ArenaSize, RamKeeper, arena_size
from tierd.settings import ServeSettings

MIB, GIB = 1 << 20, 1 << 30
FACTS = DaemonFacts(experts=1000, slot_bytes=8 * MIB, top_k=4, spares=3, max_sessions=4)
FIXED = sum(item.nbytes for item in fixed_items(FACTS))


@pytest.fixture(autouse=True)
def host(monkeypatch):
    memory = SimpleNamespace(total=64 * GIB, available=60 * GIB)
    monkeypatch.setattr(ram, "host_memory", lambda: HostMemory(memory.total, memory.available))
    monkeypatch.setattr(ram, "group_limits", list)
    return memory


def size(**given):
    return arena_size(ServeSettings.load(config=None, table="serve", flags=given), FACTS, 0)


def test_a_quarter_of_the_experts_is_the_default():
    assert size().slots == 250
    assert size(arena="10%").slots == 100
    assert size(arena="80MiB").slots == 10


def test_the_default_gives_way_to_a_host_that_has_less(host):
    host.available = 8 * GIB
    chosen = size()
    assert 0 < chosen.slots < 250
    assert FIXED + chosen.slots * FACTS.slot_bytes <= chosen.ram < 2 * GIB
    assert any("fewer than 25%" in line for line in chosen.lines)
    assert size(arena="25%").slots == 250, "what was asked for is not changed in silence"


def test_a_host_that_has_nothing_left_does_not_turn_the_default_into_nothing(host):
    host.available = 0
    assert size().slots == 250


def test_ram_counts_for_the_whole_daemon():
    chosen = size(ram="1GiB")
    assert chosen.slots == (GIB - FIXED) // FACTS.slot_bytes
    assert chosen.ram == GIB
    assert any("interpreter" in line for line in chosen.lines)


def test_of_both_the_smaller_one_counts():
    assert size(ram="1GiB", arena="20%").slots == size(ram="1GiB").slots
    chosen = size(ram="1GiB", arena="5%")
    assert (chosen.slots, chosen.ram) == (50, GIB)
    assert "fewer" in chosen.lines[-1]


def test_the_environment_counts_as_given(monkeypatch):
    monkeypatch.setenv("TIERD_ARENA", "5%")
    monkeypatch.setenv("TIERD_RAM", "1GiB")
    assert size().slots == 50


def test_too_little_is_refused():
    with pytest.raises(UsageError, match="at least"):
        size(ram="64MiB")


class FakeArena:
    slots = most_slots = 10
    used_bytes = 80 * MIB
    excess_bytes = 0
    punched = 0

    def give_back_memory(self):
        self.punched += 1
        self.excess_bytes = 0


def keeper(arena, budget, *, settled=True, steps=dict):
    store = SimpleNamespace(manifest=SimpleNamespace(dense_bytes=0))
    broker = SimpleNamespace(settled=settled)
    return RamKeeper(
        store=store, facts=FACTS, size=ArenaSize(10, budget, ()), arena=arena, broker=broker,
        end_sessions=lambda *_: None, steps=steps,
    )  # fmt: skip


async def watched(one, monkeypatch, until):
    monkeypatch.setattr(ram, "_LOOK_SECONDS", 0.001)
    watching = asyncio.ensure_future(one.watch())
    while not until():  # noqa: ASYNC110, the conditions are counts
        await asyncio.sleep(0.001)
    watching.cancel()


async def test_a_daemon_beyond_its_budget_says_so_once(monkeypatch):
    looks = []
    monkeypatch.setattr(ram, "private_bytes", lambda: looks.append(1) or 30 * MIB)
    one = keeper(FakeArena(), 100 * MIB)
    assert one.used_bytes == 110 * MIB
    with capture_logs() as logs:
        await watched(one, monkeypatch, lambda: len(looks) >= 3)
        looks.clear()
        one.size = ArenaSize(10, 200 * MIB, ())
        await watched(one, monkeypatch, lambda: len(looks) >= 3)
    assert [log["used"] for log in logs] == [110 * MIB]


async def test_touched_holes_are_given_back_once_all_is_settled(monkeypatch):
    arena = FakeArena()
    one = keeper(arena, GIB)
    arena.excess_bytes = MIB
    await watched(one, monkeypatch, lambda: one.punched)
    assert (arena.excess_bytes, one.punched) == (0, 1)


async def test_memory_goes_back_after_each_node_went_a_step_further_or_in_time(monkeypatch):
    monkeypatch.setattr(ram, "_POLL_SECONDS", 0)
    looks = []

    def steps():
        looks.append(1)
        return {1: 5 + (len(looks) > 2), 2: 9} if len(looks) < 5 else {1: 6}

    await keeper(FakeArena(), GIB, steps=steps)._later_steps()
    assert len(looks) == 5, "session 1 went on, session 2 left"
    monkeypatch.setattr(ram, "_STEP_SECONDS", 0.01)
    await asyncio.wait_for(keeper(FakeArena(), GIB, steps=lambda: {1: 1})._later_steps(), 60)
