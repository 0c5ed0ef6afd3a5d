"""How likely a model finds given tokens: perplexity of a text, and log-likelihood of continuations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.language_model import LanguageModel
from tierd.client.source import Phase
from tierd.errors import LimitExceeded, UsageError

__all__ = ["TextLikelihood", "continuation_likelihood", "log_probabilities", "text_likelihood"]


@dataclass(frozen=True, slots=True)
class TextLikelihood:
    """What was scored, and how surprising it was.

    Attributes:
        tokens: scored; the first one of a text has nothing before it and is not.
        nats: the sum of their negative log-likelihoods.
    """

    tokens: int
    nats: float

    @property
    def perplexity(self) -> float:
        """Exp of the mean negative log-likelihood."""
        return math.exp(self.nats / self.tokens)


def log_probabilities(logits: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float64]:
    """The log-probability of one token in each row.

    Args:
        logits: float32 [n, vocabulary].
        tokens: n ids.

    Returns:
        float64 [n].
    """
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    chosen = wide[np.arange(len(tokens)), list(tokens)]
    found: NDArray[np.float64] = chosen - np.log(np.exp(wide).sum(axis=1))
    return found


def text_likelihood(
    model: LanguageModel,
    tokens: Sequence[int],
    *,
    window: int,
    overlap: int,
    progress: Callable[[int], None] | None = None,
) -> TextLikelihood:
    """Scores a text in windows, each of which begins with the last `overlap` tokens of the one before.

    Every token but the first is scored exactly once, with at least `overlap` tokens before it where there are so many.

    Args:
        model: scores.
        tokens: of the text, at least two.
        window: tokens of a window, at most the model's context.
        overlap: below `window`.
        progress: told how many tokens have been scored.

    Raises:
        UsageError: nothing to score, or windows that cannot be.
    """
    if len(tokens) < 2:
        raise UsageError("a text of less than two tokens has nothing to score")
    if not 2 <= window <= model.context or not 0 < overlap < window:
        raise UsageError(f"windows of {window} tokens with {overlap} in common do not fit a context of {model.context}")
    scored, nats = 1, 0.0
    while scored < len(tokens):
        start = max(0, scored - overlap)
        end = min(start + window, len(tokens))
        nats -= float(_score(model, tokens[start:end], scored - start).sum())
        scored = end
        if progress is not None:
            progress(scored - 1)
    return TextLikelihood(len(tokens) - 1, nats)


def continuation_likelihood(model: LanguageModel, context: Sequence[int], continuation: Sequence[int]) -> float:
    """Log-likelihood of a continuation, in nats; of the context only what fits before it is seen.

    Raises:
        UsageError: an empty context or continuation.
        LimitExceeded: the continuation alone is longer than the model's context.
    """
    if not context or not continuation:
        raise UsageError("a context and a continuation have at least one token each")
    room = model.context - len(continuation)
    if room < 1:
        raise LimitExceeded(f"a continuation of {len(continuation)} tokens does not fit a context of {model.context}")
    seen = list(context)[-room:]
    return float(_score(model, [*seen, *continuation], len(seen)).sum())


def _score(model: LanguageModel, tokens: Sequence[int], first: int) -> NDArray[np.float64]:
    """Log-probabilities of tokens `first` and later, each after all those before it."""
    sequence = model.cache.take()
    found = []
    try:
        for start in range(0, len(tokens) - 1, model.rows):
            part = list(tokens[start : min(start + model.rows, len(tokens) - 1)])
            wanted = [place for place in range(len(part)) if start + place + 1 >= first]
            logits = model.extend(sequence, part, phase=Phase.PREFILL, logits_of=wanted)
            assert logits is not None
            if wanted:
                found.append(log_probabilities(logits, [tokens[start + place + 1] for place in wanted]))
    finally:
        model.cache.give_back(sequence)
    return np.concatenate(found)
