"""What a node is told, and in how many messages, when its experts land one by one."""

from __future__ import annotations

import asyncio

import pytest

from tierd.requests import Granted, Outcome, Reason, Refused
from tierd.service import session as session_module
from tierd.service.session import Session

TIERS = {Outcome.HIT: 0, Outcome.MISS: 1, Outcome.JOINED: 1}


class Stream:
    """Keeps what is written: per message its acquire and the experts named, or that the daemon is stopping."""

    def __init__(self):
        self.messages = []

    async def write(self, message):
        if message.WhichOneof("message") == "notice":
            notice = message.notice
            experts = [ready.expert for ready in notice.ready] + [failed.expert for failed in notice.failed]
            self.messages.append((notice.acquire_id, experts))
        else:
            self.messages.append("draining")


@pytest.fixture
async def told(monkeypatch):
    """A session, its stream, and a pause between messages that never ends by itself."""
    monkeypatch.setattr(session_module, "_PACE_SECONDS", 3600.0)
    session, stream = Session(1, "test", TIERS), Stream()
    sender = asyncio.ensure_future(session.send_all(stream))
    yield session, stream
    sender.cancel()
    await asyncio.gather(sender, return_exceptions=True)


async def lands(session, acquire, *experts, outcome=Outcome.MISS):
    session.answered(acquire, [Granted(expert, 1, outcome) for expert in experts], [])
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_first_answer_and_the_last_few_leave_at_once_and_those_between_together(told):
    session, stream = told
    session.asked(1, 8)
    for expert in range(8):
        await lands(session, 1, expert)
    assert stream.messages == [(1, [0]), (1, [1, 2, 3, 4, 5]), (1, [6]), (1, [7])]


@pytest.mark.parametrize(("experts", "pauses"), [(8, 1), (16, 1), (32, 2), (64, 4), (256, 4)])
async def test_the_more_experts_are_asked_for_the_fewer_messages_tell_of_them(told, experts, pauses):
    session, _ = told
    loop = asyncio.get_running_loop()
    session.asked(1, experts)
    await lands(session, 1, 0)
    assert session._paced.when() - loop.time() == pytest.approx(3600.0 * pauses, abs=60.0)


async def test_a_new_acquire_does_not_wait_for_the_pause_of_the_last_one(told):
    session, stream = told
    session.asked(1, 8)
    await lands(session, 1, 0)
    await lands(session, 1, 1)
    session.asked(2, 8)
    await lands(session, 2, 0, 1, outcome=Outcome.HIT)
    assert stream.messages == [(1, [0]), (1, [1]), (2, [0, 1])]


async def test_refusals_count_as_answers(told):
    session, stream = told
    session.asked(1, 4)
    await lands(session, 1, 0)
    session.answered(1, [], [Refused(expert, Reason.CANCELLED, "released") for expert in (1, 2, 3)])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert stream.messages == [(1, [0]), (1, [1, 2, 3])]


async def test_the_end_of_the_daemon_is_told_without_a_pause_and_after_what_came_before(told):
    session, stream = told
    session.asked(1, 8)
    await lands(session, 1, 0)
    await lands(session, 1, 1)
    session.drain("restart")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert stream.messages == [(1, [0]), (1, [1]), "draining"]


async def test_a_pause_ends(told, monkeypatch):
    session, stream = told
    monkeypatch.setattr(session_module, "_PACE_SECONDS", 0.001)
    session.asked(1, 8)
    await lands(session, 1, 0)
    await lands(session, 1, 1)
    async with asyncio.timeout(60):
        while len(stream.messages) < 2:  # noqa: ASYNC110, the session knows nothing of the test
            await asyncio.sleep(0.001)
    assert stream.messages == [(1, [0]), (1, [1])]
