"""Hints of a step: before it begins by its token, then from layer to layer by its own state.

At its last layer a step hints for the first layers of the next one, by the tokens that will probably be sampled and by
what followed its own so far: the drive has something to do while the head computes and a token is sampled. A step of
many rows, a prompt, hints for the next layer only, what its rows together will want of it.

A layer that waits for experts is looked ahead of meanwhile, and by what the others of it give: as far as the next layer
that lacks something, and where records are so large that reading one takes longer than looking, two layers far in any
case. One that lacks nothing,
or nothing but what was hinted and so is on its way, is looked ahead of before its experts are computed with, for the
sake of the time that is left then, again if records are large. Nothing here changes a buffer that a token depends on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from compute_node.kernels import Segment
from compute_node.models.look_ahead import LOOK_AHEAD_ROWS, LookAhead
from compute_node.prediction.layer_guess import Guess, LayerGuess
from compute_node.prediction.layer_guesses import FARTHEST, LayerGuesses
from compute_node.prediction.next_step import NextStep
from compute_node.prediction.token_scores import TokenScores
from compute_node.prediction.union_guess import UnionGuess
from tierd.client.source import ExpertSource
from tierd.policy.token_table import TokenTable
from tierd.prefetch.throttle import Throttle
from tierd.store.geometry import Geometry

__all__ = ["LOOKED_ON_STEPS", "Hinting", "StepHints"]

F32 = NDArray[np.float32]

_FIRST_LAYERS: Final = 2
"""Layers that are guessed from a token alone, the step's own or the last: no state of an earlier layer tells more."""
_MOST_PER_CHOSEN: Final = 2
_SMOOTHING: Final = 1 / 16
_PASSING_BYTES: Final = 2 << 20
"""Of a record, from which on layers are looked ahead of that do not wait: it takes a millisecond to read, and looking
ahead some tenths of one. They are looked ahead of two layers at once, too: where one layer lacks many experts, the
drive would stand still before the next one that lacks few."""
LOOKED_ON_STEPS: Final = 4
"""Steps for which that goes on after the last one that lacked something."""
_NOTHING: Final[frozenset[int]] = frozenset()
_GENEROUS: Final = 2.0
"""A layer is told to begin so many times later than the last ones did: what the daemon drops too early is lost."""


class StepHints(Protocol):
    """What a model tells of its steps to whoever sends hints; `Hinting` explains the calls."""

    @property
    def active(self) -> bool:
        """Whether this step is one to be looked ahead of."""

    @property
    def everywhere(self) -> bool:
        """Whether that goes for its layers that lack nothing, too."""

    @property
    def asleep(self) -> bool:
        """Whether nothing has been hinted or lacking for a while: a step where nothing lacks need not be told of."""

    def begin(self, tokens: Sequence[int], *, step: int, decode: bool) -> None:
        """A step begins that computes on these tokens."""

    def passing(self, layer: int, routes: NDArray[np.int32]) -> None:
        """The step is about to compute a layer: int32 [rows, top_k] experts that it wants of it.

        If one of them is missing the step will stop there, and `at` and `meanwhile` are called as for any other.
        """

    def at(self, layer: int, routes: NDArray[np.int32]) -> None:
        """The step stops at a layer: int32 [rows, top_k] experts that it wants of it."""

    def meanwhile(self, layer: int, known: F32) -> None:
        """The step waits for experts of a layer; float32 [rows, H] is what the others of it add."""

    def end(self, seconds: float) -> None:
        """The step is complete; it took so long."""


