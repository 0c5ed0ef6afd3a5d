"""Progress of work that is counted in bytes: a bar on a terminal, a plain line now and then in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from tierd.sizes import format_bytes, format_duration

__all__ = ["ByteProgress"]

LINE_SECONDS: Final = 5.0


class ByteProgress:
    """A context in which `update` shows progress.

    Args:
        note: said behind the bar, e.g. that it is safe to stop.
        stream: where to; standard error by default.
        clock: seconds, rising.
    """

    def __init__(
        self, note: str = "", *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._note = note
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._started = self._said = clock()
        self._first: int | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn(self._note, style="dim"),
                console=Console(file=self._stream),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int, label: str) -> None:
        """Shows that `done` of `total` bytes are through, now at `label`."""
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(label, total=total, completed=done)
            self._bar.update(self._task, description=label, completed=done)
            return
        if self._first is None:
            self._first = done
        now = self._clock()
        if now - self._said < LINE_SECONDS and done < total:
            return
        if done >= total and self._said == self._started:
            return  # short work needs no lines
        self._said = now
        speed = (done - self._first) / max(now - self._started, 1e-9)
        left = f", about {format_duration((total - done) / speed)} left" if speed > 0 and done < total else ""
        share = 100 * done / total if total else 100
        print(f"{label}  {share:.0f} %  {format_bytes(int(speed))}/s{left}", file=self._stream, flush=True)
