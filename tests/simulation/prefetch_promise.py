"""Promise 4, held against every read that begins with nobody waiting for it, and after every event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.arena.table import unpack
from tierd.prefetch.counts import Tally
from tierd.requests import EvictionReason

if TYPE_CHECKING:
    from simulation.world import World

__all__ = ["check_prefetch", "check_read"]


def check_read(world: World, flat: int, ahead: bool) -> None:
    """A read begins: if nobody waits for it, it disturbs nobody."""
    left = _left_for_it(world)
    alive = set(world.broker.session_ids())  # not the one that is just ending
    acquires = [(n, asked) for n, asked in world.ledger.open_acquires() if n in alive]
    waiting = {n: asked.unanswered for n, asked in acquires if asked.unanswered}
    if any(flat == asked.flats[e] for _, asked in acquires for e in asked.unanswered):
        assert not ahead, f"expert {flat} is wanted, and its read waits behind all others"
        return
    if world.broker._reading[flat].background:
        return
    # The drive begins it when it has nothing else to do.
    assert ahead, f"expert {flat} is read while nobody wants it, as if somebody did"
    assert not len(world.broker.fair), f"expert {flat} is read ahead while reads of {list(waiting)} wait for their turn"
    assert not world.broker.queued, f"expert {flat} is read ahead while a request waits for room"
    # One session alone gives back what it holds when it asks again.
    beside = world.broker.reading + (world.arena.granted if len(alive) > 1 else 0)
    most = world.broker.max_experts_per_acquire
    assert beside + most <= world.arena.slots, f"expert {flat} is read ahead and a request of {most} finds no room"
    if world.resizes:
        return  # what left then may have left for want of slots
    for session_id, account in world.ledger.sessions.items():
        lost = account.recent() & set(left) if session_id in alive else set()
        assert not lost, f"session {session_id} used {lost} in this step or the last, and they leave for a guess"


def _left_for_it(world: World) -> list[int]:
    """Who left for the read that begins, if it is a guess's: not those that left for a request that was given up."""
    left, world.table.left = world.table.left, []
    vacated = world.broker._stats.evicted[EvictionReason.PREFETCH]
    new, world.vacated = vacated - world.vacated, vacated
    return left[len(left) - new :]


def check_prefetch(world: World) -> None:
    """Unused guesses are at most a tenth of the arena, and every hinted expert ends in exactly one of the counts."""
    book = world.broker.ahead.book
    entries = [book.waiting, book.reading, book.landed]
    assert len({flat for part in entries for flat in part}) == sum(map(len, entries)), "a guess is in two states"
    for flat in book.reading:
        assert flat in world.device.flying, f"guess {flat} is not being read"
    for flat in book.landed:
        assert world.table.words[flat], f"guess {flat} landed and is not published"
        slot = unpack(world.table.words[flat])[1]
        assert not world.arena._states._grants[slot], f"guess {flat} is granted and counts as unused"
    most = max(1, world.arena.slots // 10)
    shrunk = world.arena.slots < world.arena.most_slots
    assert book.unused <= most or shrunk, f"{book.unused} unused guesses, {most} are allowed"
    counts, pending = book.counts, book.pending()
    assert counts.hinted == counts.cut + counts.known + counts.issued.experts, f"hints are lost: {counts}"
    ended = counts.ended()
    total = Tally(ended.experts + pending.experts, ended.bytes + pending.bytes)
    assert total == counts.issued, f"{counts} and {pending} pending do not add up"
