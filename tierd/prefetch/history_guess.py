"""Guesses for sessions that send no hints: from what they chose a layer before, and from their token where they say it.

Pure: it is told what sessions use and choose, and answers with hints like those that a node would send.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierd.policy.token_table import ChoiceTable
from tierd.prefetch.hint import Hint
from tierd.prefetch.reliability import Reliability
from tierd.prefetch.transitions import Transitions

__all__ = ["SOURCES", "HistoryGuess"]

F32 = NDArray[np.float32]

SOURCES: Final = ("layer before", "token", "both")
"""Decayed transition counts; P(expert | token); the mean of the two."""

_DEFAULT_BYTES: Final = 32 << 20
_PLACES: Final = 16
_FIRST_LAYERS: Final = 2
"""Layers that are guessed as soon as a step's token is said."""
_MOST_TOKENS: Final = 4
"""Tokens of a step up to which it is guessed; more of them want nearly everything."""
_MOST_PER_CHOSEN: Final = 2
_LEAST: Final = 0.05
_SMOOTHING: Final = 1 / 64
_LEARNED_UNASKED: Final = 4
"""One step in so many is learned from while nobody wants guesses: so much stays known, and the rest costs nothing."""


@dataclass(slots=True)
class _Pending:
    """What was said of a layer: scores by source, who was believed, and the absent experts that were named."""

    scores: dict[str, F32]
    believed: str
    named: list[int]


@dataclass(slots=True)
class _Walk:
    """One session's way through its layers; layers by their place among those with routed experts."""

    step: int
    tokens: tuple[int, ...] = ()
    chosen: dict[int, set[int]] = field(default_factory=dict)
    learned: int = 0
    last: set[int] = field(default_factory=set)
    pending: dict[tuple[int, int], _Pending] = field(default_factory=dict)


