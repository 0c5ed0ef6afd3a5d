"""How well are misses foreseen? Predictors of the node against the plain next router, on texts nothing was fitted on.

No drive is involved: a pool of slots under decayed frequency says which experts would have been missing. Whatever a
predictor names and the pool lacks would be read; what of it the router then chooses is useful, the rest is wasted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.bench.drawn_hints import Foreseen, Named
from compute_node.bench.routing_states import RoutingStates, record_states
from compute_node.engine.model import Model
from compute_node.kernels import Segment
from compute_node.prediction.calibration import margins
from compute_node.prediction.layer_guess import PREDICTORS, Guess, LayerGuess
from compute_node.prediction.layer_guesses import LayerGuesses
from compute_node.prediction.next_step import NextStep
from compute_node.prediction.token_scores import TokenScores
from tierd.policy.decayed_frequency import DecayedFrequency
from tierd.policy.replay import ReplayArena
from tierd.policy.token_table import TokenTable

__all__ = ["Recall", "measure_recall"]

BELIEVED = "chosen per layer"
_LIKELIHOODS: Final = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
"""Borders between guesses that are counted together."""


@dataclass(slots=True)
class _Found:
    """Scores of absent experts, the higher the likelier, and whether the router chose them; by layer."""

    scores: list[NDArray[np.float32]] = field(default_factory=list)
    wanted: list[NDArray[np.bool_]] = field(default_factory=list)
    places: list[NDArray[np.intp]] = field(default_factory=list)

    def add(self, place: int, scores: NDArray[np.float32], wanted: NDArray[np.bool_]) -> None:
        self.scores.append(scores)
        self.wanted.append(wanted)
        self.places.append(np.full(len(scores), place))

    def curve(self, place: int | None = None) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.intp]]:
        """Recall on misses and wasted per useful byte after each further expert, likeliest first; and their order.

        Of one layer, by its place, or of all.
        """
        wanted, scores = np.concatenate(self.wanted), np.concatenate(self.scores)
        if place is not None:
            of_layer = np.concatenate(self.places) == place
            wanted, scores = wanted[of_layer], scores[of_layer]
        order = np.argsort(-scores, kind="stable")
        useful = np.cumsum(wanted[order])
        read = np.arange(1, len(order) + 1)
        return useful / max(1, useful[-1]), (read - useful) / np.maximum(1, useful), order

    def at_waste(self, waste: float) -> tuple[float, float, dict[int, float]]:
        """The highest recall at no more waste, that waste, and the recall by layer there."""
        recall, wasted, order = self.curve()
        within = np.flatnonzero(wasted <= waste)
        last = int(within[-1]) if within.size else 0
        wanted, places = np.concatenate(self.wanted), np.concatenate(self.places)
        read = np.zeros(len(order), np.bool_)
        read[order[: last + 1]] = True
        by_layer = {
            place: float(wanted[read & (places == place)].sum() / max(1, wanted[places == place].sum()))
            for place in np.unique(places).tolist()
        }
        return float(recall[last]), float(wasted[last]), by_layer


@dataclass(frozen=True, slots=True)
class Recall:
    """The figures, and how guesses turned out by how likely they were called, for `DrawnHints`."""

    report: dict[str, Any]
    foreseen: Foreseen


class _Outcomes:
    """What became of guesses about absent experts, by how likely they were called."""

    def __init__(self) -> None:
        self._counts = np.zeros((2, len(_LIKELIHOODS)))  # right, wrong
        self._missed = 0

    def add(
        self, probabilities: NDArray[np.float32] | None, chosen: NDArray[np.int32], absent: NDArray[np.bool_]
    ) -> None:
        """What was guessed, if anything, and what the router chose."""
        wanted = np.zeros(len(absent), np.bool_)
        wanted[chosen] = True
        self._missed += int((wanted & absent).sum())
        if probabilities is None:
            return
        bins = np.searchsorted(-np.array(_LIKELIHOODS), -probabilities)
        for kind, those in enumerate((wanted & absent, absent & ~wanted)):
            self._counts[kind] += np.bincount(bins[those], minlength=len(_LIKELIHOODS) + 1)[:-1]

    def named(self) -> Named:
        """The same per missing expert, without what is hardly ever named."""
        right, wrong = self._counts / max(1, self._missed)
        some = right + wrong > 0
        likely = (right / np.maximum(right + wrong, 1e-9))[some]
        return Named(*(tuple(part.tolist()) for part in (likely, right[some], wrong[some])))


class _Comparison:
    def __init__(self, model: Model, slots: int) -> None:
        geometry = model.source.store.manifest.geometry
        self._model = model
        self._layers = [entry.layer for entry in geometry.layers]
        experts = [entry.experts for entry in geometry.layers]
        self._starts = np.cumsum([0, *experts])
        self._k = geometry.top_k
        self._table = TokenTable(experts)
        self._tokens = TokenScores(self._table, experts, geometry.top_k)
        self._guesses = [LayerGuess(count, geometry.top_k) for count in experts]
        self._farther = [LayerGuess(count, geometry.top_k) for count in experts]
        self._pool = ReplayArena(DecayedFrequency(), slots)
        self._step = 0
        self.baseline = np.zeros(3, np.int64)  # useful, read, missed
        self.found = {name: _Found() for name in (BELIEVED, *PREDICTORS)}
        self.first = _Found()
        self._by_token = LayerGuess(experts[0], geometry.top_k, maps=False)
        self._look = model.program.look_ahead
        guesses = LayerGuesses(experts, geometry.top_k)
        self._next = NextStep(self._look, _run, self._table, self._tokens, guesses)
        self._expected: NDArray[np.float32] | None = None
        self.next_layer, self.second_layer = _Outcomes(), _Outcomes()
        self.this_token, self.next_step = _Outcomes(), _Outcomes()

    def run(self, states: RoutingStates, *, judged: bool) -> None:
        """One text: guess, then learn, as a node does."""
        previous: int | None = None
        self._expected = None
        for row, token in enumerate(states.tokens.tolist()):
            self._step += 1
            self._foresee_first(states, row, token, judged=judged)
            for place, layer in enumerate(self._layers):
                there = [int(self._starts[place]) + expert for expert in states.routes[row, place].tolist()]
                resident = np.array([flat in self._pool.resident for flat in there])
                self._pool.policy.visit(0, self._step, layer, prefill=False)
                self._pool.request(there, prefill=False)
                self._tokens.learn(place, states.routes[row, place])
                known = (states.weighted[row, place] * resident[:, None]).sum(axis=0)
                if resident.all():
                    known[:] = 0  # such a layer is looked ahead of before it is computed
                if place + 1 < len(self._layers):
                    self._look_next(states, row, token, place + 1, known, judged=judged)
                if place + 2 < len(self._layers):
                    self._look_farther(states, row, token, place + 2, known, judged=judged)
            self._foresee_next(states.residual[row, -1] + known, token)
            chosen = states.routes[row] + self._starts[:-1, None].astype(np.int32)
            self._table.count(token, chosen, previous=previous)
            previous = token

    def _foresee_next(self, state: NDArray[np.float32], token: int) -> None:
        """What the last layer's state, float32 [H], and the token tell of the first layer of the next token."""
        self._look.batch.set_rows(1)
        self._look.state[0] = state
        self._next.ask(1)
        self._expected = self._next.wanted(0, [token], self._absent(0))
        self._next.refresh()

    def _foresee_first(self, states: RoutingStates, row: int, token: int, *, judged: bool) -> None:
        """Of the first layer the token alone tells, and before it is known the step before it."""
        absent = self._absent(0)
        chosen, wanted = states.routes[row, 0], np.zeros(len(absent), np.bool_)
        wanted[chosen] = True
        scores = self._tokens.of(token, 0)
        guess = self._by_token.guess(None, scores, absent)
        self._next.begin([token], follows=self._expected is not None)
        if judged:
            self.first.add(0, margins(scores, self._k)[absent], wanted[absent])
            self.this_token.add(_probabilities(guess), chosen, absent)
            if self._expected is not None:
                self.next_step.add(self._expected, chosen, absent)
        if guess is not None:
            self._by_token.learn(guess, chosen, states.logits[row, 0])
        for lesson in self._next.lessons(0, chosen[None]):
            lesson()

    def _look_next(
        self,
        states: RoutingStates,
        row: int,
        token: int,
        place: int,
        known: NDArray[np.float32],
        *,
        judged: bool,
    ) -> None:
        absent = self._absent(place)
        residual = states.residual[row, place - 1]
        plain, informed = self._model.route_ahead(self._layers[place], np.stack([residual, residual + known]))
        guess = self._guesses[place].guess(informed, self._tokens.of(token, place), absent)
        chosen, wanted = states.routes[row, place], np.zeros(len(absent), np.bool_)
        wanted[chosen] = True
        if judged and guess is not None:
            top = np.zeros_like(wanted)
            top[np.argsort(-plain)[: self._k]] = True
            self.baseline += [(top & absent & wanted).sum(), (top & absent).sum(), (absent & wanted).sum()]
            self.found[BELIEVED].add(place, guess.probabilities[absent], wanted[absent])
            for name, scores in guess.scores.items():
                self.found[name].add(place, margins(scores, self._k)[absent], wanted[absent])
        if judged:
            self.next_layer.add(_probabilities(guess), chosen, absent)
        if guess is not None:
            self._guesses[place].learn(guess, chosen, states.logits[row, place])

    def _look_farther(
        self, states: RoutingStates, row: int, token: int, place: int, known: NDArray[np.float32], *, judged: bool
    ) -> None:
        """What the state of two layers before tells of a layer, by its place."""
        absent, learned = self._absent(place), self._farther[place]
        state = states.residual[row, place - 2] + known
        (logits,) = self._model.route_ahead(self._layers[place], state[None])
        guess = learned.guess(logits, self._tokens.of(token, place), absent)
        if judged:
            self.second_layer.add(_probabilities(guess), states.routes[row, place], absent)
        if guess is not None:
            learned.learn(guess, states.routes[row, place], states.logits[row, place])

    def _absent(self, place: int) -> NDArray[np.bool_]:
        """Which experts of a layer the pool lacks: bool [experts]."""
        flats = range(int(self._starts[place]), int(self._starts[place + 1]))
        return np.array([flat not in self._pool.resident for flat in flats])

    def by_layer(self) -> dict[int, dict[str, list[tuple[float, float]]]]:
        """Curves of each layer by predictor; of the first layer, of the token table alone."""
        curves = {self._layers[0]: {"token table": _thinned(self.first, 0)}}
        for place, layer in enumerate(self._layers[1:], start=1):
            curves[layer] = {name: _thinned(found, place) for name, found in self.found.items()}
        return curves


