"""gpt-oss: messages on channels, `<|channel|>analysis<|message|>…<|end|>`; a recipient makes a message a call.

The prompt ends with `<|start|>assistant`, so the answer begins in the head of a message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from compute_node.text.parsers.pieces import Content, Piece, Reasoning, ToolCall, Tools
from compute_node.text.parsers.style import Style, arguments_text

__all__ = ["HARMONY", "HarmonyParser"]

_START, _MESSAGE = "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_TO: Final = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.-]{1,128})")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_LONGEST: Final = max(len(end) for end in (*_ENDS, _MESSAGE))


class HarmonyParser:
    """Splits an answer in the harmony form.

    Args:
        tools: that the request offers; a call of anything else is content.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._held = ""
        self._in_head = True
        self._channel = "final"
        self._tool = ""
        self._arguments: list[str] = []

    def push(self, text: str) -> Sequence[Piece]:
        """The pieces that are certain now."""
        pieces: list[Piece] = []
        self._held += text
        while self._read_head() if self._in_head else self._read_body(pieces):
            pass
        return pieces

    def finish(self) -> Sequence[Piece]:
        """The rest; a head without a message is shown as content."""
        pieces: list[Piece] = []
        rest, self._held = self._held, ""
        if self._in_head:
            shown = rest.removeprefix("<|channel|>final")
            if shown and not shown.startswith(("<|", "assistant")):
                pieces.append(Content(shown))
            return pieces
        self._say(rest, pieces)
        self._end_message(pieces)
        return pieces

    def _read_head(self) -> bool:
        head, found, rest = self._held.partition(_MESSAGE)
        if not found:
            return False
        channel, recipient = _CHANNEL.search(head), _TO.search(head)
        self._channel = channel[1] if channel else "final"
        self._tool = recipient[1] if recipient else ""
        self._held, self._in_head = rest, False
        return True

    def _read_body(self, pieces: list[Piece]) -> bool:
        places = [(place, end) for end in _ENDS if (place := self._held.find(end)) >= 0]
        if not places:
            # No end is longer than this, and each begins with the same two characters.
            mark = self._held.find("<", max(0, len(self._held) - _LONGEST + 1))
            cut = len(self._held) if mark < 0 else mark
            self._say(self._held[:cut], pieces)
            self._held = self._held[cut:]
            return False
        place, end = min(places)
        self._say(self._held[:place], pieces)
        self._held = self._held[place + len(end) :]
        self._end_message(pieces)
        return True

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._tool:
            self._arguments.append(text)
        else:
            pieces.append(Reasoning(text) if self._channel == "analysis" else Content(text))

    def _end_message(self, pieces: list[Piece]) -> None:
        if self._tool:
            written = "".join(self._arguments)
            arguments = arguments_text(written) if self._tool in self._tools else None
            pieces.append(Content(written) if arguments is None else ToolCall(self._tool, arguments))
        self._tool, self._arguments, self._in_head = "", [], True


def _unused(_block: str, _tools: Tools) -> None:
    """Calls are whole messages here, not blocks."""


HARMONY: Final = Style(
    "harmony", "<|channel|>", "<|call|>", _unused, (_START, _MESSAGE, "<|constrain|>", "<|end|>", "<|return|>")
)
