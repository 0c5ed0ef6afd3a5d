from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierd.arena.session_block import DECODE, PREFILL, SessionBlock, SessionBlockReader, session_memory
from tierd.errors import ArenaError, LimitExceeded

ENTRIES = 11


@pytest.fixture
def reader():
    made = SessionBlockReader.create(ENTRIES)
    yield made
    made.close()


@pytest.fixture
def block(reader):
    made = SessionBlock.attach(reader.fd, ENTRIES)
    yield made
    made.close()


def test_the_daemon_reads_what_the_node_notes(reader, block):
    block.begin_step(7)
    block.note_use(3, 7)
    block.note_use(3, 7)
    block.note_use(10, 7)
    block.expect[4] = 200
    assert reader.step() == 7
    assert reader.uses().tolist() == [[0] * ENTRIES, [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1]]
    assert [use.step for use in reader.take_uses()] == [7, 7]
    assert reader.expect()[4] == 200
    assert reader.refused == 0


def test_what_is_in_use_is_seen_while_it_is(reader, block):
    block.begin_use(4)
    assert [expert for expert in range(ENTRIES) if reader.in_use(expert)] == [4]
    block.end_use(4)
    assert not reader.in_use(4)


def test_uses_are_taken_once(reader, block):
    block.note_use(2, 1)
    block.note_use(5, 1, PREFILL)
    block.note_use(5, 2, DECODE)
    block.begin_step(2)
    assert reader.take_uses() == [(2, 1, 0, 1), (5, 2, 1, 1)]
    assert reader.take_uses() == []
    assert reader.count_uses() == (1, 2), "apart from what was taken"
    assert reader.count_uses() == (0, 0)


def test_uses_come_in_the_order_of_their_steps_and_within_a_step_in_that_of_the_layers(reader, block):
    steps = {3: 2**32 - 1, 7: 2**32 - 1, 1: 2**32, 9: 2**32 + 1, 0: 2**32 + 1}
    for expert, step in steps.items():
        block.note_use(expert, step)
    block.begin_step(2**32 + 1)
    assert [(use.expert, use.step) for use in reader.take_uses()] == [
        *((3, 2**32 - 1), (7, 2**32 - 1)),
        (1, 2**32),
        *((0, 2**32 + 1), (9, 2**32 + 1)),
    ]
    # A last use in the future is nonsense, and taken for one in this step.
    block.note_use(2, 2**32)
    block.note_use(1, 2**32 + 77)
    assert [(use.expert, use.step) for use in reader.take_uses()] == [(2, 2**32), (1, 2**32 + 1)]


def test_a_use_that_was_asked_for_is_noted_and_not_counted(reader, block):
    block.note_asked(4, 6)
    assert block.last_step[4] == 6
    assert reader.take_uses() == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(uses=st.lists(st.integers(0, ENTRIES - 1), max_size=60), looks=st.sets(st.integers(0, 59)))
def test_the_sum_of_what_is_taken_is_the_sum_of_uses_whenever_the_daemon_looks(reader, block, uses, looks):
    reader.take_uses()
    total = np.zeros(ENTRIES, dtype=np.int64)
    for n, expert in enumerate(uses):
        block.note_use(expert, n, n % 2)
        if n in looks:
            for use in reader.take_uses():
                total[use.expert] += use.prefill + use.decode
    for use in reader.take_uses():
        total[use.expert] += use.prefill + use.decode
    assert total.tolist() == np.bincount(uses, minlength=ENTRIES).tolist()


def test_counters_and_steps_wrap(reader, block):
    block.uses[DECODE, 0] = 2**32 - 1
    reader.take_uses()
    block.note_use(0, 2**32 + 5)
    block.note_use(0, 2**32 + 6)
    block.begin_step(2**32 + 6)
    assert reader.take_uses() == [(0, 2**32 + 6, 0, 2)]


def test_nonsense_in_the_block_is_ignored_and_counted(reader, block):
    block.begin_step(50)
    assert reader.step() == 50
    block.begin_step(49)
    assert reader.step() == 50
    block.begin_step(2**64 - 1)
    assert reader.step() == 50
    block.note_use(1, 50)
    block.uses[PREFILL, 2] = 2**31
    assert reader.take_uses() == [(1, 50, 0, 1)]
    assert reader.refused == 4, "two steps and a counter, and the step again when uses were put in order"


def test_snapshots_do_not_change_under_the_daemon(reader, block):
    uses, expect = reader.uses(), reader.expect()
    block.note_use(0, 9)
    block.expect[0] = 1
    assert (uses[DECODE, 0], expect[0]) == (0, 0)


def test_a_node_cannot_change_the_size_of_its_block(reader):
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(reader.fd, size)


def test_arrays_do_not_overlap(reader, block):
    block.uses[:] = 0xFFFFFFFF
    block.last_step[:] = 0x11111111
    block.expect[:] = 0x22
    block.in_use[:] = 1
    block.begin_step(3)
    assert set(reader.uses().ravel().tolist()) == {0xFFFFFFFF}
    assert set(block.last_step.tolist()) == {0x11111111}
    assert set(reader.expect().tolist()) == {0x22}
    assert all(reader.in_use(expert) for expert in range(ENTRIES))
    assert reader.step() == 3


def test_a_block_for_another_number_of_experts_is_refused(reader):
    with pytest.raises(ArenaError, match="too few for 5000 experts"):
        SessionBlock.attach(reader.fd, 5000)
    with pytest.raises(ArenaError, match="not a session block"):
        SessionBlock.attach(reader.fd, ENTRIES - 1)


def test_what_a_session_takes_is_known_before_it_is_made():
    assert session_memory(ENTRIES) == 4096 + 16 * ENTRIES
    for entries in (1, 1000, 50_000):
        made = SessionBlockReader.create(entries)
        assert 0 <= session_memory(entries) - 16 * entries - os.fstat(made.fd).st_size < 4096
        made.close()


@pytest.mark.parametrize("entries", [0, (1 << 22) + 1])
def test_impossible_sizes_are_refused(entries):
    with pytest.raises(LimitExceeded):
        SessionBlockReader.create(entries)


def test_arrays_held_after_close_stay_usable(reader):
    block = SessionBlock.attach(reader.fd, ENTRIES)
    uses = block.uses
    block.note_use(6, 1)
    block.close()
    assert uses[DECODE, 6] == 1
