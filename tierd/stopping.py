"""How a command that runs until it is stopped hears Ctrl-C and SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

__all__ = ["stopped_by_signals"]

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM calls `stop`, in the main thread; the next one does what it did before the block."""
    before: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def first(_number: int, _frame: FrameType | None) -> None:
        restore()
        stop()

    for number in _NUMBERS:
        before[number] = signal.signal(number, first)
    try:
        yield
    finally:
        restore()
