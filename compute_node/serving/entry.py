"""A request that was accepted and is not over; and what steps of the model cost meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from compute_node.engine.language_model import LanguageModel
from compute_node.serving.answer import Answer
from compute_node.serving.requests import Sink
from compute_node.serving.scheduler import Job, Share

__all__ = ["Cost", "Entry"]


@dataclass(slots=True, eq=False)
class Entry:
    """What the engine keeps of a request.

    Attributes:
        job: as the scheduler sees it.
        answer: what it has become.
        sink: takes its events.
        begun: when it was submitted, on the engine's clock.
        deadline: when it must be over.
        cached_tokens: of its prompt, taken over when it first ran.
        started: when that was.
    """

    job: Job
    answer: Answer
    sink: Sink
    begun: float
    deadline: float
    cached_tokens: int = 0
    started: float | None = None

    def prompt_rows(self, share: Share) -> int:
        """How many rows of its part of a step belong to the prompt."""
        return max(0, min(share.start + share.count, self.answer.prompt_length) - share.start)


class Cost:
    """What the steps of a model take from now on.

    Args:
        model: whose.
    """

    __slots__ = ("_model", "_outcomes", "_seconds", "_waited")

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._outcomes = list(model.source.stats.outcomes.values())
        self._seconds, self._waited = model.times.seconds, model.times.wait_seconds

    def times(self) -> tuple[float, float]:
        """Seconds so far, and of these, seconds of waiting for experts."""
        times = self._model.times
        return times.seconds - self._seconds, times.wait_seconds - self._waited

    def note(self, *entries: Entry) -> None:
        """These requests took part in all of the steps."""
        seconds, waited = self.times()
        asked = {
            name: count - earlier
            for (name, count), earlier in zip(self._model.source.stats.outcomes.items(), self._outcomes, strict=True)
            if count != earlier
        }
        for entry in entries:
            entry.answer.note(asked, waited, max(0.0, seconds - waited))
