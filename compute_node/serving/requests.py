"""What is asked of the engine, and what it answers; see `compute_node.serving.engine` for who does it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.generate import FinishReason, GenerationParams
from tierd.errors import TierdError

__all__ = [
    "MOST_LOGPROBS",
    "Constraint",
    "Done",
    "EngineStats",
    "Event",
    "FinishReason",
    "GenerationParams",
    "PromptScores",
    "QueueFull",
    "Request",
    "Sink",
    "StepReport",
    "Ticket",
    "Token",
    "Usage",
]

MOST_LOGPROBS: Final = 20
"""Most alternatives per token whose log-probability can be asked for."""


class QueueFull(TierdError):
    """As many requests wait as may wait.

    Attributes:
        retry_after_seconds: when a place will probably be free; at least 1.
    """

    def __init__(self, message: str, *, retry_after_seconds: float, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_seconds = max(1, math.ceil(retry_after_seconds))


class Constraint(Protocol):
    """Decides which tokens may come next, such as a grammar. After submission the engine's thread alone uses it."""

    def mask(self) -> NDArray[np.bool_]:
        """Bool [vocabulary], True where a token is allowed now; at least one is, unless `finished`."""

    def advance(self, token: int) -> None:
        """The token was chosen. Called for each token but an end-of-text one."""

    @property
    def finished(self) -> bool:
        """Nothing more can follow: the answer ends with the reason `stop`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate.

    Attributes:
        prompt: token ids, at least one.
        params: what to generate. With `max_tokens` 0 only the prompt is computed.
        logprobs: None: none are wanted; k: those of the chosen token and of the k likeliest, 0 to `MOST_LOGPROBS`.
        prompt_logprobs: those of the prompt's tokens too, as `PromptScores` before the first token.
        constraint: restricts what may be generated; for this request alone.
        deadline_seconds: from submission to the last token; None: no bound of its own.
    """

    prompt: tuple[int, ...]
    params: GenerationParams
    logprobs: int | None = None
    prompt_logprobs: bool = False
    constraint: Constraint | None = None
    deadline_seconds: float | None = None


class Token(NamedTuple):
    """A token was chosen.

    Attributes:
        token: its id.
        text: text that is now certain, whole characters only; may be empty, since characters and stop strings may
            span tokens.
        logprob: natural logarithm of its probability before penalties and temperature; None if not asked for.
        top: the likeliest tokens with theirs, likeliest first; as many as were asked for.
        seconds: since the request was submitted.
    """

    token: int
    text: str
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class PromptScores:
    """How likely the prompt's tokens are; once, before the first token.

    Attributes:
        logprobs: of each token after those before it; None for the first.
        top: the likeliest tokens at each place, likeliest first; empty for the first.
    """

    logprobs: tuple[float | None, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request took.

    Attributes:
        prompt_tokens: length of the prompt.
        cached_tokens: of these, taken over from the KV cache instead of computed.
        completion_tokens: tokens of the answer, an end-of-text token included.
        seconds: from submission to the end.
        queue_seconds: of these, until it first ran.
        time_to_first_token_seconds: None if there is no token.
        experts: unique experts that the steps it took part in asked for, by outcome (`hit`, `miss`, `joined`); they
            were shared with the other requests of those steps.
        wait_seconds: time that these steps waited for experts.
        compute_seconds: time that they computed.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0
    time_to_first_token_seconds: float | None = None
    experts: Mapping[str, int] = field(default_factory=dict)
    wait_seconds: float = 0.0
    compute_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a request.

    Attributes:
        reason: why it ended.
        text: text that was held back until now.
        usage: what it took.
        error: what went wrong, where the reason is `error`.
    """

    reason: FinishReason
    text: str
    usage: Usage
    error: TierdError | None = None


Event = Token | PromptScores | Done

Sink = Callable[[Sequence[Event]], None]
"""Takes a request's events on the engine's thread, one list per step at most. It must return at once."""


class Ticket:
    """A request that was accepted.

    Attributes:
        id: rises from request to request.
    """

    __slots__ = ("_cancel", "id")

    def __init__(self, number: int, cancel: Callable[[int], None]) -> None:
        self.id = number
        self._cancel = cancel

    def cancel(self) -> None:
        """Give the request up; from any thread, at any moment, harmless when repeated or late.

        A waiting request leaves the queue at once. What runs ends at the next layer if nobody else is in the step;
        else the others' step goes on without new reads for this one, whose place is free at once. `Done` comes in
        any case, from the engine's thread.
        """
        self._cancel(self.id)


class StepReport(NamedTuple):
    """One step of the model, for metrics.

    Attributes:
        seconds: of the whole step.
        wait_seconds: of these, waiting for experts.
        rows: tokens that were computed.
        requests: whose.
        prompt_rows: rows that belong to prompts.
    """

    seconds: float
    wait_seconds: float
    rows: int
    requests: int
    prompt_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the engine does now and has done since it began.

    Attributes:
        running: requests that have a place in the KV cache and were not cancelled.
        waiting: requests in the queue.
        max_running: bound of the first.
        max_waiting: bound of the second.
        pages: pages of the KV cache, 64 tokens each.
        free_pages: pages that no request holds; some keep prefixes that may be taken over.
        cached_pages: of the free ones, those that keep a prefix.
        requests: accepted.
        refused: because the queue was full.
        finished: by reason; together with `running` and `waiting`, and cancelled ones about to end, all accepted.
        prompt_tokens: of accepted requests that have run.
        reused_tokens: prompt tokens that were taken over instead of computed.
        completion_tokens: generated.
        steps: of the model.
        rows: tokens computed in them.
        preempted: how often a running request gave its pages to an older one, to be computed again later.
        step_seconds: time in steps.
        wait_seconds: of these, waiting for experts.
        experts: unique experts that the router chose, by the tier that had them when they were wanted.
    """

    running: int
    waiting: int
    max_running: int
    max_waiting: int
    pages: int
    free_pages: int
    cached_pages: int
    requests: int
    refused: int
    finished: Mapping[str, int]
    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    steps: int
    rows: int
    preempted: int
    step_seconds: float
    wait_seconds: float
    experts: Mapping[str, int] = field(default_factory=dict)
