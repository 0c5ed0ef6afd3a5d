"""The engine: one thread that computes step after step, for as many requests at once as there are.

Requests join and leave between steps. What a step computes of whom is decided by the scheduler; a row's result does not
depend on the rows beside it, so a request's tokens are the same alone and in a crowd. Without requests the thread
sleeps.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.language_model import LanguageModel
from compute_node.engine.stop import stop_token_ids
from compute_node.serving.answer import Answer
from compute_node.serving.entry import Cost, Entry
from compute_node.serving.pace import Pace
from compute_node.serving.requests import (
    EngineStats,
    Event,
    FinishReason,
    QueueFull,
    Request,
    Sink,
    StepReport,
    Ticket,
)
from compute_node.serving.running_step import RunningStep
from compute_node.serving.scheduler import Job, Scheduler, Share
from compute_node.text.tokenizer import Tokenizer
from tierd.client.source import Phase
from tierd.errors import DaemonUnavailable, DeadlineExceeded, TierdError

__all__ = ["Engine"]

_RETRY_SECONDS: Final = 0.05
"""How long the thread waits where requests wait and nothing can run, since somebody else holds the KV cache."""
_ONLY: Final = (0,)


class Engine:
    """Generates answers to many requests at once with one model. All of it may be called from any thread.

    Args:
        model: loaded model with places for `max_running` sequences. The engine is its only user until `close`.
        tokenizer: turns token ids into text; None: events carry no text, and stop strings are refused.
        max_running: most requests that are computed at once; at most the rows of a step.
        max_waiting: most requests that wait beside them.
        on_step: told of each step, on the engine's thread.
        clock: seconds that never go back.

    Raises:
        UsageError: bounds that the model does not allow.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None,
        *,
        max_running: int = 16,
        max_waiting: int = 64,
        on_step: Callable[[StepReport], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._scheduler = Scheduler(model.cache, rows=model.rows, max_running=max_running, max_waiting=max_waiting)
        self._end_of_text = stop_token_ids(model.source.store, model.config.eos_token_ids)
        self._on_step = on_step
        self._clock = clock
        self._pace = Pace(max_running)
        self._condition = threading.Condition()
        self._entries: dict[int, Entry] = {}
        self._over: list[Entry] = []  # cancelled while they waited: only `Done` is left
        self._running = RunningStep(model.rows, clock)
        self._step: RunningStep | None = None
        self._closing = False
        self._number = 0
        self._counts: Counter[str] = Counter()
        self._finished = Counter(dict.fromkeys((reason.value for reason in FinishReason), 0))
        self._steps = self._rows = 0
        self._cost = Cost(model)
        self._news = False  # something has changed since the last plan
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Accepts a request; its events go to `sink`, the last one is `Done`.

        Raises:
            QueueFull: as many requests run and wait as may.
            UsageError: options outside their limits; LimitExceeded where the prompt can never fit.
            TierdError: the engine is closed.
        """
        answer = Answer(
            request,
            self.tokenizer,
            self._end_of_text,
            vocab_size=self.model.config.vocab_size,
            context=self.model.context,
        )
        with self._condition:
            if self._closing:
                raise TierdError("the engine is closed")
            if self._scheduler.full:
                self._counts["refused"] += 1
                raise QueueFull(
                    f"{self._scheduler.active} requests run and {self._scheduler.waiting} wait: no more are taken",
                    retry_after_seconds=self._pace.seconds_until_a_place,
                    hint="Try again later; or start the node with a larger --max-waiting.",
                )
            self._number += 1
            self._counts["requests"] += 1
            begun = self._clock()
            deadline = float("inf") if request.deadline_seconds is None else begun + request.deadline_seconds
            job = Job(self._number, answer.tokens, reuse=not request.prompt_logprobs)
            self._entries[job.number] = Entry(job, answer, sink, begun, deadline)
            self._scheduler.add(job)
            self._news = True
            self._condition.notify_all()
        return Ticket(job.number, self._cancel)

    def stats(self) -> EngineStats:
        """What it does now and has done."""
        with self._condition:
            scheduler, counts, pool = self._scheduler, self._counts, self.model.cache.pool
            seconds, waited = self._cost.times()
            return EngineStats(
                running=scheduler.active,
                waiting=scheduler.waiting,
                max_running=scheduler.max_running,
                max_waiting=scheduler.max_waiting,
                pages=pool.pages,
                free_pages=pool.available,
                cached_pages=pool.kept,
                requests=counts["requests"],
                refused=counts["refused"],
                finished=dict(self._finished),
                prompt_tokens=counts["prompt_tokens"],
                reused_tokens=counts["reused_tokens"],
                completion_tokens=counts["completion_tokens"],
                steps=self._steps,
                rows=self._rows,
                preempted=scheduler.preempted,
                step_seconds=seconds,
                wait_seconds=waited,
                experts=dict(self.model.source.stats.tiers),
            )

    def close(self) -> None:
        """Ends all requests, the running step at its next layer, and the thread; harmless when repeated."""
        with self._condition:
            self._closing = self._news = True
            if self._step is not None:
                self._step.cancel()
            self._condition.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _cancel(self, number: int) -> None:
        with self._condition:
            entry = self._entries.get(number)
            if entry is None or entry.job.cancelled:
                return
            entry.job.cancelled = self._news = True
            if entry.job.sequence is None:
                self._scheduler.remove(entry.job)
                self._over.append(entry)
            elif self._step is not None:
                self._step.drop(entry.job)
            self._condition.notify_all()

    def _work(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            # Reached by `close`, and by a defect: whatever happened, each request is answered.
            with self._condition:
                self._closing = True
                left = list(self._entries.values())
            for entry in left:
                self._end(entry, FinishReason.CANCELLED)

    def _turn(self) -> bool:
        """What is over, then a step; False at the end."""
        with self._condition:
            while not self._closing and self._scheduler.idle and not self._over:
                self._condition.wait()
            if self._closing:
                return False
            self._news = False
            over = [(entry, FinishReason.CANCELLED) for entry in self._over]
            self._over.clear()
            now = self._clock()
            for job in list(self._scheduler.jobs()):
                entry = self._entries[job.number]
                if job.cancelled or now >= entry.deadline:
                    self._scheduler.remove(job)
                    over.append((entry, FinishReason.CANCELLED if job.cancelled else FinishReason.DEADLINE))
            shares = self._scheduler.plan()
            entries = self._begin(shares, now) if shares else []
            alone = len(entries) == 1 and self._is_alone(shares[0], entries[0])
            if not shares and not over:
                self._condition.wait(_RETRY_SECONDS)
        for entry, reason in over:
            self._end(entry, reason)
        if alone:
            self._run_alone(entries[0])
        elif shares:
            self._run(shares, entries)
        return True

    def _begin(self, shares: Sequence[Share], now: float) -> list[Entry]:
        entries = [self._entries[share.job.number] for share in shares]
        for entry in entries:
            if entry.started is None:
                entry.started = now
                entry.cached_tokens = entry.job.taken_over
                self._counts["prompt_tokens"] += entry.answer.prompt_length
                self._counts["reused_tokens"] += entry.job.taken_over
        self._running.begin(shares, max([entry.deadline for entry in entries]))
        self._step = self._running
        return entries

    def _run(self, shares: list[Share], entries: list[Entry]) -> None:
        model, step = self.model, self._running
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[Any] = []
        wanted: list[int] = []
        parts = []  # by share: the offsets whose logits are wanted, and the place of the first in `wanted`
        for share, entry in zip(shares, entries, strict=True):
            first, start, count = len(tokens), share.start, share.count
            offsets = entry.answer.wanted(start, count)
            parts.append((offsets, len(wanted)))
            wanted += [first + offset for offset in offsets]
            tokens += share.tokens
            positions += range(start, start + count)
            sequences += [share.job.sequence] * count
        cost = Cost(model)
        logits, error = None, None
        try:
            logits = model.forward(
                tokens,
                positions,
                sequences,
                phase=_phase(shares, len(tokens)),
                logits_of=wanted,
                cancelled=step,
                unwanted=step.unwanted,
            )
        except TierdError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - a defect ends the requests that met it, not the engine
            error = _unexpected(failure)
        cost.note(*entries)
        with self._condition:
            self._step = None
            self._steps += 1
            self._rows += len(tokens)
            # What was cancelled meanwhile is not what it should be: nobody may take its pages over.
            live = [place for place, entry in enumerate(entries) if not entry.job.cancelled]
            if logits is not None:
                self._scheduler.done([shares[place] for place in live])
        if error is not None:
            self._fail([entries[place] for place in live], error)
        elif logits is not None:
            for place in live:
                offsets, first = parts[place]
                rows = slice(first, first + len(offsets))
                self._advance(entries[place], shares[place], offsets, logits[rows], model.likeliest[rows])
        if self._on_step is not None:
            prompts = sum([entry.prompt_rows(share) for share, entry in zip(shares, entries, strict=True)])
            self._on_step(StepReport(*cost.times(), len(tokens), len(shares), prompts))

    def _is_alone(self, share: Share, entry: Entry) -> bool:
        """Whether there is nothing to do but one token after the other of this request."""
        scheduler = self._scheduler
        others = scheduler.waiting or len(scheduler.running) > 1
        return not others and not entry.job.alone and share.count == 1 and share.start >= entry.answer.prompt_length

    def _run_alone(self, entry: Entry) -> None:
        """Steps of the only request, until it is over or something else comes up.

        Nothing is planned or locked between two of them: what Python touches there comes from memory, since native
        code fills the caches with weights, and a whole step takes a few milliseconds.
        """
        model, job, answer, clock, report = self.model, entry.job, entry.answer, self._clock, self._on_step
        cache, sequence, tokens, step, times = model.cache, job.sequence, job.tokens, self._running, model.times
        cost, error, now, phase = Cost(model), None, 0.0, Phase.DECODE
        while True:
            place, seconds, waited, token = len(tokens) - 1, times.seconds, times.wait_seconds, None
            part = tokens[place:]
            self._steps += 1
            self._rows += 1
            try:
                logits = model.forward(part, (place,), (sequence,), phase=phase, logits_of=_ONLY, cancelled=step)
                if logits is not None and not job.cancelled:
                    cache.advance(sequence, part)
                    likeliest, now = model.likeliest, clock()
                    token = answer.choose(logits[0], likeliest[0] if likeliest else None, now - entry.begun)
            except TierdError as failure:
                error = failure
            except Exception as failure:  # noqa: BLE001 - see `_run`
                error = _unexpected(failure)
            over = token is None or answer.reason is not None
            if token is not None and not over:
                self._send(entry, (token,))
            if report is not None:
                report(StepReport(times.seconds - seconds, times.wait_seconds - waited, 1, 1, 0))
            if over or self._news or now >= entry.deadline or not cache.reserve(sequence, 1):
                break
        cost.note(entry)
        with self._condition:
            self._step = None
        if error is not None:
            self._end(entry, FinishReason.ERROR, error=error)
        elif token is not None and answer.reason is not None:
            self._end(entry, answer.reason, (token,))

    def _advance(
        self, entry: Entry, share: Share, offsets: list[int], rows: NDArray[np.float32], likeliest: list[int]
    ) -> None:
        """A request's part of a step succeeded."""
        complete = share.complete
        seconds = self._clock() - entry.begun
        try:
            events = entry.answer.step(share.start, offsets, rows, likeliest, seconds, complete=complete)
        except TierdError as failure:
            self._end(entry, FinishReason.ERROR, error=failure)
            return
        except Exception as failure:  # noqa: BLE001 - such as of a constraint
            self._end(entry, FinishReason.ERROR, error=_unexpected(failure))
            return
        reason = entry.answer.reason
        if reason is not None:
            self._end(entry, reason, events)
        elif events:
            self._send(entry, events)

    def _fail(self, entries: list[Entry], error: TierdError) -> None:
        """A step failed. Who is to blame shows when each of its requests is computed alone, unless all would fail."""
        everybody = isinstance(error, DaemonUnavailable | DeadlineExceeded)
        if len(entries) == 1 or everybody:
            for entry in entries:
                self._end(entry, FinishReason.ERROR, error=error)
        else:
            for entry in entries:
                entry.job.alone = True

    def _end(
        self, entry: Entry, reason: FinishReason, events: Sequence[Event] = (), error: TierdError | None = None
    ) -> None:
        """The request is over: frees what it holds, then says so."""
        now, number = self._clock(), entry.job.number
        started = now if entry.started is None else entry.started
        done = entry.answer.done(
            reason,
            cached_tokens=entry.cached_tokens,
            seconds=now - entry.begun,
            queue_seconds=started - entry.begun,
            error=error,
        )
        with self._condition:
            if any(job is entry.job for job in self._scheduler.jobs()):
                self._scheduler.remove(entry.job)
            del self._entries[number]
            self._finished[reason.value] += 1
            self._counts["completion_tokens"] += done.usage.completion_tokens
            if entry.started is not None:
                self._pace.ended(now - started)
        self._send(entry, [*events, done])

    def _send(self, entry: Entry, events: Sequence[Event]) -> None:
        try:
            entry.sink(events)
        except Exception:  # noqa: BLE001 - whoever cannot hear gets no more
            self._cancel(entry.job.number)


def _unexpected(failure: Exception) -> TierdError:
    return TierdError(f"unexpected {type(failure).__name__}: {failure}", hint="This is a defect of the node.")


def _phase(shares: Sequence[Share], rows: int) -> Phase:
    """What most rows of a step are: a prompt beside many who decode should not make their experts leave."""
    decoding = sum([share.count == 1 for share in shares])
    return Phase.DECODE if 2 * decoding >= rows else Phase.PREFILL
