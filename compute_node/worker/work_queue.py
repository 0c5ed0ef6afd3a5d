"""Requests of all nodes on their way to the one thread that computes: bounded, and fair between nodes."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

__all__ = ["WorkQueue"]

_Job = TypeVar("_Job")


class WorkQueue(Generic[_Job]):
    """Takes turns between nodes, one request each: a node's long prompt does not keep another's tokens waiting.

    Args:
        most: requests of one node that may wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: OrderedDict[int, deque[_Job]] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._waiting.values()))

    def put(self, node: int, job: _Job) -> bool:
        """Queue a request; False if the node has too many that wait, or the queue is closed."""
        with self._changed:
            jobs = self._waiting.setdefault(node, deque())
            if len(jobs) >= self._most or self._closed:
                return False
            jobs.append(job)
            self._changed.notify()
            return True

    def drop(self, node: int) -> None:
        """The node has left: nobody waits for what it asked for."""
        with self._changed:
            self._waiting.pop(node, None)

    def take(self, seconds: float) -> _Job | None:
        """The next request; None if none comes within so many seconds, or the queue is closed."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or any(self._waiting.values()), seconds) or self._closed:
                return None
            node = next(node for node, jobs in self._waiting.items() if jobs)
            jobs = self._waiting[node]
            job = jobs.popleft()
            # It goes behind all others; a node without requests need not be remembered.
            self._waiting.move_to_end(node)
            if not jobs:
                del self._waiting[node]
            return job

    def close(self) -> None:
        """Whoever waits returns, and nothing is taken any more."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