def measure_recall(
    model: Model,
    train: Sequence[NDArray[np.int64]],
    held: Sequence[NDArray[np.int64]],
    *,
    residency: float,
    tell: Callable[[str], None],
) -> Recall:
    """Compare the predictors.

    Args:
        model: whose routing is foreseen.
        train: texts to learn from, token ids.
        held: texts to be judged on; learning goes on, always after judging.
        residency: share of the experts that the pool holds.
        tell: takes a line when something begins.
    """
    comparison = _Comparison(model, round(residency * model.source.store.manifest.geometry.experts_total))
    for number, tokens in enumerate([*train, *held]):
        tell(f"text {number + 1} of {len(train) + len(held)}")
        comparison.run(record_states(model, tokens), judged=number >= len(train))
    useful, read, missed = comparison.baseline.tolist()
    baseline_waste = (read - useful) / max(1, useful)
    recall, waste, by_layer = comparison.found[BELIEVED].at_waste(baseline_waste)
    plain = useful / max(1, missed)
    report = {
        "recall_on_misses": recall,
        "baseline_recall_on_misses": plain,
        "wasted_per_useful_byte": waste,
        "baseline_wasted_per_useful_byte": baseline_waste,
        "closed_share": (recall - plain) / max(1e-9, 1 - plain),
        "recall_by_layer": by_layer,
        "curves": {name: _thinned(found) for name, found in comparison.found.items()},
        "curves_by_layer": comparison.by_layer(),
        "misses": missed,
        "residency": residency,
        "train_tokens": sum(map(len, train)),
        "held_tokens": sum(map(len, held)),
    }
    outcomes = (comparison.next_layer, comparison.second_layer, comparison.this_token, comparison.next_step)
    return Recall(report, Foreseen(*(part.named() for part in outcomes)))


def _run(segment: Segment) -> None:
    """Runs a segment op by op."""
    for op in segment.ops:
        op()


def _probabilities(guess: Guess | None) -> NDArray[np.float32] | None:
    return None if guess is None else guess.probabilities


def _thinned(found: _Found, place: int | None = None) -> list[tuple[float, float]]:
    """Some fifty points of a curve: recall and waste."""
    recall, waste, _ = found.curve(place)
    chosen = np.searchsorted(recall, np.linspace(0.02, 0.98, 49))
    return [(float(recall[i]), float(waste[i])) for i in np.minimum(chosen, len(recall) - 1)]
