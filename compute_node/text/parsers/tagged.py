"""Answers in which thoughts stand between `<think>` tags and calls between the markers of a style."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from compute_node.text.parsers.pieces import Content, Piece, Reasoning, Tools
from compute_node.text.parsers.style import Style

__all__ = ["THINK", "THOUGHT", "TaggedParser"]

THINK: Final = "<think>"
THOUGHT: Final = "</think>"


class _Part(Enum):
    """Where in the answer we are."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALLS = "calls"


class TaggedParser:
    """Splits an answer at its tags.

    Thoughts come first or not at all. White space at the borders of thoughts and calls belongs to the tags; all other
    text comes through as it is.

    Args:
        style: of tool calls; None: there are none.
        tools: that the request offers.
        reasons: the model may think between tags.
        thinking: the prompt has opened the thoughts already.
    """

    def __init__(self, style: Style | None, tools: Tools, *, reasons: bool, thinking: bool = False) -> None:
        self._style = style
        self._tools = tools
        self._reasons = reasons
        self._part = _Part.REASONING if thinking else _Part.CONTENT
        self._held = ""
        self._block: list[str] = []
        self._opened = ""  # what opened a block, and the space before it
        self._closes_bare = False  # a marker that closes may follow a call that none has opened
        self._space = ""
        self._at_border = thinking
        self._answered = False

    def push(self, text: str) -> Sequence[Piece]:
        """The pieces that are certain now."""
        pieces: list[Piece] = []
        self._held += text
        while True:
            tags = self._tags()
            places = [(place, tag) for tag in tags if (place := self._held.find(tag)) >= 0]
            if not places:
                keep = max((_overlap(self._held, tag) for tag in tags), default=0)
                cut = len(self._held) - keep
                self._say(self._held[:cut], pieces)
                self._held = self._held[cut:]
                return pieces
            place, tag = min(places)
            self._say(self._held[:place], pieces)
            self._held = self._held[place:]
            if tag in self._tags():
                self._held = self._held[len(tag) :]
                self._turn(tag, pieces)

    def finish(self) -> Sequence[Piece]:
        """The rest; a block that was not closed is read as far as it goes."""
        pieces: list[Piece] = []
        self._say(self._held, pieces)
        self._held = ""
        if self._part is _Part.CALLS:
            self._close("", pieces)
        elif self._space and self._part is _Part.CONTENT:
            pieces.append(Content(self._space))
        self._space = ""
        return pieces

    def _tags(self) -> tuple[str, ...]:
        if self._part is _Part.REASONING:
            return (THOUGHT,)
        if self._part is _Part.CALLS:
            assert self._style is not None
            ends = (self._style.end, self._style.bare_end if self._opens_bare else "")
            return tuple(filter(None, ends))
        opening = (THINK,) if self._reasons and not self._answered else ()
        if self._style is None:
            return opening
        closing = self._style.end if self._closes_bare else ""
        return tuple(filter(None, (*opening, self._style.begin, self._style.bare, closing)))

    def _turn(self, tag: str, pieces: list[Piece]) -> None:
        """From one part into the next."""
        if self._part is _Part.CALLS:
            self._at_border = self._close(tag, pieces)
            self._part = _Part.CONTENT
            return
        if self._part is _Part.CONTENT and tag != THINK:
            if self._style is None or tag != self._style.end:
                self._part, self._opened = _Part.CALLS, self._space + tag
            self._closes_bare = False
        elif tag == THINK:
            self._part, self._reasons = _Part.REASONING, False
        else:
            self._part = _Part.CONTENT
        self._space = ""
        self._at_border = True

    def _close(self, tag: str, pieces: list[Piece]) -> bool:
        """Reads a block; False if it cannot be read: then it was text that only looked like a call."""
        style = self._style
        assert style is not None
        inside, self._block = "".join(self._block), []
        whole, bare = f"{self._opened}{inside}{tag}", self._opens_bare
        calls = style.read(whole if bare else inside, self._tools)
        if calls is None or (bare and not all(call.name in self._tools for call in calls)):
            pieces.append(Content(whole))
            return False
        self._closes_bare = bare and tag != style.end
        pieces += calls
        return True

    @property
    def _opens_bare(self) -> bool:
        """Whether the block was opened by a call without its marker."""
        return self._style is not None and self._style.bare != "" and self._opened.endswith(self._style.bare)

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._part is _Part.CALLS:
            self._block.append(text)
            return
        if self._at_border:
            text = text.lstrip()
            if not text:
                return
            self._at_border = False
        if self._part is _Part.CONTENT and text.strip():
            self._answered, self._closes_bare = True, False
        shown, self._space = self._space + text, ""
        if self._tags():
            # Space is held back, since it may stand before a tag.
            kept = shown.rstrip()
            self._space = shown[len(kept) :]
            if not kept:
                return
            shown = kept
        pieces.append(Content(shown) if self._part is _Part.CONTENT else Reasoning(shown))


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` with which `tag` begins, short of all of it."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
