"""Memory that an arena gives back to the host and takes again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierd.arena.arena import Arena
from tierd.arena.memory import EXTENT_BYTES, PayloadView, SharedPayload
from tierd.arena.slots import SlotState, SlotTable
from tierd.arena.table import unpack
from tierd.errors import ArenaError, LimitExceeded

TMPFS = Path("/dev/shm")
SLOT = 256 << 10
PER_EXTENT = EXTENT_BYTES // SLOT


@pytest.fixture(params=["memfd", "tmpfs"])
def directory(request):
    return None if request.param == "memfd" else TMPFS


@pytest.fixture
def payload(directory):
    made = SharedPayload.create(4 * EXTENT_BYTES, directory, most_bytes=6 * EXTENT_BYTES)
    made.start_prefault()
    assert made.wait_prefault(30)
    yield made
    made.close()


@pytest.fixture
def arena(directory):
    made = Arena.create(
        arena_bytes=3 * PER_EXTENT * SLOT, slot_bytes=SLOT, experts=5 * PER_EXTENT, boot_id=os.urandom(16),
        spares=PER_EXTENT, directory=directory, growing=True,
    )  # fmt: skip
    yield made
    made.close()


def allocated(payload):
    return os.fstat(payload.reader_fd()).st_blocks * 512


def excess(payload):
    assert payload.allocated_bytes == allocated(payload)
    return max(0, payload.allocated_bytes - payload.used_bytes)


def put(arena, expert):
    slot = arena.take()
    arena.fill(slot, expert)
    arena.view(slot, SLOT)[:] = bytes([expert]) * SLOT
    return slot, arena.publish(slot)


def test_room_to_grow_costs_no_memory(payload):
    assert payload.nbytes == 6 * EXTENT_BYTES
    assert allocated(payload) == payload.used_bytes == 4 * EXTENT_BYTES
    assert excess(payload) == 0


def test_punching_returns_whole_extents_behind_what_is_used(payload):
    payload.view(0, payload.nbytes)[: 2 * EXTENT_BYTES] = b"k" * (2 * EXTENT_BYTES)
    payload.shrink(EXTENT_BYTES + 1)
    assert excess(payload) >= 2 * EXTENT_BYTES
    payload.punch()
    assert (allocated(payload), excess(payload)) == (2 * EXTENT_BYTES, 0)
    assert payload.huge_page_bytes <= 2 * EXTENT_BYTES
    assert payload.view(0, 2 * EXTENT_BYTES) == b"k" * (2 * EXTENT_BYTES)


def test_a_stray_reader_of_a_hole_shows_and_is_undone(payload):
    view = PayloadView.attach(payload.reader_fd(), payload.nbytes)
    payload.shrink(EXTENT_BYTES)
    payload.punch()
    assert view.view(3 * EXTENT_BYTES, 8) == bytes(8), "a hole reads as zeros"
    assert excess(payload) > 0
    payload.punch()
    assert excess(payload) == 0
    view.close()


def test_what_was_given_back_can_be_had_again(payload):
    payload.shrink(EXTENT_BYTES)
    payload.punch()
    payload.grow(6 * EXTENT_BYTES)
    assert payload.wait_prefault(30)
    assert allocated(payload) == payload.used_bytes == 6 * EXTENT_BYTES
    payload.view(5 * EXTENT_BYTES, 3)[:] = b"new"
    assert bytes(payload.view(5 * EXTENT_BYTES, 3)) == b"new"


def test_more_than_was_set_aside_or_than_there_is_cannot_be_had(payload, monkeypatch):
    with pytest.raises(ArenaError, match="at most"):
        payload.grow(7 * EXTENT_BYTES)
    monkeypatch.setattr("tierd.arena.memory._available_bytes", lambda _: 5)
    with pytest.raises(ArenaError, match="5 are free"):
        payload.grow(5 * EXTENT_BYTES)
    assert payload.used_bytes == 4 * EXTENT_BYTES


def test_shrinking_while_it_is_still_being_filled_leaves_nothing_behind(directory):
    payload = SharedPayload.create(64 * EXTENT_BYTES, directory)
    payload.start_prefault()
    payload.shrink(2 * EXTENT_BYTES)
    payload.punch()
    assert payload.wait_prefault(30)
    assert allocated(payload) <= 2 * EXTENT_BYTES
    payload.close()


def test_an_arena_shrinks_to_its_lowest_slots_and_grows_again(arena):
    placed = {expert: put(arena, expert) for expert in range(3 * PER_EXTENT)}
    assert arena.take() is None
    arena.resize(PER_EXTENT)
    assert not arena.settled
    low = [expert for expert, (slot, _) in placed.items() if arena.usable(slot)]
    high = [expert for expert in placed if expert not in low]
    gone = low[: PER_EXTENT + 1] + high[1:]
    for expert in gone:
        arena.drop(placed[expert][0])
    assert not arena.settled, "one survivor is left up there"
    free = arena.take()
    word = arena.move(placed[high[0]][0], free, SLOT)
    assert arena.settled
    assert unpack(word)[1] == free
    assert bytes(arena.record(word, SLOT)) == bytes([high[0]]) * SLOT
    arena.give_back_memory()
    assert (arena.used_bytes, arena.excess_bytes) == (2 * EXTENT_BYTES, 0)
    arena.reserve(5 * PER_EXTENT)
    arena.resize(5 * PER_EXTENT)
    for expert in [*gone, *range(3 * PER_EXTENT, 5 * PER_EXTENT)]:
        assert put(arena, expert) is not None
    counts = arena.counts()
    assert (counts.ready, counts.free, counts.withdrawn) == (5 * PER_EXTENT, PER_EXTENT, 0)


def test_a_slot_in_use_is_withdrawn_when_it_becomes_free():
    table = SlotTable(4)
    slots = [table.take_free() for _ in range(4)]
    for slot in slots[1:]:
        table.fill(slot, 10 + slot)
    table.set_active(1)
    assert table.counts().withdrawn == 0
    table.landed(1)
    table.grant(1)
    table.abandon(2)
    table.free(2)
    table.ungrant(1)
    table.retire(1)
    table.free(1)
    table.abandon(3)
    table.free(3)
    assert table.counts().withdrawn == 3
    table.give_back(slots[0])
    assert (table.take_free(), table.take_free()) == (0, None)
    table.set_active(3)
    assert (table.take_free(), table.take_free(), table.take_free()) == (1, 2, None)


def test_no_arena_has_no_slot_or_more_than_it_was_made_for():
    table = SlotTable(4)
    for active in (0, -1, 5):
        with pytest.raises(LimitExceeded):
            table.set_active(active)
    assert table.state(3) is SlotState.FREE