class HistoryGuess:
    """Learns from all sessions, and guesses for each of them.

    Args:
        layers: model layers with routed experts, rising.
        experts: of each of these.
        top_k: that a router chooses.
        max_bytes: bound on the memory of the token table.
    """

    def __init__(
        self, layers: Sequence[int], experts: Sequence[int], top_k: int, *, max_bytes: int = _DEFAULT_BYTES
    ) -> None:
        self._layers = list(layers)
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._starts = [0, *accumulate(experts)]
        self._top_k = top_k
        self._transitions = Transitions(self._starts[-1])
        rows = max(1, max_bytes // (len(layers) * _PLACES * 6 + 4))
        self._table = ChoiceTable(len(layers), rows, places=_PLACES)
        self._recall = [dict.fromkeys(SOURCES, 0.5) for _ in layers]
        self._reliability = {source: Reliability() for source in SOURCES}
        self._walks: dict[int, _Walk] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the counts."""
        return self._transitions.nbytes + self._table.nbytes

    def used(self, session: int, step: int, flat: int) -> None:
        """The session used an expert in that step."""
        walk = self._at(session, step)
        if walk is not None:
            walk.chosen.setdefault(bisect_right(self._starts, flat) - 1, set()).add(flat)

    def said(self, session: int, step: int, tokens: Sequence[int], known: Callable[[int], bool]) -> list[Hint]:
        """The session says which tokens a step computes on: guesses for its first layers.

        Args:
            session: who says so.
            step: number of the step.
            tokens: of its rows.
            known: whether an expert, by its flat number, is in RAM or on its way.
        """
        walk = self._at(session, step)
        if walk is None or not 0 < len(tokens) <= _MOST_TOKENS:
            return []
        walk.tokens = tuple(tokens)
        hints = (self._guess(walk, step, place, known) for place in range(min(_FIRST_LAYERS, len(self._layers))))
        return [hint for hint in hints if hint is not None]

    def reached(
        self,
        session: int,
        step: int,
        layer: int,
        wanted: Collection[int],
        used: Collection[int],
        known: Callable[[int], bool],
        *,
        guess: bool = True,
    ) -> Hint | None:
        """The session's router has chosen: learn from it, and guess the next layer.

        Args:
            session: whose.
            step: in which it chose.
            layer: model layer.
            wanted: flat numbers of what it asks for.
            used: flat numbers of what it found in RAM besides.
            known: whether an expert is in RAM or on its way.
            guess: whether a guess is wanted; where none is, only some steps are learned from.
        """
        place, walk = self._places.get(layer), self._at(session, step)
        if place is None or walk is None:
            return None
        walk.chosen.setdefault(place, set()).update(wanted, used)
        if not guess:
            if step % _LEARNED_UNASKED == 0:
                self._learn(walk, place)
            return None
        self._judge(walk, step, place, wanted)
        self._learn(walk, place)
        return self._guess(walk, *(divmod(step * len(self._layers) + place + 1, len(self._layers))), known)

    def ended(self, session: int) -> None:
        """The session is over; harmless for an unknown one."""
        self._walks.pop(session, None)

    # One session's way.

    def _at(self, session: int, step: int) -> _Walk | None:
        """The walk, in that step; None for a step that has passed."""
        walk = self._walks.get(session)
        if walk is None:
            walk = self._walks[session] = _Walk(step)
        if step > walk.step:
            self._close(walk)
            walk.step = step
        return walk if step == walk.step else None

    def _close(self, walk: _Walk) -> None:
        """The step is over: learn what is left of it."""
        count = len(self._layers)
        if walk.learned:
            self._learn(walk, count - 1)
        complete = all(len(walk.chosen.get(place, ())) == self._top_k for place in range(count))
        if len(walk.tokens) == 1 and complete:
            rows = [sorted(walk.chosen[place]) for place in range(count)]
            self._table.count(walk.tokens[0], np.array(rows, np.int32))
        walk.last = walk.chosen.get(count - 1, set())
        walk.pending = {key: entry for key, entry in walk.pending.items() if key[0] > walk.step}
        walk.chosen, walk.tokens, walk.learned = {}, (), 0

    def _learn(self, walk: _Walk, place: int) -> None:
        for at in range(walk.learned, place + 1):
            before, here = walk.chosen.get(at - 1) if at else walk.last, walk.chosen.get(at)
            if before and here and len(before) == len(here) == self._top_k:
                self._transitions.count(_array(before), _array(here))
        walk.learned = max(walk.learned, place + 1)

    def _judge(self, walk: _Walk, step: int, place: int, wanted: Collection[int]) -> None:
        """How good was what was said of this layer? Sources are compared by their recall on what was missing."""
        pending = walk.pending.pop((step, place), None)
        if pending is None:
            return
        start, recall = self._starts[place], self._recall[place]
        if wanted:
            for source, scores in pending.scores.items():
                top = np.argpartition(-scores, self._top_k - 1)[: self._top_k] + start
                found = len(set(top.tolist()) & set(wanted)) / len(wanted)
                recall[source] += _SMOOTHING * (found - recall[source])
        named = np.array(pending.named, np.intp)
        right = np.array([flat in wanted for flat in pending.named], np.bool_)
        self._reliability[pending.believed].learn(pending.scores[pending.believed][named - start], right)

    # Guesses.

    def _guess(self, walk: _Walk, step: int, place: int, known: Callable[[int], bool]) -> Hint | None:
        scores = self._scores(walk, step, place)
        if not scores:
            return None
        believed = max(scores, key=lambda source: self._recall[place][source])
        probabilities = self._reliability[believed].probability(scores[believed])
        start, rows = self._starts[place], max(1, len(walk.tokens))
        named: list[int] = []
        likely: list[float] = []
        for expert in np.argsort(-probabilities, kind="stable")[: 4 * self._top_k * rows].tolist():
            if probabilities[expert] < _LEAST or len(named) == _MOST_PER_CHOSEN * self._top_k * rows:
                break
            if not known(start + expert):
                named.append(start + expert)
                likely.append(float(probabilities[expert]))
        walk.pending[step, place] = _Pending(scores, believed, named)
        if not named:
            return None
        return Hint(step, self._layers[place], tuple(flat - start for flat in named), tuple(likely))

    def _scores(self, walk: _Walk, step: int, place: int) -> dict[str, F32]:
        start, experts = self._starts[place], self._starts[place + 1] - self._starts[place]
        scores: dict[str, F32] = {}
        here = step == walk.step
        before = walk.chosen.get(place - 1) if place else walk.last if here else walk.chosen.get(len(self._layers) - 1)
        if before and len(before) <= _MOST_TOKENS * self._top_k:
            # Of several rows at least one must want the expert.
            share = self._transitions.scores(_array(before), start, experts)
            rows = max(1.0, len(before) / self._top_k)
            scores["layer before"] = (1 - (1 - share) ** rows).astype(np.float32)
        if here and walk.tokens and (by_token := self._by_token(walk.tokens, place, start, experts)) is not None:
            scores["token"] = by_token
        if len(scores) == 2:
            scores["both"] = ((scores["layer before"] + scores["token"]) / 2).astype(np.float32)
        return scores

    def _by_token(self, tokens: Sequence[int], place: int, start: int, experts: int) -> F32 | None:
        absent, seen = np.ones(experts, np.float32), False
        for token in tokens:
            found = self._table.probabilities(token)
            if found is not None:
                there = found[0][place] >= 0
                absent[found[0][place][there] - start] *= 1 - found[1][place][there]
                seen = True
        return 1 - absent if seen else None


def _array(flats: set[int]) -> NDArray[np.int32]:
    return np.fromiter(flats, np.int32, len(flats))
