"""The arithmetic of guesses as machine code: a layer is guessed and learned of in microseconds, while a step waits.

Nothing here touches what a token depends on. Scores are float32 [experts], counts float64 [2, bins]: margins seen in
each bin, and those of experts that were chosen.
"""

from __future__ import annotations

from math import log, sqrt
from typing import Any, Final

import numpy as np
from numba import njit

from compute_node import kernels  # noqa: F401 - it says where compiled code is kept

__all__ = [
    "BINS",
    "REACH",
    "count_margins",
    "guess_scores",
    "learn_scores",
    "margins_of",
    "probabilities_of",
    "token_scores",
]

BINS: Final = 24
REACH: Final = 2.0
_MOST: Final = 4096.0
_SMOOTHING: Final = 1 / 64
_LEAST: Final = 1e-3

# Rows of the scores of a guess.
LOOK, TOKEN, BOTH, CORRECTED = range(4)


@njit(nogil=True, cache=True, error_model="numpy")
def margins_of(scores: Any, top_k: int, margins: Any) -> None:
    """How far each score lies above the border between the k-th and the next one, in standard deviations of all."""
    count = len(scores)
    if count <= top_k:
        margins[:] = np.float32(1)
        return
    highest = np.empty(top_k + 1, np.float32)
    filled, total = 0, 0.0
    for score in scores:
        total += score
        if filled <= top_k:
            filled += 1
        elif not score > highest[top_k]:
            continue
        place = filled - 1
        while place > 0 and highest[place - 1] < score:
            highest[place] = highest[place - 1]
            place -= 1
        highest[place] = score
    mean, squares = total / count, 0.0
    for score in scores:
        squares += (score - mean) ** 2
    spread = max(sqrt(squares / count), 1e-6)
    border = (np.float64(highest[top_k - 1]) + np.float64(highest[top_k])) / 2
    for place in range(count):
        margins[place] = (scores[place] - border) / spread


@njit(nogil=True, cache=True, error_model="numpy")
def _bin_of(margin: float) -> int:
    clipped = min(max(margin, -REACH), REACH)
    return min(int((clipped + REACH) / (2 * REACH) * BINS), BINS - 1)


@njit(nogil=True, cache=True, error_model="numpy")
def probabilities_of(counts: Any, margins: Any, probabilities: Any) -> None:
    """The share of chosen ones among those that lay so far from the border."""
    for place in range(len(margins)):
        number = _bin_of(margins[place])
        probabilities[place] = counts[1, number] / counts[0, number]


@njit(nogil=True, cache=True, error_model="numpy")
def count_margins(counts: Any, margins: Any, chosen: Any, counted: Any) -> None:
    """Experts with these margins were chosen or not; bool arrays say which, and which of them count at all."""
    fullest = 0.0
    for place in range(len(margins)):
        if counted[place]:
            number = _bin_of(margins[place])
            counts[0, number] += 1
            counts[1, number] += chosen[place]
    for number in range(BINS):
        fullest = max(fullest, counts[0, number])
    if fullest > _MOST:
        counts /= 2


@njit(nogil=True, cache=True, error_model="numpy")
def token_scores(chosen: Any, seen: float, experts: Any, shares: Any, start: int, top_k: int, scores: Any) -> None:
    """Log of P(expert | token).

    Args:
        chosen: float64 [experts], how often the layer's router chose each.
        seen: tokens of these.
        experts: int32 [places], flat numbers that the token went with, -1 for none.
        shares: float32 [places], how often.
        start: flat number of the layer's expert 0.
        top_k: that a router chooses.
        scores: float32 [experts], written.
    """
    known = 0.0
    for place in range(len(experts)):
        if experts[place] >= 0:
            known += shares[place]
    # What the table does not say of the token's choices is spread as the layer's choices are.
    left = max(0.0, 1.0 - known / top_k)
    for expert in range(len(scores)):
        scores[expert] = chosen[expert] / seen * left
    for place in range(len(experts)):
        expert = experts[place] - start
        if experts[place] >= 0 and 0 <= expert < len(scores):
            scores[expert] += shares[place]
    for expert in range(len(scores)):
        scores[expert] = log(min(max(scores[expert], _LEAST), 1.0))


