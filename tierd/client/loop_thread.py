"""One asyncio loop in a thread of its own, for callers that are synchronous.

grpc.aio lives on one loop per process; everything of a node that speaks gRPC shares this one.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Final, TypeVar

import uvloop

from tierd.errors import DeadlineExceeded

__all__ = ["LoopThread"]

_Result = TypeVar("_Result")
_STOP_SECONDS: Final = 2.0


class LoopThread:
    """Runs coroutines for other threads. Use `shared()`; a second loop with grpc.aio in a process does not work."""

    _shared: LoopThread | None = None
    _making = threading.Lock()

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tierd-client-loop", daemon=True)
        self._thread.start()
        # A timer of uvloop that fires after the interpreter has ended would crash the process. Finalizers that are
        # made later run earlier: those of sources still have the loop.
        weakref.finalize(self, _stop, self.loop, self._thread)

    @classmethod
    def shared(cls) -> LoopThread:
        """The process's loop thread, started at first use. It lives until the interpreter ends."""
        with cls._making:
            if cls._shared is None:
                cls._shared = cls()
            return cls._shared

    def run(self, work: Coroutine[Any, Any, _Result], *, seconds: float, what: str) -> _Result:
        """Run `work` on the loop and wait for its result.

        Raises:
            DeadlineExceeded: it took longer than `seconds`; `what` names it. The work is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(seconds)
        except TimeoutError as error:
            future.cancel()
            raise DeadlineExceeded(f"{what} took longer than {seconds:g} s") from error
        except CancelledError as error:
            raise DeadlineExceeded(f"{what} was cancelled") from error

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call `function` on the loop soon; returns at once."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if thread.is_alive():
        asyncio.run_coroutine_threadsafe(_end(loop), loop)
        thread.join(2 * _STOP_SECONDS)


async def _end(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_STOP_SECONDS)
    loop.stop()
