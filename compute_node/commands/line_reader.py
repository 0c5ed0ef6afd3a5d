"""What a person types: one message at a time, which may be many lines.

Lines that arrive together were pasted and are one message. On a terminal whose line editor knows it, a paste is marked
by the terminal itself ("bracketed paste") and lands in the edited line as a whole. A message in triple quotes may have
line breaks wherever it likes.
"""

from __future__ import annotations

import codecs
import importlib
import io
import locale
import os
import select
import sys
from typing import Final

from tierd.errors import UsageError

__all__ = ["LineReader"]

_QUOTES: Final = '"""'
_PASTE_SECONDS: Final = 0.05
"""The longest pause between two lines of one paste."""
_MAX_BYTES: Final = 16 << 20


class LineReader:
    """Reads messages from standard input: from a terminal with a prompt, from anything else line by line."""

    def __init__(self) -> None:
        self._terminal = sys.stdin.isatty()
        self._edited = self._terminal and _line_editor()

    def message(self) -> str | None:
        """The next message without blanks around it; None at the end of input.

        Raises:
            UsageError: it is not UTF-8, or too large.
            KeyboardInterrupt: Ctrl-C at the prompt.
        """
        line = self._line("> ")
        if line is None:
            return None
        if not line.lstrip().startswith(_QUOTES):
            return line.strip()
        lines = [line.lstrip().removeprefix(_QUOTES)]
        while _QUOTES not in lines[-1]:
            more = self._line("… ")
            if more is None:
                break
            lines.append(more)
        return "\n".join(lines).partition(_QUOTES)[0].strip("\n")

    def _line(self, prompt: str) -> str | None:
        """A line, or all lines of a paste."""
        if self._edited:
            try:
                return input(prompt)
            except EOFError:
                return None
        if self._terminal:
            sys.stdout.write(prompt)
            sys.stdout.flush()
        data = sys.stdin.buffer.readline(_MAX_BYTES)
        # A terminal hands over one line at a time, so what is there already came with it.
        while self._terminal and data.endswith(b"\n") and len(data) < _MAX_BYTES and _more_at_once():
            more = sys.stdin.buffer.readline(_MAX_BYTES)
            if not more:
                break
            data += more
        if len(data) >= _MAX_BYTES:
            raise UsageError(f"a message of {_MAX_BYTES} bytes or more is refused")
        return _text(data)


def _more_at_once() -> bool:
    return bool(select.select([sys.stdin.fileno()], [], [], _PASTE_SECONDS)[0])


def _text(data: bytes) -> str | None:
    if not data:
        return None
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8: byte {error.start} of a line") from None


def _line_editor() -> bool:
    """Sets up GNU readline with marked pastes; False where it is missing or would garble UTF-8."""
    if codecs.lookup(locale.nl_langinfo(locale.CODESET)).name != "utf-8" or os.environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        readline = importlib.import_module("readline")
    except ImportError:
        return False
    if "libedit" in (readline.__doc__ or ""):
        return False
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is refused with its message, not at once
    # Python turns this off for its own prompt.
    readline.parse_and_bind("set enable-bracketed-paste on")
    return True
