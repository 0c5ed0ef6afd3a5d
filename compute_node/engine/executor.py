"""Runs segments of ops over persistent threads, or one op after the other from Python as the reference."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.cores import default_threads
from compute_node.kernels import run_loop
from compute_node.kernels.op import address_of
from compute_node.kernels.run_loop import run_table
from compute_node.kernels.segment import Segment
from tierd.errors import TierdError, UsageError

__all__ = ["Executor", "default_threads"]

_MOST_THREADS: Final = 1024
_START_SECONDS: Final = 30.0
_THREADS: Final = run_loop.THREADS // 8
_REFUSAL: Final = run_loop.REFUSAL // 8
_BEGUN: Final = run_loop.BEGUN // 8
_ENDED: Final = run_loop.ENDED // 8
_SPENT: Final = run_loop.SPENT // 8


def _wrong_mode(thread: str) -> TierdError:
    return TierdError(
        f"{thread} turns very small numbers to zero, which changes results",
        hint="A library loaded with unsafe maths flags set the floating-point mode; start without it.",
    )


def _refusal(code: int) -> TierdError:
    if code == run_loop.CLOSED:
        return TierdError("the executor is closed")
    if code == run_loop.FORKED:
        return TierdError("the executor's threads stayed in the process that made it", hint="Make one after a fork.")
    return _wrong_mode("the calling thread")


def _work(block: int, part: int, threads: int, ready: queue.SimpleQueue[bool]) -> None:
    ready.put(run_loop.wrong_mode(block))
    run_loop.worker(block, part, threads)


def _stop(block: NDArray[np.int64], workers: list[threading.Thread], owner: int) -> None:
    """Ends the workers, then lets go of the memory that they look at."""
    if owner == os.getpid():
        run_loop.stop(address_of(block))
        for thread in workers:
            thread.join()
    workers.clear()


class Executor:
    """Persistent native threads that run segments together with the calling thread.

    Between segments a worker spins for 50 us, leaves its core to others between looks for a millisecond, and then
    sleeps, so that an idle executor uses no processor.
    `run` and `run_reference` give the same bits for any number of threads. One caller at a time runs; others wait,
    in native code.

    Attributes:
        threads: threads that run a segment, the caller's included.
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
        self.watch: Callable[[str, float, float], object] | None = None
        # Which words share a line of 64 bytes is meant: the block begins at one.
        words = np.zeros(run_loop.BLOCK_WORDS + 8, np.int64)
        skip = -address_of(words) % 64 // 8
        self._block = words[skip : skip + run_loop.BLOCK_WORDS]
        self._block.view(np.float32)[run_loop.TINY // 4] = 1e-40
        self._address = address_of(self._block)
        self._words = self._block.data
        self._words[_THREADS] = count
        workers: list[threading.Thread] = []
        self._end = weakref.finalize(self, _stop, self._block, workers, os.getpid())
        _LIVING.add(self)
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
        done = run_table(self._address, segment.address, first, segment.count if until is None else until)
        if done < 0:
            raise _refusal(done)
        if self.watch is not None:
            self._say(segment.name)
        return done  # type: ignore[no-any-return]

    def run_each(self, segment: Segment) -> None:
        """Runs a segment op by op from Python, each over all threads if it is large enough; for comparison.

        Raises:
            TierdError: the executor is closed, was made before a fork, or the thread's floating-point mode is wrong.
        """
        for index, op in enumerate(segment.ops):
            done = run_table(self._address, segment.address, index, index + 1)
            if done < 0:
                raise _refusal(done)
            if self.watch is not None:
                self._say(op.name)

    def run_reference(self, segment: Segment) -> None:
        """Runs a segment op by op from Python on the calling thread: the same bits, easy to step through.

        Raises:
            TierdError: the executor is closed, was made before a fork, or the thread's floating-point mode is wrong.
        """
        refused = self._words[_REFUSAL]
        if refused or run_loop.wrong_mode(self._address):
            raise _refusal(refused)
        for op in segment.ops:
            op()

    @property
    def native_seconds(self) -> float:
        """Time that was spent in native code, over all runs."""
        return self._words[_SPENT] * 1e-9

    def _say(self, name: str) -> None:
        """Tells who watches of the last run."""
        if self.watch is not None:
            self.watch(name, self._words[_BEGUN] * 1e-9, self._words[_ENDED] * 1e-9)

    def close(self) -> None:
        """Ends the threads, after the segment that runs; harmless when repeated."""
        self._end()

    def _forked(self) -> None:
        """This is a child of the process that has the threads."""
        self._words[_REFUSAL] = run_loop.FORKED

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_LIVING: Final[weakref.WeakSet[Executor]] = weakref.WeakSet()


def _after_fork() -> None:
    for executor in _LIVING:
        executor._forked()  # noqa: SLF001 - of this file


os.register_at_fork(after_in_child=_after_fork)
