"""Log-probabilities of a completion: parallel lists of tokens, their values, alternatives and places in the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compute_node.server.logprobs import finite, token_text
from compute_node.serving.requests import PromptScores
from compute_node.text.tokenizer import Tokenizer

__all__ = ["CompletionLogprobs"]


class CompletionLogprobs:
    """Gathers the tokens of one choice.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []
        self._sent = 0
        self._offset = 0

    @property
    def unsent(self) -> bool:
        """There are tokens that `take` has not given yet."""
        return self._sent < len(self._rows)

    def add_prompt(self, prompt: Sequence[int], scores: PromptScores) -> None:
        """The prompt's tokens; the first has no probability."""
        for token, logprob, top in zip(prompt, scores.logprobs, scores.top, strict=True):
            self._add(token, logprob, top, known=logprob is not None)

    def add(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> None:
        """A token of the answer."""
        self._add(token, logprob, top, known=True)

    def take(self) -> dict[str, Any]:
        """The tokens since the last call."""
        start, self._sent = self._sent, len(self._rows)
        return self._lists(start)

    def whole(self) -> dict[str, Any]:
        """All tokens."""
        return self._lists(0)

    def _add(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]], *, known: bool) -> None:
        text = token_text(self._tokenizer, token)
        others = {token_text(self._tokenizer, other): finite(value) for other, value in top} if known else None
        self._rows.append((text, finite(logprob) if known else None, others, self._offset))
        self._offset += len(text)

    def _lists(self, start: int) -> dict[str, Any]:
        rows = self._rows[start:]
        return {
            "tokens": [row[0] for row in rows],
            "token_logprobs": [row[1] for row in rows],
            "top_logprobs": [row[2] for row in rows],
            "text_offset": [row[3] for row in rows],
        }
