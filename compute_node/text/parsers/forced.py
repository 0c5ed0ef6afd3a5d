"""Calls that a request insists on: the answer is constrained to JSON, whatever the model's own style is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from compute_node.text.parsers.pieces import Content, MoreArguments, OutputParser, Piece, ToolCall, Tools

__all__ = ["ForcedCall", "forced_schema"]

_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')


def forced_schema(tools: Tools) -> dict[str, Any]:
    """The schema of the constrained answer: one tool's arguments, or a choice of `{"name": …, "arguments": …}`."""
    if len(tools) == 1:
        return dict(next(iter(tools.values())))
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": _moved(schema, place)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for place, (name, schema) in enumerate(tools.items())
        ]
    }


def _moved(part: Any, place: int) -> Any:
    """A schema that has become a part of another one: its references lead to itself, where it is now."""
    if isinstance(part, Mapping):
        return {key: _reference(value, place) if key == "$ref" else _moved(value, place) for key, value in part.items()}
    return [_moved(one, place) for one in part] if isinstance(part, list) else part


def _reference(target: Any, place: int) -> Any:
    if not isinstance(target, str):
        return _moved(target, place)
    return f"#/anyOf/{place}/properties/arguments{target[1:]}" if target.startswith("#") else target


class ForcedCall:
    """Makes one tool call of content that follows `forced_schema`, as it comes.

    Args:
        inner: splits off thoughts.
        tools: that may be called.
    """

    def __init__(self, inner: OutputParser, tools: Tools) -> None:
        self._inner = inner
        self._only = next(iter(tools)) if len(tools) == 1 else None
        self._begun = False
        self._held = ""

    def push(self, text: str) -> Sequence[Piece]:
        """The pieces that are certain now."""
        return self._forced(self._inner.push(text))

    def finish(self) -> Sequence[Piece]:
        """The rest of the arguments; without the brace that closes the choice."""
        pieces = self._forced(self._inner.finish())
        rest, self._held = self._held.rstrip(), ""
        if not self._begun:
            return [*pieces, Content(rest)] if rest else pieces
        rest = rest if self._only is not None else rest.removesuffix("}")
        return [*pieces, MoreArguments(rest)] if rest else pieces

    def _forced(self, found: Sequence[Piece]) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in found:
            if not isinstance(piece, Content):
                pieces.append(piece)
                continue
            self._held += piece.text
            if not self._begun:
                self._begin(pieces)
            if self._begun and (ready := self._ready()):
                pieces.append(MoreArguments(ready))
        return pieces

    def _begin(self, pieces: list[Piece]) -> None:
        """The name of the tool, once its arguments have begun."""
        name, rest = self._only or "", self._held.lstrip()
        if self._only is None:
            head = _HEAD.match(self._held)
            if head is None:
                return
            name, rest = json.loads(head[1]), self._held[head.end() :].lstrip()
        if rest:
            self._held, self._begun = rest, True
            pieces.append(ToolCall(name, ""))

    def _ready(self) -> str:
        """All that is surely not the end: the last brace, and space before it, may belong to the choice."""
        cut = len(self._held.rstrip().removesuffix("}").rstrip()) if self._only is None else len(self._held.rstrip())
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready
