"""Events from the engine's thread to coroutines: one wake-up of the loop for all that came meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence

from compute_node.serving.requests import Done, Event

__all__ = ["EventStream", "Mailbox"]


class EventStream:
    """The events of one HTTP request, which may be several requests of the engine.

    What waits here is bounded by what the engine may generate for it. For the loop's own thread.
    """

    def __init__(self) -> None:
        self._events: list[tuple[int, Event]] = []
        self._waiting: asyncio.Future[None] | None = None
        self.closed = False

    def deliver(self, index: int, events: Sequence[Event]) -> None:
        """Takes events of the choice `index`; drops them once nobody listens."""
        if not self.closed:
            self._events += [(index, event) for event in events]
            self._wake()

    def close(self) -> None:
        """Nobody listens any more; wakes who waits."""
        self.closed = True
        self._events.clear()
        self._wake()

    async def next(self, seconds: float) -> list[tuple[int, Event]]:
        """What has come, each with its choice; empty after `seconds` without any, or when closed."""
        if not self._events and not self.closed:
            # A future and a timer: a third of what an event within a timeout costs, at every token of every client.
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            timer = loop.call_later(seconds, self._wake)
            try:
                await self._waiting
            finally:
                timer.cancel()
                self._waiting = None
        found, self._events = self._events, []
        return found

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class Mailbox:
    """Between the engine's thread and one loop.

    Args:
        loop: whose coroutines read.
        finished: told of every request's last event on the loop, listened to or not.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, finished: Callable[[Done], None]) -> None:
        self._loop = loop
        self._finished = finished
        self._lock = threading.Lock()
        self._posts: deque[tuple[EventStream, int, Sequence[Event]]] = deque()
        self._woken = False

    def post(self, stream: EventStream, index: int, events: Sequence[Event]) -> None:
        """Hands events over; from the engine's thread."""
        with self._lock:
            self._posts.append((stream, index, events))
            wake, self._woken = not self._woken, True
        if wake:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The loop has ended before the engine: nobody is left to be told.
                self._posts.clear()

    def _deliver(self) -> None:
        with self._lock:
            posts, self._posts = self._posts, deque()
            self._woken = False
        for stream, index, events in posts:
            for event in events:
                if isinstance(event, Done):
                    self._finished(event)
            stream.deliver(index, events)
