"""Answers that must follow a JSON schema: which tokens may come next, by llguidance.

The library walks a grammar over the bytes of the vocabulary's tokens. Its own limits bound the size of a grammar and
the work of a step; `schema_limits` bounds what is compiled at all.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, Final

import llguidance
import numpy as np
from numpy.typing import NDArray

from compute_node.text.tokenizer import Tokenizer
from tierd.errors import TierdError, UsageError

__all__ = ["CompiledGrammar", "Grammars"]

_FORM: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Blanks stand where most models learnt them and nowhere else: one that may write blanks for ever sometimes does."""
_STATES: Final = 50_000
"""Of the lexer, 1 to 2 kB each."""


class Grammars:
    """Compiles grammars for one vocabulary. From any thread.

    Args:
        tokenizer: whose tokens are chosen.
        vocabulary: number of token ids of the model, at least those of the tokenizer.
        stop_tokens: end an answer; allowed once it is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stop_tokens = stop_tokens
        self._making = threading.Lock()
        self._library: llguidance.LLTokenizer | None = None

    def compile(self, schema: Mapping[str, Any]) -> CompiledGrammar:
        """The grammar of a JSON schema that has passed `check_schema`; takes milliseconds, the first time longer.

        Raises:
            UsageError: the schema says something that cannot be followed, or is beyond the library's limits.
        """
        # `x-guidance` would let the schema change how it is compiled.
        plain = {key: value for key, value in schema.items() if key != "x-guidance"}
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(plain), overrides=_FORM)
        except ValueError as error:  # numbers beyond its own
            raise UsageError(f"the JSON schema cannot be followed: {_one_line(str(error))}") from None
        limits = llguidance.LLParserLimits(max_lexer_states=_STATES, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._words(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise UsageError(f"the JSON schema cannot be followed: {_one_line(matcher.get_error())}")
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise UsageError(f"no answer can follow the JSON schema: {_one_line(trial.get_error())}")
        return CompiledGrammar(matcher, self._vocabulary, self._stop_tokens)

    def _words(self) -> llguidance.LLTokenizer:
        """The vocabulary in the library's form, made once: it takes a while for large ones."""
        with self._making:
            if self._library is None:
                end = min(self._stop_tokens, default=0)
                words: Any = llguidance.TokenizerWrapper(_Words(self._tokenizer, self._vocabulary, end))
                self._library = llguidance.LLTokenizer(words, n_vocab=self._vocabulary)
            return self._library


class CompiledGrammar:
    """A grammar that any number of answers may follow."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int, stop_tokens: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stop_tokens = stop_tokens

    def begin(self, *, after: int | None = None) -> _Follower:
        """A constraint for one answer.

        Args:
            after: a token before which everything is allowed, such as the end of thoughts; None: it holds at once.
        """
        return _Follower(self._matcher.deep_copy(), self._vocabulary, self._stop_tokens, after)


class _Follower:
    """One answer's way through a grammar; a `Constraint` of the engine."""

    def __init__(
        self, matcher: llguidance.LLMatcher, vocabulary: int, stop_tokens: frozenset[int], after: int | None
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stops = np.array(sorted(token for token in stop_tokens if token < vocabulary), np.int64)
        self._after = after

    def mask(self) -> NDArray[np.bool_]:
        """Bool [vocabulary]: what may come next.

        Raises:
            TierdError: the grammar turned out to be beyond the library's limits.
        """
        if self._after is not None:
            allowed = np.ones(self._vocabulary, np.bool_)
            # Thoughts that never end would leave no room for the answer.
            allowed[self._stops] = False
            return allowed
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(packed, bitorder="little", count=self._vocabulary).view(np.bool_)
        allowed[self._stops] = self._matcher.is_accepting()
        return allowed

    def advance(self, token: int) -> None:
        """The token was chosen.

        Raises:
            TierdError: see `mask`.
        """
        if self._after is not None:
            if token == self._after:
                self._after = None
            return
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        """The text is complete and nothing can follow."""
        return self._after is None and self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise TierdError(f"the answer's grammar failed: {_one_line(self._matcher.get_error())}")


class _Words:
    """A vocabulary as the library asks for it: bytes of every token, and which ones are no text."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        for token in range(vocabulary):
            found = b"" if tokenizer.is_special(token) else tokenizer.bytes_of(token)
            if not found:
                # Holes in the numbering and special tokens need a name of their own that no text contains.
                found = b"<|%d|>" % token
                self.special_token_ids.append(token)
            self.tokens.append(found)

    def __call__(self, text: bytes | str) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), special_tokens=False)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
