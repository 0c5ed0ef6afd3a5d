"""A channel for calls that follow each other: opening one for each costs more than a small answer takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

__all__ = ["IdleChannel"]

_IDLE_SECONDS = 2.0


@dataclass(slots=True)
class _Open:
    """A channel, and how many calls use it now."""

    channel: grpc.aio.Channel
    users: int = 0
    idle: asyncio.TimerHandle | None = None


class IdleChannel:
    """Opened when it is wanted, and closed when nobody has wanted it for two seconds. Used on one loop.

    Args:
        make: opens a channel.
    """

    def __init__(self, make: Callable[[], grpc.aio.Channel]) -> None:
        self._make = make
        self._now: _Open | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[grpc.aio.Channel]:
        """The channel, for the length of the block; others may use it meanwhile.

        After an error the next block gets a new one, which need not wait between attempts to connect.
        """
        if self._now is None:
            self._now = _Open(self._make())
        opened = self._now
        if opened.idle is not None:
            opened.idle.cancel()
        opened.users += 1
        try:
            yield opened.channel
        except BaseException:
            if opened is self._now:
                self._now = None
            raise
        finally:
            opened.users -= 1
            if not opened.users:
                seconds = _IDLE_SECONDS if opened is self._now else 0.0
                opened.idle = asyncio.get_running_loop().call_later(seconds, self._close, opened)

    def _close(self, opened: _Open) -> None:
        if opened is self._now:
            self._now = None
        task = asyncio.ensure_future(opened.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
