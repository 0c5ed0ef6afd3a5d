"""Does speculation pay? Short windows with more and with less of it, turn about; what costs less per token stays.

Pure: it is told what each token cost and says which level holds now. The daemon counts the seconds that requests
waited, a node the seconds that its steps took.
"""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["LEAST_PROBABILITY", "SECOND_WINDOW", "Throttle"]

LEAST_PROBABILITY: Final = (2.0, 0.6, 0.4, 0.25)
"""By level: probability that a guess must have; nothing has that of level 0."""

_WINDOW: Final = 8
"""Tokens of a window: the load of a drive hardly changes within so few."""
SECOND_WINDOW: Final = 3 * _WINDOW // 2
"""Of a throttle behind another one: over 48 tokens such windows meet as many of the other's trial as not, whatever the
phase. With equal windows each could be off just while the other one tries, and both would see no gain."""
_PAIRS: Final = 4
_LEAST_PAIRS: Final = 2
_CLEAR: Final = 0.05
_CLEAR_ERRORS: Final = 4.0
"""A trial ends before its last pair where the means differ by this share and by so many standard errors."""
_REST: Final = 8
_LONGEST_REST: Final = 128
_BETTER: Final = 0.02
"""More speculation must save this share of the cost, or less of it may cost half of this, before the level moves."""
_TRIMMED: Final = 0.1


class Throttle:
    """A level between 0, off, and the last of `LEAST_PROBABILITY`.

    After a rest, another level is tried in turn with the present one, `_PAIRS` windows of each at most, fewer where the
    difference is clear: each of them is spent on the worse level. Off is tried first, since
    whether speculation pays at all matters most, then the next lower and the next higher one; from off the next higher
    one and the highest. If the trial changes nothing the next rest is twice as long. Where both cost the same, less
    speculation wins: it reads less.

    Args:
        level: to begin with; the highest if None.
        fixed: stay there, whatever it costs.
        window: tokens of a window.

    Attributes:
        base: the level between trials.
    """

    def __init__(self, level: int | None = None, *, fixed: bool = False, window: int = _WINDOW) -> None:
        self._fixed = fixed
        self._window = window
        self.base = len(LEAST_PROBABILITY) - 1 if level is None else level
        self._trial: int | None = None
        self._turns = 0  # trials begun so far
        self._tokens = 0  # of this window
        self._windows = 0  # of this rest or trial
        self._rest = 1
        self._costs: dict[bool, list[float]] = {False: [], True: []}

    def __repr__(self) -> str:
        return f"<Throttle level {self.level}, base {self.base}>"

    @property
    def level(self) -> int:
        """The level that holds now."""
        return self._trial if self._trial is not None and self._trying else self.base

    @property
    def least(self) -> float:
        """Probability that a guess must have now."""
        return LEAST_PROBABILITY[self.level]

    def token(self, cost: float) -> None:
        """A token is done; it cost so many seconds."""
        if self._fixed:
            return
        if self._trial is not None and self._tokens:
            # The first token of a window still feels the level before.
            self._costs[self._trying].append(cost)
        self._tokens += 1
        if self._tokens < self._window:
            return
        self._tokens = 0
        self._windows += 1
        if self._trial is None and self._windows >= self._rest:
            self._begin()
        elif self._trial is not None and (self._windows == 2 * _PAIRS or self._clear()):
            self._decide()

    def disturbed(self) -> None:
        """Sessions came or went: what was measured so far compares nothing."""
        self._costs = {False: [], True: []}
        self._tokens = self._windows = 0
        self._rest = min(self._rest, _REST)

    @property
    def _trying(self) -> bool:
        return self._windows % 2 == 1

    def _begin(self) -> None:
        top = len(LEAST_PROBABILITY) - 1
        candidates = (0, self.base - 1, self.base + 1) if self.base > 1 else (self.base - 1, self.base + 1, top)
        others = [level for level in candidates if 0 <= level <= top]
        self._trial = others[self._turns % len(others)]
        self._turns += 1
        self._windows = 0
        self._costs = {False: [], True: []}

    def _clear(self) -> bool:
        """Whether the two levels, after as many windows of each, differ by more than chance."""
        if self._windows % 2 or self._windows < 2 * _LEAST_PAIRS:
            return False
        base, trial = (np.asarray(self._costs[trying]) for trying in (False, True))
        means = float(base.mean()), float(trial.mean())
        error = float(np.sqrt(base.var() / len(base) + trial.var() / len(trial)))
        return abs(means[0] - means[1]) > max(_CLEAR * max(means), _CLEAR_ERRORS * error)

    def _decide(self) -> None:
        base, trial = (_trimmed_mean(self._costs[trying]) for trying in (False, True))
        assert self._trial is not None
        more = self._trial > self.base
        moves = trial < base * (1 - _BETTER) if more else trial <= base * (1 + _BETTER / 2)
        if moves:
            self.base = self._trial
        self._rest = _REST if moves else min(max(_REST, 2 * self._rest), _LONGEST_REST)
        self._trial = None
        self._windows = 0


def _trimmed_mean(costs: list[float]) -> float:
    """Mean without the highest and lowest tenth: one stall of a drive must not decide."""
    cut = int(len(costs) * _TRIMMED)
    kept = sorted(costs)[cut : len(costs) - cut]
    return sum(kept) / len(kept)
