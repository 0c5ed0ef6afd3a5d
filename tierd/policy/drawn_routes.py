"""Routes for models of random weights: generated so that experts are used again as often as in a recorded trace.

Each layer keeps its experts in order of last use. A recorded trace says how often the expert at a given relative depth
of that order is chosen; this is what every least-recently-used cache sees. The generator chooses depths with the same
probabilities, stretched to another number of experts, by systematic sampling (Madow 1949): a fixed number of distinct
experts for a token, each depth with exactly its own probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError

__all__ = ["RECORDED", "RouteModel", "lru_hit_rates", "reuse_depths"]

Choices = NDArray[np.integer]


def reuse_depths(choices: Choices, experts: int) -> NDArray[np.int64]:
    """Depth of each choice in the order of last use as it stood before the token; the deepest never used yet.

    Args:
        choices: integer [tokens, k], the experts of one layer.
        experts: of the layer.

    Returns:
        int64 [tokens, k], 0 for the expert used last.
    """
    order = list(range(experts))
    depths = np.empty(choices.shape, np.int64)
    for row, chosen in zip(depths, choices.tolist(), strict=True):
        row[:] = [order.index(expert) for expert in chosen]
        for expert in reversed(chosen):
            order.remove(expert)
            order.insert(0, expert)
    return depths


def lru_hit_rates(choices: Choices, experts: int, fractions: Sequence[float]) -> list[float]:
    """Share of choices that a least-recently-used cache of each size has, one layer with slots of its own.

    Args:
        choices: integer [tokens, k].
        experts: of the layer.
        fractions: sizes of the cache as shares of the layer's experts.
    """
    depths = reuse_depths(choices, experts)
    return [float((depths < fraction * experts).mean()) for fraction in fractions]


@dataclass(frozen=True, slots=True, eq=False)
class RouteModel:
    """How often each relative depth is chosen.

    Attributes:
        shares: float64 [layers, depths], rows sum to one; depth i stands for the relative depths i/n to (i+1)/n.
    """

    shares: NDArray[np.float64]

    @classmethod
    def fitted(cls, choices: Choices, experts: int) -> RouteModel:
        """From a trace, integer [tokens, layers, k]."""
        counts = [
            np.bincount(reuse_depths(choices[:, layer], experts).ravel(), minlength=experts)
            for layer in range(choices.shape[1])
        ]
        return cls.of_counts(np.array(counts, np.float64))

    @classmethod
    def of_counts(cls, counts: NDArray[np.float64]) -> RouteModel:
        """From how often each depth was chosen, [layers, depths]."""
        return cls(counts / counts.sum(axis=1, keepdims=True))

    def generate(self, *, tokens: int, layers: int, experts: int, top_k: int, seed: int = 0) -> NDArray[np.int32]:
        """Choices for a model of other sizes; its layers take after the recorded ones in order.

        Returns:
            int32 [tokens, layers, top_k], distinct experts in each row.

        Raises:
            UsageError: more experts for a token than there are.
        """
        if not 1 <= top_k <= experts:
            raise UsageError(f"{top_k} of {experts} experts cannot be chosen")
        generator = np.random.Generator(np.random.Philox(seed))
        routes = np.empty((tokens, layers, top_k), np.int32)
        for layer in range(layers):
            recorded = self.shares[layer * len(self.shares) // layers]
            odds = _inclusion(recorded, experts, top_k)
            order = generator.permutation(experts)
            for token in range(tokens):
                mixed = generator.permutation(experts)
                marks = np.cumsum(odds[mixed])
                at = np.searchsorted(marks, generator.random() + np.arange(top_k), side="right")
                depths = mixed[np.minimum(at, experts - 1)]
                chosen = order[depths]
                routes[token, layer] = chosen
                order = np.concatenate([chosen, np.delete(order, depths)])
        return routes


def _inclusion(recorded: NDArray[np.float64], experts: int, top_k: int) -> NDArray[np.float64]:
    """Probability that each depth is among the chosen: the recorded share of it, times top_k, at most one."""
    edges = np.linspace(0, len(recorded), experts + 1)
    cumulative = np.concatenate([[0.0], np.cumsum(recorded)])
    odds: NDArray[np.float64] = top_k * np.diff(np.interp(edges, np.arange(len(recorded) + 1), cumulative))
    while (odds > 1).any():
        certain = odds >= 1
        rest = top_k - int(certain.sum())
        others = odds[~certain].sum()
        odds = np.where(certain, 1.0, odds * (rest / others) if others > 0 else rest / max(1, int((~certain).sum())))
    return odds


_RECORDED: Final = """
601 455 398 370 430 350 337 342 382 335 344 339 339 339 322 310
316 304 300 290 280 274 276 258 257 257 229 223 210 197 182 152
470 460 431 402 338 349 349 336 356 342 348 357 347 347 339 349
329 326 324 320 315 305 305 293 279 275 251 240 205 160 103 50
512 439 455 451 360 368 353 358 371 360 363 365 358 350 349 334
339 337 332 312 303 298 286 266 254 236 214 197 172 142 100 65
497 448 408 408 347 351 354 350 360 356 356 364 354 351 350 335
327 336 325 309 311 304 294 284 269 250 225 212 179 159 131 98
845 725 644 585 347 335 327 320 322 305 305 314 311 289 282 294
286 279 267 279 268 260 259 235 229 214 209 182 169 146 109 60
743 675 585 527 373 360 333 331 336 338 329 326 323 314 298 301
284 279 279 278 262 253 239 226 221 215 198 191 173 157 144 108
930 820 720 631 452 420 386 383 380 355 332 327 314 298 285 267
261 251 231 230 214 196 188 178 173 154 134 130 122 101 90 48
954 842 745 652 528 463 421 439 407 384 357 335 315 295 280 259
243 233 219 211 195 181 166 153 137 121 110 99 82 72 61 40
"""
# Shares of 10,000 for 32 depths in each of 8 layers: the embedded model's held-out trace, 32 experts, top-4.

RECORDED: Final = RouteModel.of_counts(np.array(_RECORDED.split(), np.float64).reshape(8, 32))
