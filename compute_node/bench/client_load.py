"""Clients that ask at once, each again as soon as it was answered, some leaving in the middle; and what they heard.

What every prompt's answer must be is known before, so an answer that was lost, mixed up or changed by the crowd shows.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

__all__ = ["ANSWER_SECONDS", "Answered", "Client", "Heard", "Window", "figures", "run_clients"]

ANSWER_SECONDS: Final = 120.0
"""Longest time that a client waits for news."""
_ONE_IN: Final = 6
"""One of so many answers is left in the middle."""
_WARM_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.05


@dataclass(slots=True)
class Window:
    """What counts, in seconds of `time.perf_counter`; the end is not known before all clients are under way."""

    start: float = math.inf
    end: float = math.inf


@dataclass(slots=True)
class Answered:
    """How one request ended.

    Attributes:
        times: when each token came, or each piece of text.
        tokens: that the pieces were, if they were not one each.
        right: what came is, as far as it came, what had to come.
        whole: it came to its end.
        left: it was given up in the middle, as was meant.
    """

    times: list[float]
    tokens: int
    right: bool
    whole: bool
    left: bool = False


@dataclass(slots=True)
class Heard:
    """What a client heard, times in seconds.

    Attributes:
        tokens: when, and how many.
        first: of each request when it was made, and the time to its first token.
        per_token: of each request when it was made, and the time from one token to the next.
    """

    tokens: list[tuple[float, float]] = field(default_factory=list)
    first: list[tuple[float, float]] = field(default_factory=list)
    per_token: list[tuple[float, float]] = field(default_factory=list)
    answers: int = 0
    left: int = 0
    errors: int = 0
    crossed: int = 0


class Client(ABC):
    """Asks for the answers of its prompts, one after the other, until the window ends.

    Args:
        number: of the client; decides what it asks for.
        prompts: how many it may ask for.
        tokens: of an answer.

    Attributes:
        heard: so far.
        started: something was heard, or nothing will be.
    """

    def __init__(self, number: int, prompts: int, tokens: int) -> None:
        self.heard = Heard()
        self.started = threading.Event()
        self._choose = np.random.Generator(np.random.Philox(number))
        self._prompts = prompts
        self._tokens = tokens

    @abstractmethod
    def ask(self, which: int, tokens: int, leaves_after: int) -> Answered:
        """Has a prompt answered, and sets `started` when something comes.

        Args:
            which: number of the prompt.
            tokens: of the answer.
            leaves_after: pieces after which to leave; more than `tokens`: never.
        """

    def run(self, window: Window) -> None:
        """Asks until the end of the window. The first answer has any length, so that clients do not go in step."""
        tokens = int(self._choose.integers(1, self._tokens + 1))
        while time.perf_counter() < window.end:
            leaves = tokens > 1 and int(self._choose.integers(_ONE_IN)) == 0
            after = int(self._choose.integers(1, tokens)) if leaves else tokens + 1
            begun = time.perf_counter()
            self._note(begun, self.ask(int(self._choose.integers(self._prompts)), tokens, after))
            tokens = self._tokens

    def _note(self, begun: float, found: Answered) -> None:
        heard, times = self.heard, found.times
        self.started.set()
        heard.crossed += not found.right
        heard.left += found.left
        heard.answers += found.whole
        heard.errors += not (found.left or found.whole)
        if times:
            each = found.tokens / len(times)
            heard.tokens += [(moment, each) for moment in times]
            heard.first.append((begun, times[0] - begun))
            if len(times) > 1:
                heard.per_token.append((begun, (times[-1] - times[0]) / (found.tokens - each)))


def run_clients(clients: Sequence[Client], seconds: float, begun: Callable[[], object] = lambda: None) -> int:
    """Lets all ask at once for `seconds`, counted from when each has heard something; returns how many got lost.

    Args:
        clients: who.
        seconds: of the window.
        begun: is called when the window begins.
    """
    window = Window()
    threads = [threading.Thread(target=client.run, args=(window,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    until = time.perf_counter() + ANSWER_SECONDS
    time.sleep(_WARM_SECONDS)
    while time.perf_counter() < until and not all(client.started.is_set() for client in clients):
        time.sleep(_LOOK_SECONDS)
    begun()
    window.start = time.perf_counter()
    window.end = window.start + seconds
    for thread in threads:
        thread.join(max(0.0, window.end - time.perf_counter()) + 2 * ANSWER_SECONDS)
    for client in clients:
        client.heard.tokens = [each for each in client.heard.tokens if window.start <= each[0] < window.end]
        for times in (client.heard.first, client.heard.per_token):
            times[:] = [each for each in times if each[0] >= window.start] or times[-1:]
    return sum(thread.is_alive() for thread in threads)


def figures(clients: Sequence[Client], seconds: float, lost: int) -> dict[str, Any]:
    """What all clients heard together: tokens per second of the window, percentiles, counts."""
    heard = [client.heard for client in clients]
    first = [value for one in heard for _, value in one.first]
    per_token = [value for one in heard for _, value in one.per_token]
    return {
        "tokens_per_second": sum(count for one in heard for _, count in one.tokens) / seconds,
        "ttft_p50": _percentile(first, 50),
        "ttft_p99": _percentile(first, 99),
        "tpot_p50": _percentile(per_token, 50),
        "tpot_p99": _percentile(per_token, 99),
        "answers": sum(one.answers for one in heard),
        "left_midway": sum(one.left for one in heard),
        "errors": lost + sum(one.errors for one in heard),
        "crossed_answers": sum(one.crossed for one in heard),
    }


def _percentile(values: Sequence[float], percent: int) -> float:
    """0 where there are no values: nobody was answered, which `answers` says, too."""
    return float(np.percentile(values, percent)) if values else 0.0
