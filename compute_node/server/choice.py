"""One choice of an answer as it grows: from tokens to pieces, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence

from compute_node.engine.stop import StopStrings
from compute_node.serving.requests import Done, FinishReason, Token, Usage
from compute_node.text.parsers.pieces import Content, OutputParser, Piece, ToolCall
from compute_node.text.tokenizer import Tokenizer

__all__ = ["Choice", "TextRules"]


class TextRules:
    """What all choices of a request have in common.

    Args:
        tokenizer: of the model.
        stops: strings that end an answer.
        markers: texts that a parser looks for. Where they are special tokens, which the engine does not show, the text
            is decoded here, and the stop strings are looked for in the content alone.
        stop_tokens: end an answer and are no part of it.
        one_call: drop all tool calls after the first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: tuple[str, ...] = (),
        markers: Sequence[str] = (),
        stop_tokens: frozenset[int] = frozenset(),
        one_call: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.shown = tokenizer.special_among(markers)
        self.stop_tokens = stop_tokens
        self.one_call = one_call

    @property
    def engine_stops(self) -> tuple[str, ...]:
        """Stop strings that the engine shall look for."""
        return () if self.shown else self.stops


class Choice:
    """Takes one choice's events.

    Attributes:
        usage: what it took; None until it has ended.
        calls: tool calls so far.
        stopped: it needs no more tokens.
        stopped_by: the stop string that ended it; None if none did.
    """

    def __init__(self, rules: TextRules, parser: OutputParser) -> None:
        self._rules = rules
        self._parser = parser
        self._decoder = rules.tokenizer.stream(continues=True, shown=rules.shown)
        self._stop = StopStrings(rules.stops if rules.shown else ())
        self._seen: list[str] = []
        self._reason = FinishReason.STOP
        self.usage: Usage | None = None
        self.calls = 0
        self.stopped = False
        self.stopped_by: str | None = None

    def token(self, event: Token) -> Sequence[Piece]:
        """The pieces that a token makes certain."""
        if self.stopped:
            return []
        rules = self._rules
        decoded = self._decoder.push(event.token) if rules.shown or rules.stops else ""
        if rules.stops and not rules.shown:
            self._seen.append(decoded)
        return self._kept(self._parser.push(decoded if rules.shown else event.text))

    def done(self, event: Done) -> Sequence[Piece]:
        """The last pieces."""
        self.usage = event.usage
        if self.stopped:
            return []
        self._reason = event.reason
        tail = self._decoder.flush() if self._rules.shown else event.text
        pieces = self._kept([*self._parser.push(tail), *self._parser.finish()])
        if rest := self._stop.flush():
            pieces.append(Content(rest))
        if event.reason is FinishReason.STOP and not self.stopped:
            self.stopped_by = self._first_stop()
        return pieces

    @property
    def reason(self) -> FinishReason:
        """Why it ended."""
        return FinishReason.STOP if self.stopped else self._reason

    def _first_stop(self) -> str | None:
        text = "".join(self._seen)
        found = [(place, stop) for stop in self._rules.stops if (place := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _kept(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Without what follows a stop string, or the one call that is allowed."""
        kept: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Content) and self._rules.shown:
                self._seen.append(piece.text)
                if text := self._stop.push(piece.text):
                    kept.append(Content(text))
                if self._stop.stopped:
                    self.stopped, self.stopped_by = True, self._first_stop()
                    break
                continue
            if isinstance(piece, ToolCall):
                if self._rules.one_call and self.calls:
                    self.stopped = True
                    break
                self.calls += 1
            kept.append(piece)
        return kept
