"""Decodes given tokens: the same pseudo-random ones for everybody, so that two sides do the same work."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.model import Model
from compute_node.engine.sampler import Sampling, choose_token
from tierd.client.source import Phase

__all__ = ["TokenWalk"]


class TokenWalk:
    """A sequence of a model that is extended by given tokens.

    Args:
        model: to run.
        seed: of the tokens.
    """

    def __init__(self, model: Model, seed: int = 0) -> None:
        self.model = model
        self._sequence = model.cache.take()
        self._generator = np.random.Generator(np.random.Philox(seed))

    def __len__(self) -> int:
        """Tokens of the sequence so far."""
        return len(self._sequence.tokens)

    def step(self) -> NDArray[np.float32]:
        """Extends by one token; its logits, float32 [vocabulary]."""
        row: NDArray[np.float32] = self._extend(int(self._generator.integers(0, self.model.config.vocab_size)))[
            0
        ].copy()
        return row

    def run(self, tokens: int) -> tuple[float, float]:
        """Extends by so many tokens, each chosen greedily from its logits too: (seconds, those outside native code)."""
        drawn = self._generator.integers(0, self.model.config.vocab_size, tokens).tolist()
        greedy, place, phase = Sampling(), len(self), Phase.DECODE
        model, sequence = self.model, self._sequence
        native, begun = model.native_seconds, time.perf_counter()
        for token in drawn:
            logits = model.extend(sequence, [token], phase=phase, keep=False)
            assert logits is not None
            choose_token(logits, place, greedy, likeliest=model.likeliest[0])
            place += 1
        seconds = time.perf_counter() - begun
        return seconds, seconds - (model.native_seconds - native)

    def prefill(self, tokens: int) -> float:
        """Extends by so many tokens, as many at once as the model takes; returns the seconds."""
        prompt = self._generator.integers(0, self.model.config.vocab_size, tokens).tolist()
        begun = time.perf_counter()
        for start in range(0, tokens, self.model.rows):
            part = prompt[start : start + self.model.rows]
            wanted = (-1,) if start + self.model.rows >= tokens else ()
            self.model.extend(self._sequence, part, phase=Phase.PREFILL, logits_of=wanted)
        return time.perf_counter() - begun

    def _extend(self, token: int) -> NDArray[np.float32]:
        logits = self.model.extend(self._sequence, [token], phase=Phase.DECODE, keep=False)
        assert logits is not None
        return logits

    def end(self) -> None:
        """Gives the sequence's place back."""
        self.model.cache.give_back(self._sequence)
