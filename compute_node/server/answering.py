"""What one HTTP request has the engine generate: one sequence, or several choices side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from compute_node.server.mailbox import EventStream, Mailbox
from compute_node.serving.requests import Done, EngineStats, Event, Request, Sink, Ticket

__all__ = ["Answering", "ServingEngine"]


class ServingEngine(Protocol):
    """What the server needs of an engine; see `compute_node.serving.requests`."""

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Accepts a request; raises QueueFull, LimitExceeded or UsageError."""

    def stats(self) -> EngineStats:
        """What it does now and has done."""

    def close(self) -> None:
        """Ends all requests and the engine."""


class Answering:
    """Runs requests and yields their events. For the loop's own thread.

    Args:
        engine: that generates.
        mailbox: brings events to the loop.
        requests: one per choice; all are accepted, or none is.

    Raises:
        TierdError: the engine refuses one of them.
    """

    def __init__(self, engine: ServingEngine, mailbox: Mailbox, requests: Sequence[Request]) -> None:
        self._stream = EventStream()
        self._tickets: list[Ticket] = []
        self._open = set(range(len(requests)))
        try:
            for index, request in enumerate(requests):
                sink: Callable[[Sequence[Event]], None] = partial(mailbox.post, self._stream, index)
                self._tickets.append(engine.submit(request, sink))
        except BaseException:
            self.leave()
            raise

    @property
    def finished(self) -> bool:
        """Every choice has had its last event."""
        return not self._open

    @property
    def left(self) -> bool:
        """The client has gone."""
        return self._stream.closed

    async def next(self, seconds: float) -> list[tuple[int, Event]]:
        """Events that came, each with its choice; empty after `seconds` without any."""
        found = await self._stream.next(seconds)
        self._open -= {index for index, event in found if isinstance(event, Done)}
        return found

    def stop(self, index: int) -> None:
        """Choice `index` needs no more tokens; its last event still comes."""
        self._tickets[index].cancel()

    def leave(self) -> None:
        """Nobody reads any more: everything is given up. Harmless when repeated or late."""
        self._stream.close()
        for ticket in self._tickets:
            ticket.cancel()
