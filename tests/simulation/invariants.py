"""What must hold after every event, whatever happened before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.prefetch_promise import check_prefetch

from tierd.arena.slots import SlotCounts, SlotState
from tierd.arena.table import ABSENT, unpack

if TYPE_CHECKING:
    from simulation.ledger import Asked
    from simulation.world import World

__all__ = ["check_at_rest", "check_invariants"]

_OWNED_BY_THE_DRIVE = (SlotState.FILLING, SlotState.ABANDONED)


def check_invariants(world: World) -> None:
    """AssertionError that says what does not hold."""
    check_attempts(world)
    reading = check_reads(world)
    held = check_grants(world)
    counts = check_slots(world)
    check_bytes(world, held, counts)
    check_waiting(world, reading, held)
    check_counts(world)
    check_policy(world, reading)
    check_prefetch(world)


def check_attempts(world: World) -> None:
    """A slot in a drive's hands is in nobody else's, and an abandoned slot is in a drive's hands."""
    slots = world.arena._states
    busy: dict[int, int] = {}
    for drive in world.drives:
        for job in drive.outstanding:
            assert job.slot not in busy, f"two reads go into slot {job.slot}"
            busy[job.slot] = job.read.expert
            state = slots._states[job.slot]
            assert state in _OWNED_BY_THE_DRIVE, f"slot {job.slot} is {state.value} while a read into it runs"
            assert slots._experts[job.slot] == job.read.expert, f"slot {job.slot} was given to another expert"
    for slot, state in enumerate(slots._states):
        if state is SlotState.ABANDONED:
            assert slot in busy, f"slot {slot} stays abandoned though its read returned"
        elif state is SlotState.FILLING and slot not in busy:
            wanted = world.device.flying.keys() | world.broker.fair.waiting
            assert slots._experts[slot] in wanted, f"slot {slot} waits for no read"


def check_reads(world: World) -> set[int]:
    """Single flight: what the broker reads is what it asked for, once, and is not published yet. Returns these."""
    waiting = world.broker.fair.waiting
    assert not waiting & world.device.flying.keys(), "a read that waits for its turn has begun"
    assert not waiting or world.device.flying, "reads wait for their turn, and none runs"
    wanted = {asked.flats[expert] for _, asked in world.ledger.open_acquires() for expert in asked.unanswered}
    assert waiting <= wanted, f"nobody wants {waiting - wanted}, and they wait for their turn"
    reading = set(world.device.flying) | waiting
    assert world.broker.reading == len(reading), "the broker counts other reads than it asked for"
    for flat in reading:
        assert world.table.words[flat] == ABSENT, f"expert {flat} is published while it is being read"
    for drive in world.drives:
        behind = {
            job.read.expert
            for job in drive.outstanding
            if job.ahead and world.device.flying.get(job.read.expert) == job.slot
        }
        assert not behind & wanted, f"{behind & wanted} are wanted, and their reads wait behind all others"
    if not world.replicated:
        attempts = [job.read.expert for drive in world.drives for job in drive.outstanding]
        assert sorted(attempts) == sorted(reading - waiting), "the drive reads something else than it was asked for"
    return reading


def check_grants(world: World) -> dict[int, int]:
    """A granted expert stays where its session was told. Returns the number of holders by expert."""
    held: dict[int, int] = {}
    for session_id, account in world.ledger.sessions.items():
        granted = account.current.granted if account.current is not None else {}
        for flat, word in granted.items():
            assert world.table.words[flat] == word, f"session {session_id} holds expert {flat}, which left or moved"
            held[flat] = held.get(flat, 0) + 1
        used = used_in_place(world, session_id)
        for flat in used:
            held[flat] = held.get(flat, 0) + 1
        grants = world.broker.grants(session_id)
        assert grants == len(granted) + len(used), f"session {session_id}: other grants than it was told"
    return held


def used_in_place(world: World, session_id: int) -> list[int]:
    """Experts that a session uses without having asked, and that stay since it told so with a request."""
    acquire = world.broker._sessions[session_id].acquire
    if acquire is None or acquire.queued:
        return []
    used = []
    for resident in acquire.granted:
        flat = world.arena._states._experts[resident.slot]
        assert flat is not None
        if flat in acquire.used:
            assert world.table.words[flat] == resident.word, f"session {session_id} uses expert {flat}, which left"
            used.append(flat)
    return used


def check_slots(world: World) -> SlotCounts:
    """Slots by state add up, in the counts, one by one, and on the free list; spare ones are kept back."""
    table, arena = world.arena._states, world.arena
    states = [table._states.count(state) for state in SlotState]
    counts = arena.counts()
    told = [counts.free, counts.filling, counts.ready, counts.retired, counts.abandoned, counts.withdrawn]
    assert told == states, f"{counts} is not what the slots say: {states}"
    assert sum(told) == len(table) == arena.most_slots + arena.spares, f"{counts} are not {len(table)} slots"
    assert sorted(table._free_list) == [n for n, state in enumerate(table._states) if state is SlotState.FREE], (
        "the free list is not the free slots"
    )
    reading = world.broker.reading
    spares = counts.filling + counts.abandoned - reading
    within = counts.ready + reading <= arena.slots
    assert within or world.clearing_out, f"{counts.ready} ready and {reading} reading of {arena.slots} slots"
    assert spares == arena._spares_in_use <= arena.spares, f"{spares} of {arena.spares} spare slots in use: {arena!r}"
    return counts


