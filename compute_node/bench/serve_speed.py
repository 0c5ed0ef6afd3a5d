"""Many clients at once on one engine: what reaches them, beside the bare steps of the same model."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from compute_node.bench.bare_steps import run_bare_steps
from compute_node.bench.client_load import ANSWER_SECONDS, Answered, Client, figures, run_clients
from compute_node.bench.quiet import Quiet
from compute_node.engine.generate import GenerationParams
from compute_node.engine.model import Model
from compute_node.serving.engine import Engine
from compute_node.serving.requests import Done, EngineStats, Event, FinishReason, Request, Token
from tierd.errors import TierdError

__all__ = ["CLIENTS", "Expected", "measure_serving"]

CLIENTS: Final = (1, 4, 16, 64)
"""How many clients ask at once, one measurement after the other."""

_ALONE: Final = 8
"""Prompts that are answered alone, too, by bare steps of one row and by the engine in turn."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What clients ask, and the greedy tokens that answer it."""

    prompts: list[list[int]]
    answers: list[tuple[int, ...]]


class _EngineClient(Client):
    """Asks the engine itself, in its own process."""

    def __init__(self, engine: Engine, number: int, expected: Expected, count: int) -> None:
        # Neighbours never ask for the same: each client has prompts of its own.
        self._prompts_of_its_own = expected.prompts[number::count]
        self._answers = expected.answers[number::count]
        super().__init__(number, len(self._answers), len(self._answers[0]))
        self._engine = engine

    def ask(self, which: int, tokens: int, leaves_after: int) -> Answered:
        """See `Client.ask`."""
        listening = _Listening(leaves_after, self.started.set)
        params = GenerationParams(max_tokens=tokens, ignore_eos=True)
        try:
            request = Request(prompt=tuple(self._prompts_of_its_own[which]), params=params)
            ticket = self._engine.submit(request, listening.hear)
            done = listening.wait()
            if done is None:
                ticket.cancel()
                done = listening.wait()
        except (TierdError, queue.Empty):
            return Answered([], 0, right=True, whole=False)
        found, reason = listening.tokens, None if done is None else done.reason
        return Answered(
            listening.times,
            len(found),
            right=found == list(self._answers[which][: len(found)]),
            whole=reason is FinishReason.LENGTH and len(found) == tokens,
            left=reason is FinishReason.CANCELLED and leaves_after <= tokens,
        )


class _Listening:
    """Takes the events of one answer on the engine's thread; wakes its client at the end, or where that leaves."""

    def __init__(self, leaves_after: int, started: Callable[[], None]) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._started = started
        self._leaves_after = leaves_after
        self._news: queue.SimpleQueue[Done | None] = queue.SimpleQueue()

    def hear(self, events: Sequence[Event]) -> None:
        """What `Engine.submit` calls."""
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Token):
                if not self.tokens:
                    self._started()
                self.tokens.append(event.token)
                self.times.append(now)
                if len(self.tokens) == self._leaves_after:
                    self._news.put(None)
            elif isinstance(event, Done):
                self._news.put(event)

    def wait(self) -> Done | None:
        """The last event, or None where the client leaves; queue.Empty if nothing comes."""
        return self._news.get(timeout=ANSWER_SECONDS)


def measure_serving(
    model: Model, *, clients: Sequence[int] = CLIENTS, seconds: float, tokens: int, tell: Callable[[str], None]
) -> tuple[dict[str, Any], Expected]:
    """Serves so many clients at once for `seconds` each.

    Args:
        model: with places for the most clients, and as many rows and more.
        clients: how many, rising; 1 and 16 are among them for the ratios.
        seconds: of each measurement.
        tokens: of an answer.
        tell: takes a line when something begins.

    Returns:
        `tokens_per_second`, `ttft_p50`, `ttft_p99`, `tpot_p50`, `tpot_p99` by client count, counts and ratios; and
        what was asked.
    """
    most = max(clients)
    generator = np.random.Generator(np.random.Philox(11))
    lengths = generator.integers(8, 25, most).tolist()
    prompts = [generator.integers(0, model.config.vocab_size, length).tolist() for length in lengths]
    crowd = min(16, most)
    tell(f"the answers to {most} prompts")
    with Quiet() as quiet:
        groups = [run_bare_steps(model, prompts[at : at + crowd], tokens) for at in range(0, most, crowd)]
        expected = Expected(prompts, [answer for group in groups for answer in group.answers])
        tell("one answer at a time")
        alone, shares, changed = _alone(model, expected, tokens)
        found = []
        for count in clients:
            tell(f"{count} clients")
            found.append(_serve(model, count, expected, seconds))
        again = run_bare_steps(model, prompts[:crowd], tokens)
    bare = {
        1: float(np.median(alone)),
        crowd: float(np.median([second for group in (*groups, again) for second in group.seconds])),
    }
    result: dict[str, Any] = {
        name: {str(count): figures[name] for count, figures in zip(clients, found, strict=True)} for name in found[0]
    }
    rates = dict(zip(clients, (figures["tokens_per_second"] for figures in found), strict=True))
    result |= {
        "errors": sum(figures["errors"] for figures in found),
        "crossed_answers": changed + sum(figures["crossed_answers"] for figures in found),
        "places_free_at_the_end": all(figures["places_free"] for figures in found),
        "bare_step_seconds": {str(rows): step for rows, step in bare.items()},
    }
    if {1, 16} <= set(clients):
        result |= {
            "aggregate_ratio_16_to_1": rates[16] / rates[1],
            "one_client_share_of_step": float(np.median(shares)),
            "one_client_shares": shares,
            "sixteen_share_of_step": rates[16] * bare[16] / 16,
        }
    result |= quiet.report() | {"seconds": seconds, "tokens_of_an_answer": tokens, "threads": model.threads}
    return result, expected


def _alone(model: Model, expected: Expected, tokens: int) -> tuple[list[float], list[float], int]:
    """Bare steps of one row and whole answers to a lone client, in turn: the machine's speed changes by tenths.

    Returns:
        Seconds of a bare step, and the answer's tokens per second over those of bare steps, of each turn; and how
        many answers are not what they must be.
    """
    steps, shares, wrong = [], [], 0
    engine = Engine(model, None, max_running=model.cache.sequences, max_waiting=1)
    client = _EngineClient(engine, 0, expected, 1)
    for turn in range(_ALONE):
        which = turn % len(expected.prompts)
        bare = run_bare_steps(model, [expected.prompts[which]], tokens)
        begun = time.perf_counter()
        heard = client.ask(which, tokens, tokens + 1)
        seconds = time.perf_counter() - begun
        wrong += (bare.answers[0] != expected.answers[which]) + (not heard.right) + (not heard.whole)
        steps.append(float(np.median(bare.seconds)))
        shares.append(tokens / seconds * steps[-1])
    engine.close()
    return steps, shares, wrong


def _serve(model: Model, count: int, expected: Expected, seconds: float) -> dict[str, Any]:
    engine = Engine(model, None, max_running=model.cache.sequences, max_waiting=count)
    clients = [_EngineClient(engine, number, expected, count) for number in range(count)]
    before: list[EngineStats] = []
    lost = run_clients(clients, seconds, lambda: before.append(engine.stats()))
    stats = engine.stats()
    engine.close()
    rows, steps = stats.rows - before[0].rows, stats.steps - before[0].steps
    return figures(clients, seconds, lost) | {
        "rows_per_step": rows / max(1, steps),
        "places_free": stats.running == stats.waiting == 0 and stats.free_pages == stats.pages,
    }
