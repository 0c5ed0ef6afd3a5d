"""A small linear map from what can be known early to what a router says later, learned while the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError

__all__ = ["Correction"]

F64 = NDArray[np.float64]

_PRIOR: Final = 30.0
"""Samples that the starting point, "as the first part of the input says", counts for."""
_TOGETHER: Final = 8
_LONGEST: Final = 256
_MEMORY: Final = 20_000.0
"""Samples after which the weight of an old one has fallen to a third: texts change, and routing with them."""


class Correction:
    """Least squares with forgetting, from `inputs` numbers to `outputs` of them; at first the first `outputs` inputs.

    The sums need (inputs + 1)^2 numbers. Samples are summed eight at a time, and the sums solved anew after ever more
    of them, 8, 16, 32, and so on up to every 256, so that learning costs little beside a step.

    Args:
        inputs: length of an input, at least `outputs`.
        outputs: length of an output.

    Attributes:
        map: float32 [inputs + 1, outputs], contiguous: what an input is multiplied with, and in the last row an offset.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        start = np.zeros((inputs + 1, outputs))
        start[:outputs] = np.eye(outputs)
        self._gram: F64 = _PRIOR * np.eye(inputs + 1)
        self._cross: F64 = _PRIOR * start
        self.map: NDArray[np.float32] = start.astype(np.float32)
        self._x = np.ones((_TOGETHER, inputs + 1), np.float32)
        self._y = np.zeros((_TOGETHER, outputs), np.float32)
        self._held = 0
        self._samples = 0
        self._solve_at = _TOGETHER

    def predict(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The outputs for one input: float32 [inputs] to float32 [outputs]."""
        result: NDArray[np.float32] = x @ self.map[:-1] + self.map[-1]
        return result

    def learn(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """For this input, that was the output."""
        self._x[self._held, :-1], self._y[self._held] = x, y
        self._held += 1
        if self._held < _TOGETHER:
            return
        self._held = 0
        self._gram += self._x.T @ self._x
        self._cross += self._x.T @ self._y
        self._samples += _TOGETHER
        if self._samples < self._solve_at:
            return
        self._solve_at += min(self._samples, _LONGEST)
        self.map = np.linalg.solve(self._gram, self._cross).astype(np.float32, order="C")
        if self._samples >= _MEMORY:
            self._gram /= np.e
            self._cross /= np.e
            self._samples = int(_MEMORY / np.e)
            self._solve_at = self._samples + _LONGEST

    def as_arrays(self) -> dict[str, NDArray[Any]]:
        """The sums, for a file: `gram`, `cross`, `samples`; at most seven samples that wait are left out."""
        return {
            "gram": self._gram.astype(np.float32),
            "cross": self._cross.astype(np.float32),
            "samples": np.array(self._samples, np.int64),
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes the content of `as_arrays` in place of its own; UsageError if it is none of these sizes."""
        gram, cross, samples = (arrays.get(name) for name in ("gram", "cross", "samples"))
        if gram is None or cross is None or samples is None or samples.shape != ():
            raise UsageError("a saved predictor lacks the sums of a map")
        if gram.shape != self._gram.shape or cross.shape != self._cross.shape or not 0 <= int(samples) <= 2 * _MEMORY:
            raise UsageError(f"a saved predictor has a map of {cross.shape}, not of {self._cross.shape}")
        try:
            fitted = np.linalg.solve(gram.astype(np.float64), cross.astype(np.float64))
        except np.linalg.LinAlgError:
            fitted = np.full_like(self._cross, np.nan)
        if not np.isfinite(fitted).all():
            raise UsageError("a saved predictor holds impossible numbers")
        self._gram, self._cross = gram.astype(np.float64), cross.astype(np.float64)
        self.map, self._samples = fitted.astype(np.float32, order="C"), int(samples)
        self._held, self._solve_at = 0, self._samples + min(max(self._samples, _TOGETHER), _LONGEST)
