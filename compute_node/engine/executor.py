"""Runs segments of ops over persistent threads, or one op after the other from Python as the reference."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.cores import default_threads
from compute_node.kernels import run_loop
from compute_node.kernels.op import address_of
from compute_node.kernels.segment import Segment
from tierd.errors import TierdError, UsageError

__all__ = ["Executor", "default_threads"]

_MOST_THREADS: Final = 1024
_START_SECONDS: Final = 30.0


def _wrong_mode(thread: str) -> TierdError:
    return TierdError(
        f"{thread} turns very small numbers to zero, which changes results",
        hint="A library loaded with unsafe maths flags set the floating-point mode; start without it.",
    )


def _work(block: int, part: int, threads: int, ready: queue.SimpleQueue[bool]) -> None:
    ready.put(run_loop.wrong_mode(block))
    run_loop.worker(block, part, threads)


def _stop(block: NDArray[np.int64], workers: list[threading.Thread], owner: int) -> None:
    """Ends the workers, then lets go of the memory that they look at."""
    if workers and owner == os.getpid():
        run_loop.stop(address_of(block))
        for thread in workers:
            thread.join()
    workers.clear()


class Executor:
    """Persistent native threads that run segments together with the calling thread.

    Between segments a worker spins for 50 us, leaves its core to others between looks for a millisecond, and then
    sleeps, so that an idle executor uses no processor.
    `run` and `run_reference` give the same bits for any number of threads. One caller at a time runs; others wait.

    Attributes:
        threads: threads that run a segment, the caller's included.
        native_seconds: time that `run` spent in native code, over all calls.
        watch: told of each piece that ran: name of the segment or op, beginning and end on the monotonic clock.

    Args:
        threads: how many; as many as `default_threads()` by default.

    Raises:
        UsageError: not a number of threads.
        TierdError: threads did not start, or their floating-point mode would change results.
    """

    def __init__(self, threads: int | None = None) -> None:
        count = default_threads() if threads is None else threads
        if not 1 <= count <= _MOST_THREADS:
            raise UsageError(f"an executor has 1 to {_MOST_THREADS} threads, not {count}")
        self.threads = count
        self.native_seconds = 0.0
        self.watch: Callable[[str, float, float], object] | None = None
        # A line of 64 bytes for each word: the block begins at one.
        words = np.zeros(run_loop.BLOCK_WORDS + 8, np.int64)
        skip = -address_of(words) % 64 // 8
        self._block = words[skip : skip + run_loop.BLOCK_WORDS]
        self._block.view(np.float32)[run_loop.TINY // 4] = 1e-40
        self._address = address_of(self._block)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        workers: list[threading.Thread] = []
        self._end = weakref.finalize(self, _stop, self._block, workers, self._owner)
        ready: queue.SimpleQueue[bool] = queue.SimpleQueue()
        try:
            for part in range(1, count):
                thread = threading.Thread(
                    target=_work, args=(self._address, part, count, ready), name=f"kernels-{part}", daemon=True
                )
                thread.start()
                workers.append(thread)
            wrong = any(ready.get(timeout=_START_SECONDS) for _ in workers)
        except (RuntimeError, queue.Empty) as error:
            self.close()
            raise TierdError(f"{count} kernel threads could not be started", hint="Use fewer --threads.") from error
        if wrong:
            self.close()
            raise _wrong_mode("a kernel thread")

    def run(self, segment: Segment, first: int = 0, until: int | None = None) -> int:
        """Runs the ops of a segment in order, each over all threads if it is large enough.

        Args:
            segment: what to run.
            first: number of the op to begin with.
            until: number of the op to end before; None: its last one is run, too.

        Returns:
            The number of the op that halted the run, or `until` if none did.

        Raises:
            TierdError: the executor is closed, was made before a fork, or the thread's floating-point mode is wrong.
        """
        end = len(segment.ops) if until is None else until
        with self._lock:
            if self._closed or self._owner != os.getpid():
                self._check()
            begun = time.monotonic()
            done = run_loop.run_table(self._address, segment.address, first, end, self.threads)
            ended = time.monotonic()
            self.native_seconds += ended - begun
        if self.watch is not None:
            self.watch(segment.name, begun, ended)
        if done < 0:
            raise _wrong_mode("the calling thread")
        return int(done)

    def run_each(self, segment: Segment) -> None:
        """Runs a segment op by op from Python, each over all threads if it is large enough; for comparison.

        Raises:
            TierdError: the executor is closed, was made before a fork, or the thread's floating-point mode is wrong.
        """
        for index in range(len(segment.ops)):
            with self._lock:
                self._check()
                begun = time.monotonic()
                done = run_loop.run_table(self._address, segment.address, index, index + 1, self.threads)
            if self.watch is not None:
                self.watch(segment.ops[index].name, begun, time.monotonic())
            if done < 0:
                raise _wrong_mode("the calling thread")

    def run_reference(self, segment: Segment) -> None:
        """Runs a segment op by op from Python on the calling thread: the same bits, easy to step through.

        Raises:
            TierdError: the executor is closed, was made before a fork, or the thread's floating-point mode is wrong.
        """
        with self._lock:
            self._check()
            if run_loop.wrong_mode(self._address):
                raise _wrong_mode("the calling thread")
            for op in segment.ops:
                op()

    def _check(self) -> None:
        if self._closed:
            raise TierdError("the executor is closed")
        if self._owner != os.getpid():
            raise TierdError("the executor's threads stayed in the process that made it", hint="Make one after a fork.")

    def close(self) -> None:
        """Ends the threads, after the segment that runs; harmless when repeated."""
        with self._lock:
            self._closed = True
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
