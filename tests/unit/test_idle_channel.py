from __future__ import annotations

import asyncio

import pytest

from tierd.client import idle_channel
from tierd.client.idle_channel import IdleChannel


class Channel:
    closed = False

    async def close(self):
        self.closed = True


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(idle_channel, "_IDLE_SECONDS", 0.02)
    return []


@pytest.fixture
def shared(made):
    def make():
        made.append(Channel())
        return made[-1]

    return IdleChannel(make)


async def test_calls_that_follow_each_other_share_a_channel_and_an_idle_one_is_closed(shared, made):
    for _ in range(3):
        async with shared.use() as channel, shared.use() as again:
            assert channel is again is made[0]
    assert not made[0].closed
    await asyncio.sleep(0.05)
    assert made[0].closed
    async with shared.use() as channel:
        await asyncio.sleep(0.05)
        assert channel is made[1]
        assert not channel.closed, "it is in use"


async def test_a_call_that_fails_leaves_the_channel_to_those_that_use_it_and_the_next_gets_another(shared, made):
    async with shared.use() as channel:
        with pytest.raises(ValueError, match="failed"):
            async with shared.use():
                raise ValueError("failed")
        await asyncio.sleep(0.01)
        assert not channel.closed
        async with shared.use() as other:
            assert other is made[1]
    await asyncio.sleep(0.01)
    assert channel.closed
    assert not other.closed
