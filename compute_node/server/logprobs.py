"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from compute_node.text.tokenizer import Tokenizer

__all__ = ["chat_entry", "finite", "token_text"]

_LEAST: Final = -9999.0
"""JSON has no infinity; this is what OpenAI's servers say instead."""


def finite(logprob: float | None) -> float:
    """A log-probability as JSON can hold it."""
    return _LEAST if logprob is None or not math.isfinite(logprob) else logprob


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; what is no whole character is shown by U+FFFD."""
    return tokenizer.bytes_of(token).decode(errors="replace")


def chat_entry(
    tokenizer: Tokenizer, token: int, logprob: float | None, top: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """One element of `logprobs.content` of a chat completion."""
    return _entry(tokenizer, token, logprob) | {"top_logprobs": [_entry(tokenizer, other, lp) for other, lp in top]}


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.bytes_of(token)),
    }