def check_bytes(world: World, held: dict[int, int], counts: SlotCounts) -> None:
    """All that anyone can see is right: each published word leads to the bytes of its expert."""
    data, size, table = world.payload.data, world.arena.slot_bytes, world.arena._states
    published = 0
    granted = 0
    for flat, word in enumerate(world.table.words):
        if word == ABSENT:
            continue
        published += 1
        generation, slot = unpack(word)
        state = table._states[slot]
        assert state is SlotState.READY, f"expert {flat} is published in a {state.value} slot"
        assert table._generations[slot] == generation, f"expert {flat}: its word is of another filling of slot {slot}"
        assert table._experts[slot] == flat, f"expert {flat} is published in the slot of {table._experts[slot]}"
        assert data[slot * size : slot * size + size] == world.store.content[flat], f"wrong bytes of expert {flat}"
        grants = table._grants[slot]
        assert grants == held.get(flat, 0), f"expert {flat}: {grants} grants for {held.get(flat, 0)} holders"
        granted += grants > 0
    assert counts.ready == published, "a ready slot is not published"
    assert counts.granted == granted, "granted slots are miscounted"


def check_waiting(world: World, reading: set[int], held: dict[int, int]) -> None:
    """Who waits is in the queue with empty hands, or has its reads running; and nobody past the deadline."""
    now = world.clock.time()
    queue = {a.session.id: a for a in world.broker._queue}
    assert len(queue) == world.broker.queued == len(world.broker._queue), "a session is queued twice"
    queued: dict[int, Asked] = {}
    for session_id, asked in world.ledger.open_acquires():
        entry = queue.get(session_id)
        if entry is not None:
            assert entry.request.id == asked.request.id, f"session {session_id}: an old acquire is queued"
            assert len(asked.unanswered) == len(asked.flats), f"session {session_id}: answered while queued"
            queued[session_id] = asked
        else:
            for expert in asked.unanswered:
                assert asked.flats[expert] in reading, f"session {session_id} waits for expert {expert}: no read"
        assert not asked.unanswered or now <= asked.due, f"session {session_id}: no answer by its deadline"
    assert len(queued) == len(queue), "an ended acquire is queued"
    if queued:
        order = [queued[a.session.id].number for a in world.broker._queue]
        assert order == sorted(order), f"the queue is out of order: {order}"
        head = min(queued.values(), key=lambda asked: asked.number)
        busy = reading | set(held)
        used = next(set(a.used) for a in world.broker._queue if a.request is head.request)
        here = {flat for flat in used if world.table.words[flat] != ABSENT}
        needed = len(busy | set(head.flats.values()) | here)
        assert needed > world.arena.slots, f"the head of the queue needs {needed} slots and is not admitted"


def check_counts(world: World) -> None:
    """requests = hits + misses + joined + cancelled + failed + pending; each as the sessions were told."""
    stats, ledger = world.broker.stats, world.ledger
    assert stats.phases == ledger.phases, f"the broker counts {stats.phases}, the sessions {ledger.phases}"
    assert stats.repeated == ledger.repeated, "repeated requests are miscounted"
    assert stats.unasked == ledger.unasked, f"{stats.unasked} unasked uses, the sessions counted {ledger.unasked}"
    pending = sum(len(a.unanswered) for _, a in ledger.open_acquires() if not a.request.repeated)
    assert world.broker.pending() == pending, f"{world.broker.pending()} pending, the sessions say {pending}"
    total = stats.total()
    assert total.requests == total.answered + pending, f"{total} and {pending} pending do not add up"
    assert stats.evictions == world.table.unpublished, "evictions are miscounted"
    assert world.broker.session_ids() == list(ledger.sessions), "other sessions are open than the nodes know"
    for session_id, account in ledger.sessions.items():
        assert world.broker.requests(session_id) == account.requests, f"session {session_id}: requests miscounted"


def check_policy(world: World, reading: set[int]) -> None:
    """The policy decides over exactly the experts that are resident or being read."""
    resident = {flat for flat, word in enumerate(world.table.words) if word != ABSENT}
    assert set(world.broker.resident()) == resident, "the broker thinks other experts resident than are published"
    assert world.policy.known == resident | reading, "the policy knows other experts than are resident or read"
    assert len(world.policy) == len(world.policy.known), "the policy counts other experts than it was told"


def check_at_rest(world: World) -> None:
    """When all sessions have ended and all reads have returned, nothing is left over."""
    counts = world.arena.counts()
    assert not world.ledger.sessions, f"sessions {list(world.ledger.sessions)} never ended"
    assert counts.granted == counts.filling == counts.retired == counts.abandoned == 0, f"left over: {counts}"
    assert world.broker.settled, f"experts are left in slots that the arena lost: {counts}"
    assert counts.free + counts.ready == world.arena.slots + world.arena.spares, f"slots are lost: {counts}"
    assert world.broker.queued == world.broker.reading == world.broker.pending() == 0, f"{world.broker!r}"
    assert not world.clock.waiting, f"{world.clock.waiting} calls are still to come"
    for drive in world.drives:
        assert drive.stats.in_flight == 0, f"drive {drive.name} has reads in flight"
        assert drive.stats.reads + drive.stats.errors == drive.submitted, f"drive {drive.name} lost a read"
    assert not world.broker.ahead.book.waiting, "guesses of ended sessions are waiting"
    assert not world.sessions.used_now, f"marks stay: {world.sessions.used_now}"
    assert not world.device.flying, f"reads of {world.device.flying} never ended"
