"""How often the daemon looks at what nodes wrote: always for who asks, for the others once a step or now and then."""

from __future__ import annotations

import pytest

from tierd.arena.arena import Arena
from tierd.arena.session_block import SessionBlock
from tierd.service import attaching
from tierd.service.attaching import ArenaAttacher

EXPERTS = 8


@pytest.fixture
def two(tmp_path):
    """An attacher with sessions 1 and 2, and the nodes' sides of their blocks."""
    arena = Arena.create(arena_bytes=8192, slot_bytes=4096, experts=EXPERTS, boot_id=b"B" * 16)
    attacher = ArenaAttacher(tmp_path / "a.sock", arena, EXPERTS, on_gone=lambda _session: None)
    nodes = {}
    for session in (1, 2):
        attacher.offer(session)
        nodes[session] = SessionBlock.attach(attacher._held[session][0].fd, EXPERTS)
        nodes[session].begin_step(1)
    list(attacher.new_uses(None))
    yield attacher, nodes
    for session in (1, 2):
        nodes[session].close()
        attacher.left(session)
    arena.close()


def seen(attacher, asking):
    return [(session, [use.expert for use in new]) for session, new in attacher.new_uses(asking)]


def test_the_session_that_asks_is_looked_at_each_time(two):
    attacher, nodes = two
    for expert in (3, 4, 5):
        nodes[1].note_use(expert, 1)
        assert seen(attacher, 1) == [(1, [expert])]


def test_another_session_is_looked_at_when_its_step_has_changed(two):
    attacher, nodes = two
    nodes[2].note_use(6, 1)
    assert seen(attacher, 1) == []
    nodes[2].begin_step(2)
    assert seen(attacher, 1) == [(2, [6])]


def test_another_session_that_stays_in_its_step_is_looked_at_after_so_many_requests(two):
    attacher, nodes = two
    nodes[2].note_use(6, 1)
    looks = [seen(attacher, 1) for _ in range(attaching._MOST_LEFT_OUT + 1)]
    assert looks == [[]] * attaching._MOST_LEFT_OUT + [[(2, [6])]]


def test_all_are_looked_at_where_nobody_asks_and_when_they_end(two):
    attacher, nodes = two
    nodes[2].note_use(6, 1)
    assert seen(attacher, None) == [(2, [6])]
    nodes[2].note_use(7, 1)
    attacher.left(2)
    assert seen(attacher, 1) == [(2, [7])]
