"""Which tokens of which requests the next step computes. Pure: no clock, no thread, no model.

A request needs those of its tokens computed that are not in the KV cache: its whole prompt at first, then the one token
that was chosen last, and all of them again after it lost its pages. So prompt, decoding and recomputing are one thing.
A step takes one row of every request that lacks one token, then as many rows of the others as there is room for, the
oldest request first. Requests wait in the order of arrival until there are a place and pages for all their tokens.
When a running request needs a page and none is free, the youngest one gives all of its pages up and waits again, at its
old place in the order; the oldest one never does, so somebody always comes to an end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from compute_node.engine.kv_cache import Sequence
from compute_node.engine.language_model import SequencePlaces
from tierd.errors import UsageError

__all__ = ["Job", "Scheduler", "Share"]


@dataclass(slots=True, eq=False)
class Job:
    """A request as the scheduler sees it.

    Attributes:
        number: in order of arrival.
        tokens: prompt and what was chosen so far; whoever chooses appends to it.
        reuse: whether the tokens of a common prefix may be taken over from others.
        alone: its next step is to be computed without others, since a step with it has failed.
        cancelled: it is going to be removed before the next step, and takes nobody's place until then.
        sequence: its place in the KV cache while it runs.
        taken_over: tokens that were in the cache when it last began to run.
    """

    number: int
    tokens: list[int]
    reuse: bool = True
    alone: bool = False
    cancelled: bool = False
    sequence: Sequence | None = None
    taken_over: int = 0

    @property
    def lacking(self) -> int:
        """How many of its tokens are not in the cache."""
        return len(self.tokens) - (0 if self.sequence is None else len(self.sequence.tokens))


@dataclass(slots=True, eq=False)
class Share:
    """A job's part of a step.

    Attributes:
        job: whose.
        start: position of the first token.
        count: how many tokens.
    """

    job: Job
    start: int
    count: int

    @property
    def tokens(self) -> list[int]:
        """The tokens."""
        return self.job.tokens[self.start : self.start + self.count]

    @property
    def complete(self) -> bool:
        """Whether nothing lacks after it: the next token can be chosen."""
        return self.start + self.count == len(self.job.tokens)


class Scheduler:
    """Requests that wait and run.

    Args:
        cache: gives places and pages. Nobody else should use it.
        rows: most tokens of a step.
        max_running: most requests that run; at most `rows`, and at most the sequences of the cache.
        max_waiting: most requests that wait, those that lost their pages not counted.

    Attributes:
        running: in order of arrival.
        preempted: how often a job lost its pages.

    Raises:
        UsageError: bounds that do not fit each other.
    """

    def __init__(self, cache: SequencePlaces, *, rows: int, max_running: int, max_waiting: int) -> None:
        if not 1 <= max_running <= min(rows, cache.sequences):
            raise UsageError(
                f"--max-running {max_running} is outside 1 to {min(rows, cache.sequences)}, the rows of a step and the "
                f"sequences of the KV cache"
            )
        if max_waiting < 0:
            raise UsageError(f"--max-waiting {max_waiting} is below 0")
        self.running: list[Job] = []
        self.preempted = 0
        self.max_running = max_running
        self.max_waiting = max_waiting
        self._cache = cache
        self._rows = rows
        self._waiting: deque[Job] = deque()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Jobs that run and were not cancelled."""
        return sum(not job.cancelled for job in self.running)

    @property
    def full(self) -> bool:
        """Whether no more job may be added: all places are taken and the queue is full."""
        return self.waiting + self.active >= self.max_waiting + self.max_running

    @property
    def idle(self) -> bool:
        """Whether there is no job at all."""
        return not self.running and not self._waiting

    def jobs(self) -> Iterator[Job]:
        """All of them."""
        yield from self.running
        yield from self._waiting

    def add(self, job: Job) -> None:
        """A new job, of at least one token and fewer than the context; the caller has looked whether it is `full`."""
        self._waiting.append(job)

    def remove(self, job: Job) -> None:
        """The job is over: frees its place and pages."""
        if job.sequence is None:
            self._waiting.remove(job)
        else:
            self._give_back(job)
            self.running.remove(job)

    def plan(self) -> list[Share]:
        """The next step; empty if nothing can be computed now.

        Its tokens have pages. Cancelled jobs have been removed before. Call `done` after a step that succeeded; after
        another one nothing.
        """
        self._grow()
        self._admit()
        alone = next((job for job in self.running if job.alone), None)
        ready = self.running if alone is None else [alone]
        # Decoding first: one token each, and there are never more of them than rows.
        shares = [Share(job, len(job.tokens) - 1, 1) for job in ready if job.lacking == 1]
        left = self._rows - len(shares)
        if len(shares) < len(ready):
            for job in ready:
                lacking = job.lacking
                count = min(lacking, left) if lacking > 1 else 0
                if count:
                    shares.append(Share(job, len(job.tokens) - lacking, count))
                    left -= count
        return shares

    def done(self, shares: list[Share]) -> None:
        """The step was computed."""
        for share in shares:
            sequence = share.job.sequence
            assert sequence is not None
            self._cache.advance(sequence, share.tokens)
            share.job.alone = False

    def _grow(self) -> None:
        """Pages for the token that each running job has got; the youngest jobs make room."""
        for job in list(self.running):
            while job.sequence is not None and not self._cache.reserve(job.sequence, job.lacking):
                self._preempt(self.running[-1])

    def _admit(self) -> None:
        """Waiting jobs in order, as long as there are places and pages."""
        while self._waiting and len(self.running) < self.max_running:
            job = self._waiting[0]
            job.sequence = self._cache.begin(job.tokens, reuse=job.reuse)
            if job.sequence is None:
                return
            job.taken_over = len(job.sequence.tokens)
            self._waiting.popleft()
            self.running.append(job)
            self.running.sort(key=lambda job: job.number)

    def _preempt(self, job: Job) -> None:
        self.preempted += 1
        self._give_back(job)
        self.running.remove(job)
        place = next((at for at, other in enumerate(self._waiting) if other.number > job.number), len(self._waiting))
        self._waiting.insert(place, job)

    def _give_back(self, job: Job) -> None:
        assert job.sequence is not None
        self._cache.give_back(job.sequence)
        job.sequence = None