@njit(nogil=True, cache=True, error_model="numpy")
def _score(look: Any, token: Any, fitted: Any, scores: Any, known: Any, inputs: Any) -> None:
    """What each predictor says; see `guess_scores`."""
    experts, mean = scores.shape[1], 0.0
    for value in look:
        mean += value / experts
    # A torn read may leave anything in a sum.
    known[LOOK] = len(look) == experts and np.isfinite(mean)
    known[TOKEN] = len(token) == experts
    known[BOTH] = known[LOOK] and known[TOKEN]
    known[CORRECTED] = known[LOOK] and len(fitted) > 0
    for expert in range(experts):
        inputs[expert] = look[expert] - mean if known[LOOK] else 0.0
        inputs[experts + expert] = token[expert] if known[TOKEN] else 0.0
        scores[LOOK, expert], scores[TOKEN, expert] = inputs[expert], inputs[experts + expert]
        scores[BOTH, expert] = inputs[expert] + inputs[experts + expert]
        scores[CORRECTED, expert] = fitted[2 * experts, expert] if known[CORRECTED] else 0.0
    if known[CORRECTED]:
        for place in range(2 * experts):
            for expert in range(experts):
                scores[CORRECTED, expert] += inputs[place] * fitted[place, expert]


@njit(nogil=True, cache=True, error_model="numpy")
def guess_scores(
    look: Any, token: Any, fitted: Any, recall: Any, counts: Any, top_k: int, scores: Any, known: Any, inputs: Any,
    said: Any,
) -> int:  # fmt: skip
    """Scores of all predictors, and probabilities by the one with the best recall; returns its number, or -1 for none.

    Args:
        look: float32 [experts], or [0] if the router was not asked.
        token: the same of the token table.
        fitted: float32 [2 experts + 1, experts], the learned map and its offset, or [0, experts].
        recall: float64 [predictors].
        counts: float64 [predictors, 2, bins].
        top_k: that a router chooses.
        scores: float32 [predictors, experts], written; valid where `known`.
        known: bool [predictors], written.
        inputs: float32 [2 experts], written: what the map is applied to.
        said: float32 [experts], the probabilities, written.
    """
    _score(look, token, fitted, scores, known, inputs)
    best = -1
    for predictor in range(len(known)):
        if known[predictor] and (best < 0 or recall[predictor] > recall[best]):
            best = predictor
    if best >= 0:
        margins = np.empty(len(said), np.float32)
        margins_of(scores[best], top_k, margins)
        probabilities_of(counts[best], margins, said)
    return best


@njit(nogil=True, cache=True, error_model="numpy")
def learn_scores(scores: Any, known: Any, absent: Any, chosen: Any, top_k: int, recall: Any, counts: Any) -> None:
    """The router has chosen: how well did each predictor foresee what was absent?

    Args:
        scores: float32 [predictors, experts], of a guess.
        known: bool [predictors], which of them are.
        absent: bool [experts], not in RAM when they were said.
        chosen: int32 [top_k].
        top_k: as it was there.
        recall: float64 [predictors], moved.
        counts: float64 [predictors, 2, bins], added to.
    """
    experts = scores.shape[1]
    wanted, margins = np.zeros(experts, np.bool_), np.empty(experts, np.float32)
    misses = 0
    for expert in chosen:
        if 0 <= expert < experts:
            wanted[expert] = True
            misses += absent[expert]
    for predictor in range(len(known)):
        if not known[predictor]:
            continue
        margins_of(scores[predictor], top_k, margins)
        if misses:
            found = 0
            for expert in range(experts):
                found += wanted[expert] and absent[expert] and margins[expert] > 0
            recall[predictor] += _SMOOTHING * (found / misses - recall[predictor])
        count_margins(counts[predictor], margins, wanted, absent)
