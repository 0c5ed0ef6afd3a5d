"""What a person types while an answer is written waits for the prompt, instead of appearing within the answer."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["unechoed"]

_LOCAL_MODES = 3
"""Where `tcgetattr` has them."""


@contextmanager
def unechoed() -> Iterator[None]:
    """A terminal on standard input shows nothing of what is typed meanwhile; nothing of it is lost."""
    try:
        stream = sys.stdin.fileno()
        before = termios.tcgetattr(stream)
    except (termios.error, OSError, ValueError):
        yield  # no terminal
        return
    silent = list(before)
    silent[_LOCAL_MODES] &= ~termios.ECHO
    termios.tcsetattr(stream, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)
