"""What the first layers of the step after this one will want, before anybody knows its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from compute_node.kernels import Segment
from compute_node.models.look_ahead import LookAhead
from compute_node.prediction.layer_guesses import LayerGuesses
from compute_node.prediction.likely_tokens import Likely, LikelyTokens
from compute_node.prediction.next_guess import NextGuess, NextSaid
from compute_node.prediction.token_scores import TokenScores
from tierd.policy.token_table import TokenTable

__all__ = ["NextStep"]

F32 = NDArray[np.float32]


class NextStep:
    """Foresees by tokens that may be sampled, where the head can be asked, and by what followed the present ones.

    Args:
        look: whose `state` is that of the last layer when `ask` is called.
        run: runs a segment.
        table: counts of experts by token; others fill it.
        tokens: what it says of a layer.
        guesses: how far that came true.
    """

    def __init__(
        self,
        look: LookAhead,
        run: Callable[[Segment], object],
        table: TokenTable,
        tokens: TokenScores,
        guesses: LayerGuesses,
    ) -> None:
        head = look.candidates
        self._likely_tokens = None if head is None else LikelyTokens(head, run, table.now)
        self._tokens = tokens
        self._guesses = guesses
        self._likely: list[Likely] = []
        self._foreseen: dict[int, list[NextSaid]] = {}  # by place, of each row of the step after this one
        self._said: dict[int, list[NextSaid]] = {}  # of this step, by the one before

    def rehearse(self) -> None:
        """Compiles what is compiled at its first use."""
        wanted = self._tokens.next_step(0, Likely(np.full(1, -1), np.ones(1, np.float32)), 0)
        guess = NextGuess()
        guess.learn(guess.guess(wanted, np.ones(len(wanted), np.bool_)), np.zeros(1, np.int32))
        if self._likely_tokens is not None:
            self._likely_tokens.rehearse()

    def begin(self, tokens: Sequence[int], *, follows: bool) -> None:
        """A step begins that computes on these tokens; it may be the one that the last step foresaw."""
        self._said, self._foreseen = self._foreseen if follows else {}, {}
        if self._said and self._likely_tokens is not None:
            self._likely_tokens.learn(tokens)

    @property
    def asked(self) -> bool:
        """Whether that was done in this step."""
        return bool(self._foreseen)

    def ask(self, rows: int) -> None:
        """The look-ahead's state is that of the last layer, of so many rows: which tokens may come of it?"""
        self._likely = [] if self._likely_tokens is None else self._likely_tokens.ask(rows)

    def wanted(self, place: int, tokens: Sequence[int], absent: NDArray[np.bool_]) -> F32:
        """Probability that at least one row of the next step wants an expert of a layer: float32 [experts].

        Args:
            place: of the layer.
            tokens: of this step's rows, of which `ask` was told.
            absent: bool [experts], not in RAM now.
        """
        guess, likely = self._guesses.next_step(place), self._likely or (None,) * len(tokens)
        said = [
            guess.guess(self._tokens.next_step(token, may_come, place), absent)
            for token, may_come in zip(tokens, likely, strict=True)
        ]
        self._foreseen[place] = said
        if len(said) == 1:
            return said[0].probabilities
        by_nobody = np.prod([1 - row.probabilities for row in said], axis=0)
        result: F32 = 1 - by_nobody
        return result

    def lessons(self, place: int, routes: NDArray[np.int32]) -> Iterator[Callable[[], None]]:
        """What is to be learned, at leisure, of what the routers of this step chose: int32 [rows, top_k]."""
        guess = self._guesses.next_step(place)
        for said, chosen in zip(self._said.pop(place, []), routes, strict=False):
            yield partial(guess.learn, said, chosen.copy())

    def refresh(self) -> None:
        """The step is complete: renews what is asked about, if it is time for that."""
        if self._likely_tokens is not None:
            self._likely_tokens.refresh()
