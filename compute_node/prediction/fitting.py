"""Fits a node's guesses on recorded texts, and says on texts that were held out whether that is better than nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.bench.routing_states import RoutingStates, record_states
from compute_node.engine.model import Model
from compute_node.prediction.layer_guess import Guess
from compute_node.prediction.layer_guesses import FARTHEST, LayerGuesses
from compute_node.prediction.token_scores import TokenScores
from tierd.policy.decayed_frequency import DecayedFrequency
from tierd.policy.replay import ReplayArena
from tierd.policy.token_table import TokenTable

__all__ = ["Fit", "fit_guesses"]

_HELD_EVERY: Final = 4
"""One text in so many is held out, and at least one."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What was fitted, and how good it is.

    Attributes:
        guesses: fitted on the texts that were not held out.
        report: recall on misses of the held-out texts, among as many guesses as a router chooses: of the fitted
            guesses, of such as learn while these texts run, and of the plain next router.
    """

    guesses: LayerGuesses
    report: dict[str, Any]

    @property
    def pays(self) -> bool:
        """Whether the fit finds more than learning online does."""
        return bool(self.report["recall_on_misses"] > self.report["unfitted_recall_on_misses"])


class _Rehearsal:
    """Runs texts past guesses as a node would whose arena holds a part of the experts."""

    def __init__(self, model: Model, slots: int) -> None:
        geometry = model.source.store.manifest.geometry
        experts = [entry.experts for entry in geometry.layers]
        self.guesses = LayerGuesses(experts, geometry.top_k)
        self.found = np.zeros(3, np.int64)  # by the guesses, by the plain router, misses
        self._model = model
        self._layers = [entry.layer for entry in geometry.layers]
        self._starts = np.cumsum([0, *experts])
        self.top_k = geometry.top_k
        self._table = TokenTable(experts)
        self._tokens = TokenScores(self._table, experts, geometry.top_k)
        self._pool = ReplayArena(DecayedFrequency(), slots)
        self._step = 0

    def run(self, states: RoutingStates, *, judged: bool) -> None:
        """One text: guess, then learn."""
        for row, token in enumerate(states.tokens.tolist()):
            self._step += 1
            said: list[tuple[int, int, Guess]] = []
            for place, layer in enumerate(self._layers):
                there = [int(self._starts[place]) + expert for expert in states.routes[row, place].tolist()]
                resident = np.array([flat in self._pool.resident for flat in there])
                self._pool.policy.visit(0, self._step, layer, prefill=False)
                self._pool.request(there, prefill=False)
                self._tokens.learn(place, states.routes[row, place])
                known = (states.weighted[row, place] * resident[:, None]).sum(axis=0)
                for distance in range(1, FARTHEST + 1):
                    if place + distance < len(self._layers):
                        said += self._guess(states, row, token, place, distance, known, judged=judged)
            for place, distance, guess in said:
                learner = self.guesses.of(distance, place)
                learner.learn(guess, states.routes[row, place], states.logits[row, place])
            chosen = states.routes[row] + self._starts[:-1, None].astype(np.int32)
            self._table.count(token, chosen, previous=None)

    def _guess(
        self,
        states: RoutingStates,
        row: int,
        token: int,
        place: int,
        distance: int,
        known: NDArray[np.float32],
        *,
        judged: bool,
    ) -> list[tuple[int, int, Guess]]:
        """What the state at a place says of a later layer, as (its place, distance, guess)."""
        target = place + distance
        start, end = int(self._starts[target]), int(self._starts[target + 1])
        absent = np.array([flat not in self._pool.resident for flat in range(start, end)])
        residual = states.residual[row, place]
        plain, informed = self._model.route_ahead(self._layers[target], np.stack([residual, residual + known]))
        learner = self.guesses.of(distance, target)
        guess = learner.guess(informed[: end - start], self._tokens.of(token, target), absent)
        if guess is None:
            return []
        if judged and distance == 1:
            missed = np.zeros(end - start, np.bool_)
            missed[states.routes[row, target]] = True
            missed &= absent
            for number, scores in enumerate((guess.scores[guess.chosen_by], plain[: end - start])):
                self.found[number] += missed[np.argpartition(-scores, self.top_k - 1)[: self.top_k]].sum()
            self.found[2] += missed.sum()
        return [(target, distance, guess)]


def fit_guesses(
    model: Model, texts: Sequence[NDArray[np.int64]], *, residency: float, tell: Callable[[str], None]
) -> Fit:
    """Fits on most texts and judges on the others.

    Args:
        model: whose routing is foreseen.
        texts: token ids, at least two texts, each no longer than the model's context.
        residency: share of the experts that the arena is taken to hold.
        tell: takes a line when something begins.
    """
    slots = max(1, round(residency * model.source.store.manifest.geometry.experts_total))
    fitted, online = _Rehearsal(model, slots), _Rehearsal(model, slots)
    held = texts[_HELD_EVERY - 1 :: _HELD_EVERY] or texts[-1:]
    chosen = {id(text) for text in held}
    train = [text for text in texts if id(text) not in chosen]
    for number, text in enumerate(train, start=1):
        tell(f"text {number} of {len(train)}")
        fitted.run(record_states(model, text), judged=False)
    guesses = LayerGuesses([entry.experts for entry in model.source.store.manifest.geometry.layers], fitted.top_k)
    guesses.restore(fitted.guesses.as_arrays())
    for number, text in enumerate(held, start=1):
        tell(f"held-out text {number} of {len(held)}")
        states = record_states(model, text)
        fitted.run(states, judged=True)
        online.run(states, judged=True)
    misses = max(1, int(fitted.found[2]))
    report = {
        "recall_on_misses": int(fitted.found[0]) / misses,
        "unfitted_recall_on_misses": int(online.found[0]) / max(1, int(online.found[2])),
        "baseline_recall_on_misses": int(fitted.found[1]) / misses,
        "misses": int(fitted.found[2]),
        "train_tokens": sum(map(len, train)),
        "held_tokens": sum(map(len, held)),
        "residency": residency,
    }
    return Fit(guesses, report)
