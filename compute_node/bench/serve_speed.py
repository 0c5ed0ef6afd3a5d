"""Many clients at once on one engine: what reaches them, beside the bare steps of the same model.

Each client asks again as soon as it was answered; some leave in the middle of an answer. What every prompt's answer
must be is known from bare steps before, so an answer that was lost, mixed up or changed by the crowd shows.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from compute_node.bench.bare_steps import run_bare_steps
from compute_node.bench.quiet import Quiet
from compute_node.engine.generate import GenerationParams
from compute_node.engine.model import Model
from compute_node.serving.engine import Engine
from compute_node.serving.requests import Done, Event, FinishReason, Request, Token
from tierd.errors import TierdError

__all__ = ["CLIENTS", "measure_serving"]

CLIENTS: Final = (1, 4, 16, 64)
"""How many clients ask at once, one measurement after the other."""

_WARM_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 120.0
_ONE_IN: Final = 6
"""One of so many answers is left in the middle."""
_ALONE: Final = 4
"""Prompts that are answered alone, too, by bare steps of one row."""


@dataclass(slots=True)
class _Heard:
    """What a client heard, times in seconds; tokens of the window alone, answers of the whole run."""

    tokens: int = 0
    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    answers: int = 0
    left: int = 0
    errors: int = 0
    crossed: int = 0


class _Client:
    """Asks for the answers of its prompts, one after the other, until it is told to stop."""

    def __init__(self, engine: Engine, number: int, prompts: Sequence[Sequence[int]], answers: Sequence[Any]) -> None:
        self.heard = _Heard()
        self._engine = engine
        self._choose = np.random.Generator(np.random.Philox(number))
        self._prompts = prompts
        self._answers = answers

    def run(self, window: tuple[float, float]) -> None:
        """Asks until the end of the window, in `time.perf_counter` seconds; counts what falls into it."""
        while time.perf_counter() < window[1]:
            which = int(self._choose.integers(len(self._prompts)))
            self._ask(which, leaves=int(self._choose.integers(_ONE_IN)) == 0, window=window)

    def _ask(self, which: int, *, leaves: bool, window: tuple[float, float]) -> None:
        heard, expected = self.heard, self._answers[which]
        params = GenerationParams(max_tokens=len(expected), ignore_eos=True)
        listening = _Listening(int(self._choose.integers(1, len(expected))) if leaves else len(expected) + 1)
        begun = time.perf_counter()
        try:
            ticket = self._engine.submit(Request(prompt=tuple(self._prompts[which]), params=params), listening.hear)
            done = listening.wait()
            if done is None:
                ticket.cancel()
                done = listening.wait()
        except (TierdError, queue.Empty):
            heard.errors += 1
            return
        tokens, times = listening.tokens, listening.times
        heard.tokens += sum(window[0] <= moment < window[1] for moment in times)
        if tokens != list(expected[: len(tokens)]):
            heard.crossed += 1
        if leaves and done is not None and done.reason is FinishReason.CANCELLED:
            heard.left += 1
        elif done is not None and done.reason is FinishReason.LENGTH and len(tokens) == len(expected):
            heard.answers += 1
        else:
            heard.errors += 1
        if times:
            heard.first.append(times[0] - begun)
            if len(times) > 1:
                heard.per_token.append((times[-1] - times[0]) / (len(times) - 1))


class _Listening:
    """Takes the events of one answer on the engine's thread; wakes its client at the end, or where that leaves."""

    def __init__(self, leaves_after: int) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._leaves_after = leaves_after
        self._news: queue.SimpleQueue[Done | None] = queue.SimpleQueue()

    def hear(self, events: Sequence[Event]) -> None:
        """What `Engine.submit` calls."""
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Token):
                self.tokens.append(event.token)
                self.times.append(now)
                if len(self.tokens) == self._leaves_after:
                    self._news.put(None)
            elif isinstance(event, Done):
                self._news.put(event)

    def wait(self) -> Done | None:
        """The last event, or None where the client leaves; queue.Empty if nothing comes."""
        return self._news.get(timeout=_ANSWER_SECONDS)


def measure_serving(
    model: Model, *, clients: Sequence[int] = CLIENTS, seconds: float, tokens: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Serves so many clients at once for `seconds` each.

    Args:
        model: with places for the most clients, and as many rows and more.
        clients: how many, rising; 1 and 16 are among them for the ratios.
        seconds: of each measurement.
        tokens: of an answer.
        tell: takes a line when something begins.

    Returns:
        `tokens_per_second`, `ttft_p50`, `ttft_p99`, `tpot_p50`, `tpot_p99` by client count, counts and ratios.
    """
    most = max(clients)
    generator = np.random.Generator(np.random.Philox(11))
    lengths = generator.integers(8, 25, most).tolist()
    prompts = [generator.integers(0, model.config.vocab_size, length).tolist() for length in lengths]
    crowd = min(16, most)
    tell(f"the answers to {most} prompts")
    with Quiet() as quiet:
        groups = [run_bare_steps(model, prompts[at : at + crowd], tokens) for at in range(0, most, crowd)]
        alone = [run_bare_steps(model, [prompt], tokens) for prompt in prompts[:_ALONE]]
        answers = [answer for group in groups for answer in group.answers]
        changed = sum(one.answers[0] != answer for one, answer in zip(alone, answers, strict=False))
        found = [_serve(model, count, prompts, answers, seconds, tell) for count in clients]
        again = run_bare_steps(model, prompts[:crowd], tokens)
        again_alone = run_bare_steps(model, prompts[:1], tokens)
    bare = {
        1: float(np.median([second for one in (*alone, again_alone) for second in one.seconds])),
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
            "one_client_share_of_step": rates[1] * bare[1],
            "sixteen_share_of_step": rates[16] * bare[16] / 16,
        }
    return result | quiet.report() | {"seconds": seconds, "tokens_of_an_answer": tokens, "threads": model.threads}


def _serve(
    model: Model,
    count: int,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    seconds: float,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    tell(f"{count} clients")
    engine = Engine(model, None, max_running=model.cache.sequences, max_waiting=count)
    # Neighbours never ask for the same: each client has prompts of its own.
    clients = [_Client(engine, at, prompts[at::count], answers[at::count]) for at in range(count)]
    start = time.perf_counter() + _WARM_SECONDS
    window = (start, start + seconds)
    threads = [threading.Thread(target=client.run, args=(window,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + _WARM_SECONDS + 2 * _ANSWER_SECONDS)
    lost = sum(thread.is_alive() for thread in threads)
    stats = engine.stats()
    engine.close()
    heard = [client.heard for client in clients]
    first = [value for one in heard for value in one.first]
    per_token = [value for one in heard for value in one.per_token]
    return {
        "tokens_per_second": sum(one.tokens for one in heard) / seconds,
        "ttft_p50": _percentile(first, 50),
        "ttft_p99": _percentile(first, 99),
        "tpot_p50": _percentile(per_token, 50),
        "tpot_p99": _percentile(per_token, 99),
        "answers": sum(one.answers for one in heard),
        "left_midway": sum(one.left for one in heard),
        "errors": lost + sum(one.errors for one in heard),
        "crossed_answers": sum(one.crossed for one in heard),
        "rows_per_step": stats.rows / max(1, stats.steps),
        "places_free": stats.running == stats.waiting == 0 and stats.free_pages == stats.pages,
    }


def _percentile(values: Sequence[float], percent: int) -> float:
    """0 where there are no values: nobody was answered, which `answers` says, too."""
    return float(np.percentile(values, percent)) if values else 0.0
