"""No more lines of one kind than somebody can read, and a count of all of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

__all__ = ["LEVELS", "LINES", "LogLimiter", "LogLines"]

LEVELS: Final = ("debug", "info", "warning", "error", "critical")

_MOST: Final = 100
_SECONDS: Final = 10.0
_MOST_KINDS: Final = 256
"""Kinds of events that are remembered; the ones seen longest ago are forgotten."""


class LogLines:
    """How many lines were written, by level, and how many were left out."""

    def __init__(self) -> None:
        self.written = dict.fromkeys(LEVELS, 0)
        self.left_out = 0


LINES: Final = LogLines()
"""Of this process."""


@dataclass(slots=True)
class _Window:
    began: float
    lines: int = 0
    left_out: int = 0


class LogLimiter:
    """A structlog processor: lets so many lines of one event pass in a while, and says how many it left out.

    Args:
        lines: where it counts.
        clock: seconds, rising.
        most: lines of one event in `seconds`.
        seconds: see `most`.
    """

    def __init__(
        self,
        lines: LogLines,
        clock: Callable[[], float] = time.monotonic,
        *,
        most: int = _MOST,
        seconds: float = _SECONDS,
    ) -> None:
        self._lines = lines
        self._clock = clock
        self._most = most
        self._seconds = seconds
        self._windows: OrderedDict[str, _Window] = OrderedDict()

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Pass the event on, or drop it.

        Raises:
            DropEvent: structlog writes nothing then.
        """
        del logger
        now, name = self._clock(), str(event.get("event", ""))
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = _Window(now)
            if len(self._windows) > _MOST_KINDS:
                self._windows.popitem(last=False)
        self._windows.move_to_end(name)
        if now - window.began >= self._seconds:
            if window.left_out:
                event["left_out"] = window.left_out
            window.began, window.lines, window.left_out = now, 0, 0
        window.lines += 1
        if window.lines > self._most:
            window.left_out += 1
            self._lines.left_out += 1
            raise structlog.DropEvent
        level = str(event.get("level", method))
        if level in self._lines.written:
            self._lines.written[level] += 1
        return event
