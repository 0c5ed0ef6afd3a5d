"""What an answer is made of, in the order in which it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Content", "MoreArguments", "OutputParser", "Piece", "PlainText", "Reasoning", "ToolCall", "Tools"]

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each tool that a request offers, by its name."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thoughts before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins.

    Attributes:
        name: of the tool.
        arguments: JSON text of an object, or its beginning if `MoreArguments` follow.
        id: as the model named the call; None where its style has no names for calls.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class MoreArguments:
    """Further JSON text of the latest call's arguments."""

    text: str


Piece = Reasoning | Content | ToolCall | MoreArguments


class OutputParser(Protocol):
    """Splits a text that comes bit by bit; what may turn out to be a marker is held back until that is decided."""

    def push(self, text: str) -> Sequence[Piece]:
        """The pieces that are certain now."""

    def finish(self) -> Sequence[Piece]:
        """The rest, once no more text comes. An unfinished call is completed if it can be read, else it is content."""


class PlainText:
    """Everything is content."""

    def push(self, text: str) -> Sequence[Piece]:
        """The text."""
        return [Content(text)] if text else []

    def finish(self) -> Sequence[Piece]:
        """Nothing is held back."""
        return []
