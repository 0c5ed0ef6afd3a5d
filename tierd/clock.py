"""Time as an argument: whatever waits takes a clock, so that tests and a simulation decide what time it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "Timer"]


class Timer(Protocol):
    """A call that can still be called off."""

    def cancel(self) -> None:
        """Call it off; harmless when it has happened."""


class Clock(Protocol):
    """Time in seconds and calls at a time; an asyncio loop is one."""

    def time(self) -> float:
        """Seconds since some fixed moment."""

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call `callback` after `delay` seconds."""
