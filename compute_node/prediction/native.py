"""The arithmetic of guesses as machine code: a layer is guessed and learned of in microseconds, while a step waits.

Nothing here touches what a token depends on. Scores are float32 [experts], counts float64 [2, bins]: margins seen in
each bin, and those of experts that were chosen.
"""

from __future__ import annotations

from math import exp, log, sqrt
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
    "likeliest_of",
    "margins_of",
    "mixed_shares",
    "probabilities_of",
    "sharpened",
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
def mixed_shares(
    tokens: Any, rows: Any, experts: Any, counts: Any, seen: Any, chosen: Any, layer_seen: float, start: int,
    top_k: int, mixed: Any,
) -> None:  # fmt: skip
    """Adds P(expert) for a token of which it is known how likely it is which one.

    Args:
        tokens: float32 [n], how likely each is.
        rows: int64 [n], where the table has it, -1 for nowhere.
        experts: int32 [table rows, places], flat numbers that the tokens went with, -1 for none.
        counts: uint16 [table rows, places], how often.
        seen: uint32 [table rows], how often the token itself was counted.
        chosen: float64 [experts], how often the layer's router chose each.
        layer_seen: tokens of these.
        start: flat number of the layer's expert 0.
        top_k: that a router chooses.
        mixed: float32 [experts], added to, at most 1 then.
    """
    # What the table does not say of a token's choices is spread as the layer's choices are.
    left = np.float32(0)
    for place in range(len(tokens)):
        row, known = rows[place], np.float32(0)
        if row >= 0:
            for number in range(experts.shape[1]):
                expert = experts[row, number] - start
                if experts[row, number] >= 0 and 0 <= expert < len(mixed):
                    share = min(np.float32(counts[row, number]) / np.float32(seen[row] + 1), np.float32(1))
                    mixed[expert] += tokens[place] * share
                    known += share
        left += tokens[place] * max(np.float32(0), np.float32(1) - known / np.float32(top_k))
    for expert in range(len(mixed)):
        spread = np.float32(min(chosen[expert] / layer_seen, 1.0))
        mixed[expert] = min(mixed[expert] + left * spread, np.float32(1))


@njit(nogil=True, cache=True, error_model="numpy")
def _largest(logits: Any) -> float:
    """The largest finite one; -inf if there is none: a torn read may leave anything in a sum."""
    most = -np.inf
    for logit in logits:
        if np.isfinite(logit):
            most = max(most, float(logit))
    return most


@njit(nogil=True, cache=True, error_model="numpy")
def likeliest_of(logits: Any, sharpness: float, places: Any, shares: Any) -> int:
    """The likeliest by softmax of the logits times the sharpness, in no order; returns how many they are.

    Args:
        logits: float32 [candidates].
        sharpness: above 0.
        places: int64 [n], written: numbers of the likeliest ones; the first of equals.
        shares: float32 [n], written: how likely they are.
    """
    most, least, filled, total = _largest(logits), 0, 0, 0.0
    for place in range(len(logits)):
        if not np.isfinite(logits[place]):
            continue
        power = np.float32(exp(sharpness * (np.float64(logits[place]) - most)))
        total += float(power)
        if filled < len(places):
            least, filled = filled, filled + 1
        elif not power > shares[least]:
            continue
        places[least], shares[least] = place, power
        if filled == len(places):
            least = int(np.argmin(shares))
    for number in range(filled):
        shares[number] /= np.float32(total)
    return filled


@njit(nogil=True, cache=True, error_model="numpy")
def sharpened(logits: Any, place: int, sharpness: float, rate: float) -> float:
    """The sharpness moved to where the softmax gives `place`, which was chosen, a larger share."""
    if not np.isfinite(logits[place]):
        return sharpness
    most, total, mean, squares = _largest(logits), 0.0, 0.0, 0.0
    for logit in logits:
        if np.isfinite(logit):
            below = np.float64(logit) - most
            power = exp(sharpness * below)
            total += power
            mean += power * below
            squares += power * below * below
    mean /= total
    spread = sqrt(max(0.0, squares / total - mean * mean))
    # The slope of the logarithm of its share, in proportion to how much there is to choose.
    slope = sharpness * (np.float64(logits[place]) - most - mean) / (1 + sharpness * spread)
    return sharpness * exp(rate * min(max(slope, -1.0), 1.0))


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