class Hinting:
    """Sends hints, and learns from what the routers then choose.

    A step is `begin`; `passing` for each layer if it is to be looked ahead of everywhere; `at` for each layer where it
    stops for experts, and `meanwhile` there while it waits; `end`.

    Args:
        source: hears the hints.
        geometry: of the store.
        look: routers of layers to come.
        run: runs a segment.
        table: counts of experts by token; others fill it.
        throttle: says how likely a guess must be; it is told what steps cost.
        clock: seconds, for lead times.

    Attributes:
        throttle: as given.
        guesses: what was learned of the layers.
    """

    def __init__(
        self,
        source: ExpertSource,
        geometry: Geometry,
        look: LookAhead,
        run: Callable[[Segment], object],
        table: TokenTable,
        throttle: Throttle,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.throttle = throttle
        self._source = source
        self._look = look
        self._run = run
        self._clock = clock
        self._top_k = geometry.top_k
        self._large = geometry.slot_bytes >= _PASSING_BYTES
        self._unknown = np.zeros((LOOK_AHEAD_ROWS, geometry.hidden_size), np.float32)
        self._said: dict[int, frozenset[int]] = {}  # by place, the experts that were hinted last
        self._passed = -1  # place of the layer that was looked ahead of before it was computed
        self._lacked = 0  # the last step that lacked something
        self._layers = [entry.layer for entry in geometry.layers]
        self._places = {layer: place for place, layer in enumerate(self._layers)}
        experts = [entry.experts for entry in geometry.layers]
        self._tokens = TokenScores(table, experts, geometry.top_k)
        self.guesses = LayerGuesses(experts, geometry.top_k)
        self._next = NextStep(look, run, table, self._tokens, self.guesses)
        self._union = UnionGuess(look, run, self._layers, geometry.top_k)
        self._rehearse()
        self._step = 0
        self._rows: list[int] = []
        self._many = False
        self._guesses: dict[tuple[int, int], list[Guess | None]] = {}
        self._lessons: list[Callable[[], None]] = []
        self._interval = 0.0
        self._stopped: tuple[int, float] | None = None

    @property
    def active(self) -> bool:
        """Whether this step is one to be looked ahead of."""
        return bool(self._rows) or self._many

    @property
    def everywhere(self) -> bool:
        """Whether that goes for its layers that lack nothing, too."""
        return bool(self._rows) and self._large and not self.asleep

    @property
    def asleep(self) -> bool:
        """Whether nothing has been hinted or lacking for a while."""
        return self._step - self._lacked > LOOKED_ON_STEPS

    def begin(self, tokens: Sequence[int], *, step: int, decode: bool) -> None:
        """A step begins that computes on these tokens."""
        few, on = decode and len(tokens) <= LOOK_AHEAD_ROWS, self.throttle.level > 0
        self._next.begin(tokens, follows=few and step == self._step + 1 and len(tokens) == len(self._rows))
        self._guesses.clear()
        self._stopped = None
        self._passed = -1
        self._said.clear()
        self._step = step
        self._rows = list(tokens) if few and on else []
        self._many = on and not few
        self._union.forget()
        if self._rows:
            for place in range(min(_FIRST_LAYERS, len(self._layers))):
                scores = [self._tokens.of(token, place) for token in self._rows]
                self._hint(place, 0, [None] * len(self._rows), scores, place * self._interval)

    def passing(self, layer: int, routes: NDArray[np.int32]) -> None:
        """The step is about to compute a layer: int32 [rows, top_k] experts that it wants of it."""
        place, absent = self._places[layer], self._source.absent(layer)
        if absent is None:
            return
        said = self._said.get(place, _NOTHING)
        if not any(absent[expert] and expert not in said for expert in routes.ravel().tolist() if expert >= 0):
            self._learn_from(place, routes)
            self._passed = place
            self._look_ahead(place, self._unknown[: len(self._rows)])

    def at(self, layer: int, routes: NDArray[np.int32]) -> None:
        """The step stops at a layer: int32 [rows, top_k] experts that it wants of it."""
        place = self._places[layer]
        if self._many:
            self._union.learn(place, routes)
        if self._rows:
            self._lacked = self._step
            if place != self._passed:
                self._learn_from(place, routes)

    def _learn_from(self, place: int, routes: NDArray[np.int32]) -> None:
        now = self._clock()
        if self._stopped is not None and place > self._stopped[0]:
            took = (now - self._stopped[1]) / (place - self._stopped[0])
            self._interval += (took - self._interval) * (_SMOOTHING if self._interval else 1.0)
        self._stopped = (place, now)
        self._lessons += self._next.lessons(place, routes)
        for distance in range(FARTHEST + 1):
            guesses = self._guesses.pop((place, distance), [])
            for row, guess in enumerate(guesses):
                if guess is not None:
                    logits = self._look.router_logits[row].copy()
                    learn = self.guesses.of(distance, place).learn
                    self._lessons.append(partial(learn, guess, routes[row].copy(), logits))
        for chosen in routes:
            self._tokens.learn(place, chosen)

    def meanwhile(self, layer: int, known: F32) -> None:
        """The step waits for experts of a layer: look ahead, as far as the next layer that lacks something.

        Args:
            layer: where it waits.
            known: float32 [rows, H], the sum of what those of its experts give that are there.
        """
        if self._many:
            self._hint_union(self._places[layer] + 1, known)
            return
        if self._places[layer] != self._passed:
            self._look_ahead(self._places[layer], known)
        self._learn()

    def end(self, seconds: float) -> None:
        """The step is complete; it took so long."""
        self._learn()
        self._next.refresh()
        self.throttle.token(seconds)
        if self.asleep:
            # The next steps may go by without a word, and what stops them is no lesson on this one's tokens.
            self._rows, self._many = [], False

    def _rehearse(self) -> None:
        """Guess and learn once, so that what compiles at its first use does so now and not within a step."""
        scores = self._tokens.of(0, 0)
        rehearsal = LayerGuess(len(scores), self._top_k)
        guess = rehearsal.guess(scores, scores, np.ones(len(scores), np.bool_))
        if guess is not None:
            rehearsal.learn(guess, np.zeros(self._top_k, np.int32), scores)
        self._next.rehearse()

    def _learn(self) -> None:
        """What the routers said, in time that costs nothing, or at the latest when the step is done."""
        for lesson in self._lessons:
            lesson()
        self._lessons.clear()

    def _look_ahead(self, place: int, known: F32) -> None:
        look, rows = self._look, len(self._rows)
        look.start_from(slice(rows), known)
        for distance in range(1, FARTHEST + 1):
            target = place + distance
            if target >= len(self._layers):
                break
            absent = self._source.absent(self._layers[target])
            if absent is None or not absent.any():
                continue
            self._run(look.segment(self._layers[target]))
            logits = [look.logits[row].copy() for row in range(rows)]
            scores = [self._tokens.of(token, target) for token in self._rows]
            if self._hint(target, distance, logits, scores, distance * self._interval) and not self._large:
                return
        if place + 1 == len(self._layers) and not self._next.asked:
            self._hint_next_step()

    def _hint_next_step(self) -> None:
        """Guess the first layers of the step after this one, which begins when the last layer and the head are done."""
        lacking = {}
        for place in range(min(_FIRST_LAYERS, len(self._layers))):
            absent = self._source.absent(self._layers[place])
            if absent is not None and absent.any():
                lacking[place] = absent
        if not lacking:
            return
        self._next.ask(len(self._rows))
        most = _MOST_PER_CHOSEN * self._top_k * len(self._rows)
        for place, absent in lacking.items():
            wanted = np.where(absent, self._next.wanted(place, self._rows, absent), 0)
            self._say(place, wanted, most, (1 + place) * self._interval, step=self._step + 1)

    def _hint(self, place: int, distance: int, looks: Sequence[F32 | None], tokens: Sequence[F32], lead: float) -> bool:
        """Guess a layer, and say what is likely and absent; returns whether there was anything to say.

        Args:
            place: of the layer.
            distance: from where it is guessed, see `LayerGuesses`.
            looks: by row, float32 [experts], what the layer's router says of an earlier state.
            tokens: by row, float32 [experts], what the token table says.
            lead: seconds until the layer begins.
        """
        absent = self._source.absent(self._layers[place])
        if absent is None or not absent.any():
            return False
        learned = self.guesses.of(distance, place)
        by_row = [learned.guess(look, token, absent) for look, token in zip(looks, tokens, strict=True)]
        self._guesses[place, distance] = by_row
        wanted = np.ones(len(absent), np.float32)
        for guess in by_row:
            if guess is not None:
                wanted *= 1 - guess.probabilities
        most = _MOST_PER_CHOSEN * self._top_k * len(by_row)
        return self._say(place, np.where(absent, 1 - wanted, 0), most, lead, step=self._step)

    def _hint_union(self, place: int, known: F32) -> None:
        """Guess what the rows of a step together want of a layer, and say what of it is absent."""
        absent = self._source.absent(self._layers[place]) if place < len(self._layers) else None
        if absent is not None and absent.any():
            wanted = np.where(absent, self._union.wanted(place, known, absent), 0)
            self._say(place, wanted, _MOST_PER_CHOSEN * self._top_k, 0.0, step=self._step)

    def _say(self, place: int, wanted: F32, most: int, lead: float, *, step: int) -> bool:
        likely = np.flatnonzero(wanted >= self.throttle.least)
        if not likely.size:
            return False
        likely = likely[np.argsort(-wanted[likely])][:most]
        self._said[place] = frozenset(likely.tolist())
        self._lacked = self._step
        self._source.hint(
            self._layers[place],
            likely.tolist(),
            wanted[likely].tolist(),
            step=step,
            lead_seconds=_GENEROUS * lead,
        )
        return True
